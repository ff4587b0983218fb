// Exact row arithmetic: from a row as stored to the bits that the engine's own kernel would give.
//
// Everything is done in integers, so the result does not depend on the flush-to-zero mode that an
// engine may have set. The contract for e4m3_e8m0 is fp32(e4m3) * 2^(scale - 127), computed in
// fp32 with subnormals, rounded once to bf16 (nearest, ties to even). A scale byte of 0 is 2^-127.
// NaN payloads and scales of 255 are refused when a table is staged; here they give a NaN.
#pragma once

#include <cstdint>
#include <string>

namespace tierd {

enum class RowFormat : std::uint32_t {
    e4m3_e8m0,  // dim payload bytes, then dim / 32 scale bytes
    e4m3,       // dim payload bytes; the table's scalar scale is the engine's business
    bf16,       // dim bf16 values
    raw,        // dim bytes
};

RowFormat parse_row_format(const std::string& name);  // std::invalid_argument

class RowDecoder {
  public:
    // `canonical_zero` turns -0 into +0, as the all-reduce of a sharded engine does; raw rows are
    // never changed. `portable` keeps to the baseline instruction set; tests compare the two.
    // std::invalid_argument for a dim that the format does not have.
    RowDecoder(RowFormat format, std::uint32_t dim, bool canonical_zero, bool portable = false);

    std::uint32_t row_bytes() const { return row_bytes_; }        // of a row as stored
    std::uint32_t element_bytes() const { return element_bytes_; }  // of one value of the output
    std::uint32_t dim() const { return dim_; }
    RowFormat format() const { return format_; }
    std::uint32_t output_bytes() const { return dim_ * element_bytes_; }

    // `out` must be aligned to element_bytes.
    void decode(const std::uint8_t* row, void* out) const { decode_(*this, row, out); }

    // What -0 keeps of its sign: 0x8000 or nothing.
    std::uint16_t zero_sign() const { return zero_sign_; }

  private:
    using Decode = void (*)(const RowDecoder&, const std::uint8_t*, void*);

    RowFormat format_;
    std::uint32_t dim_;
    std::uint32_t row_bytes_;
    std::uint32_t element_bytes_;
    std::uint16_t zero_sign_;
    Decode decode_;
};

}  // namespace tierd

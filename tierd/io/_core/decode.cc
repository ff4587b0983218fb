#include "decode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "cpu.h"
#include "page.h"

namespace tierd {

namespace {

constexpr std::uint32_t kBlock = 32;         // values that share one scale
constexpr std::uint32_t kUnitScale = 127;    // the scale byte of 2^0
constexpr std::uint16_t kNan = 0x7fc0;
constexpr std::uint16_t kSign = 0x8000;
constexpr std::uint32_t kScaleMin = 10;   // below it the smallest payload gives a bf16 subnormal
constexpr std::uint32_t kScaleMax = 246;  // above it the largest payload overflows
constexpr std::uint32_t kEdgeScales = kScaleMin + (255 - kScaleMax);

// Payload times scale for every scale between the edges, where each product is a normal bf16
// number or zero and nothing is rounded.
//
// With m the 7 bits of the magnitude, an e4m3 number from 2^-6 on has the bf16 bits 16 m plus a
// constant: both formats keep exponent and mantissa side by side, bf16 with four more bits of
// mantissa. Below (m = 1..7) e4m3 is linear where bf16 is logarithmic; there the bits lie on lines
// twice, four and eight times as steep. The curve is concave, so it is the least of the lines:
//     m                1    2    3   4   5   6   7    8    9
//     bits - base   -256 -128  -64   0  32  64  96  128  144
TIERD_ALWAYS_INLINE void plain_body(const std::uint8_t* __restrict payload, std::uint32_t count,
                                    std::uint32_t scale, std::uint16_t zero_sign,
                                    std::uint16_t* __restrict out) {
    const auto base = static_cast<std::int16_t>((static_cast<int>(scale) - 7) * 128);
    for (std::uint32_t i = 0; i < count; ++i) {
        const auto p = static_cast<std::int16_t>(payload[i]);
        const auto m = static_cast<std::int16_t>(p & 0x7f);
        const auto steep8 = static_cast<std::int16_t>((m << 7) - 384);
        const auto steep4 = static_cast<std::int16_t>((m << 6) - 256);
        const auto steep2 = static_cast<std::int16_t>((m << 5) - 128);
        const auto steep1 = static_cast<std::int16_t>(m << 4);
        const auto least = std::min(std::min(steep8, steep4), std::min(steep2, steep1));
        // Masks instead of choices: gcc makes byte shuffles of the latter.
        const auto nonzero = static_cast<std::int16_t>(-m >> 15);
        const auto nan = static_cast<std::int16_t>((0x7e - m) >> 15);
        const auto bits = static_cast<std::int16_t>((least + base) | (nan & kNan));
        const auto sign = static_cast<std::int16_t>(p << 8);
        out[i] = static_cast<std::uint16_t>(((bits | (sign & kSign)) & nonzero) |
                                            (sign & zero_sign));
    }
}

// The same product for any scale, by the definition.
std::uint16_t product(std::uint32_t payload, std::uint32_t scale) {
    const auto sign = static_cast<std::uint16_t>((payload & 0x80) << 8);
    const std::uint32_t magnitude = payload & 0x7f;
    if (magnitude == 0x7f || scale == 255) return kNan | sign;
    if (magnitude == 0) return sign;
    // value = significand * 2^exponent
    const std::uint32_t e = magnitude >> 3;
    const std::uint32_t significand = e == 0 ? magnitude : 8 + (magnitude & 7);
    const int exponent = static_cast<int>(std::max(e, 1u)) - 10 + static_cast<int>(scale) - 127;
    const int top = std::bit_width(significand) - 1;
    if (exponent + top > 127) return 0x7f80 | sign;  // fp32 overflows to infinity, so does bf16
    if (exponent + top >= -126) {
        const std::uint32_t fraction = (significand << (7 - top)) & 0x7f;
        const auto biased = static_cast<std::uint32_t>(exponent + top + 127);
        return static_cast<std::uint16_t>(biased << 7 | fraction) | sign;
    }
    // A subnormal counts units of 2^-133. Rounding up into the first normal number needs no care:
    // its bits follow those of the largest subnormal.
    const int shift = -133 - exponent;
    if (shift <= 0) return static_cast<std::uint16_t>(significand << -shift) | sign;
    const std::uint32_t whole = significand >> shift;
    const std::uint32_t rest = significand & ((1u << shift) - 1);
    const std::uint32_t half = 1u << (shift - 1);
    const bool up = rest > half || (rest == half && (whole & 1) != 0);
    return static_cast<std::uint16_t>(whole + (up ? 1 : 0)) | sign;
}

using EdgeLine = std::array<std::uint16_t, 256>;

// Products of the few scales that need subnormals or overflow, made once.
const EdgeLine& edge_line(std::uint32_t scale) {
    static const auto lines = [] {
        std::array<EdgeLine, kEdgeScales> all{};
        for (std::uint32_t i = 0; i < kEdgeScales; ++i)
            for (std::uint32_t p = 0; p < 256; ++p)
                all[i][p] = product(p, i < kScaleMin ? i : i - kScaleMin + kScaleMax + 1);
        return all;
    }();
    return lines[scale < kScaleMin ? scale : scale - kScaleMax - 1 + kScaleMin];
}

void edge_block(const std::uint8_t* payload, std::uint32_t scale, std::uint16_t zero_sign,
                std::uint16_t* out) {
    const EdgeLine& line = edge_line(scale);
    for (std::uint32_t i = 0; i < kBlock; ++i) {
        const std::uint16_t bits = line[payload[i]];
        out[i] = (bits & 0x7fff) == 0 ? bits & zero_sign : bits;
    }
}

TIERD_ALWAYS_INLINE void scaled_body(const RowDecoder& d, const std::uint8_t* row, void* out) {
    auto* bits = static_cast<std::uint16_t*>(out);
    const std::uint8_t* scales = row + d.dim();
    for (std::uint32_t b = 0; b < d.dim() / kBlock; ++b) {
        const std::uint32_t scale = scales[b];
        if (scale >= kScaleMin && scale <= kScaleMax) [[likely]]
            plain_body(row + b * kBlock, kBlock, scale, d.zero_sign(), bits + b * kBlock);
        else
            edge_block(row + b * kBlock, scale, d.zero_sign(), bits + b * kBlock);
    }
}

// Each body is compiled twice: for the baseline instruction set and, on x86-64, for AVX2.
void scaled_base(const RowDecoder& d, const std::uint8_t* row, void* out) {
    scaled_body(d, row, out);
}
void payload_base(const RowDecoder& d, const std::uint8_t* row, void* out) {
    plain_body(row, d.dim(), kUnitScale, d.zero_sign(), static_cast<std::uint16_t*>(out));
}
// (TIERD_AVX2 says nothing elsewhere, and cpu().avx2 is false there.)
TIERD_AVX2 void scaled_avx2(const RowDecoder& d, const std::uint8_t* row, void* out) {
    scaled_body(d, row, out);
}
TIERD_AVX2 void payload_avx2(const RowDecoder& d, const std::uint8_t* row, void* out) {
    plain_body(row, d.dim(), kUnitScale, d.zero_sign(), static_cast<std::uint16_t*>(out));
}

void copy_row(const RowDecoder& d, const std::uint8_t* row, void* out) {
    std::memcpy(out, row, d.row_bytes());
}

void copy_bf16_canonical(const RowDecoder& d, const std::uint8_t* row, void* out) {
    auto* bits = static_cast<std::uint16_t*>(out);
    std::memcpy(bits, row, d.row_bytes());
    for (std::uint32_t i = 0; i < d.dim(); ++i)
        bits[i] = bits[i] == 0x8000 ? std::uint16_t{0} : bits[i];
}

}  // namespace

RowFormat parse_row_format(const std::string& name) {
    if (name == "e4m3_e8m0") return RowFormat::e4m3_e8m0;
    if (name == "e4m3") return RowFormat::e4m3;
    if (name == "bf16") return RowFormat::bf16;
    if (name == "raw") return RowFormat::raw;
    throw std::invalid_argument("row_format must be e4m3_e8m0, e4m3, bf16 or raw, got '" + name +
                                "'");
}

RowDecoder::RowDecoder(RowFormat format, std::uint32_t dim, bool canonical_zero, bool portable)
    : format_(format),
      dim_(dim),
      element_bytes_(format == RowFormat::raw ? 1 : 2),
      zero_sign_(canonical_zero ? 0 : 0x8000) {
    if (dim == 0 || dim > kRowBytesMax)
        throw std::invalid_argument("dim must be between 1 and " + std::to_string(kRowBytesMax) +
                                    ", got " + std::to_string(dim));
    const bool avx2 = cpu().avx2 && !portable;
    switch (format) {
        case RowFormat::e4m3_e8m0:
            if (dim % kBlock != 0)
                throw std::invalid_argument("dim of e4m3_e8m0 rows must be a multiple of 32, got " +
                                            std::to_string(dim));
            row_bytes_ = dim + dim / kBlock;
            decode_ = avx2 ? scaled_avx2 : scaled_base;
            break;
        case RowFormat::e4m3:
            row_bytes_ = dim;
            decode_ = avx2 ? payload_avx2 : payload_base;
            break;
        case RowFormat::bf16:
            row_bytes_ = 2 * dim;
            decode_ = canonical_zero ? copy_bf16_canonical : copy_row;
            break;
        case RowFormat::raw:
            row_bytes_ = dim;
            decode_ = copy_row;
            break;
    }
    if (row_bytes_ > kRowBytesMax)
        throw std::invalid_argument("a row of " + std::to_string(row_bytes_) +
                                    " bytes does not fit a page");
}

}  // namespace tierd

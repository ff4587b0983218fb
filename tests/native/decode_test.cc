// Row arithmetic against the definition in floating point, in every flush-to-zero mode.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "check.h"
#include "decode.h"

namespace tierd {
namespace {

// The value in double precision, where nothing here is ever rounded or subnormal.
double value_of(unsigned payload, unsigned scale) {
    const unsigned e = payload >> 3 & 15, m = payload & 7;
    const int exponent = static_cast<int>(e);
    const double magnitude = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, exponent - 10);
    const double value = (payload & 0x80) != 0 ? -magnitude : magnitude;
    return std::ldexp(value, static_cast<int>(scale) - 127);
}

std::uint16_t bf16_of(double value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    if (magnitude >= std::ldexp(1, 128)) return sign | 0x7f80;
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    // The unit of the last place: 7 bits below the leading one, but never below 2^-133.
    const int unit = std::max(exponent - 8, -133);
    const double units = std::nearbyint(std::ldexp(magnitude, -unit));  // ties to even
    if (unit == -133) return sign | static_cast<std::uint16_t>(units);
    const int biased = unit + 7 + 127;
    return sign | static_cast<std::uint16_t>((biased << 7) + static_cast<int>(units) - 128);
}

void all_pairs(bool portable) {
    const RowDecoder keep(RowFormat::e4m3_e8m0, 256, false, portable);
    const RowDecoder clear(RowFormat::e4m3_e8m0, 256, true, portable);
    std::vector<std::uint8_t> row(264);
    std::vector<std::uint16_t> kept(256), cleared(256);
    for (unsigned scale = 0; scale < 255; ++scale) {
        for (unsigned p = 0; p < 256; ++p) row[p] = static_cast<std::uint8_t>(p);
        for (unsigned b = 0; b < 8; ++b) row[256 + b] = static_cast<std::uint8_t>(scale);
        keep.decode(row.data(), kept.data());
        clear.decode(row.data(), cleared.data());
        for (unsigned p = 0; p < 256; ++p) {
            if ((p & 0x7f) == 0x7f) {
                CHECK((kept[p] & 0x7fff) > 0x7f80);
                continue;
            }
            CHECK(kept[p] == bf16_of(value_of(p, scale)));
            CHECK(cleared[p] == (kept[p] == 0x8000 ? 0 : kept[p]));
        }
    }
}

void every_pair_is_exact() {
    all_pairs(false);
    all_pairs(true);
}

void modes_change_nothing() {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    for (const unsigned mode : {0x8000u, 0x0040u, 0x8040u}) {  // FTZ, DAZ, both
        _mm_setcsr(before | mode);
        all_pairs(false);
        all_pairs(true);
        CHECK(_mm_getcsr() == (before | mode));
    }
    _mm_setcsr(before);
#endif
}

void scalar_scaled_rows() {
    std::vector<std::uint8_t> row(300);
    std::vector<std::uint16_t> fast(300), plain(300);
    for (unsigned i = 0; i < 300; ++i) row[i] = static_cast<std::uint8_t>(i);
    for (const std::uint32_t dim : {1u, 15u, 160u, 256u, 300u}) {
        RowDecoder(RowFormat::e4m3, dim, false).decode(row.data(), fast.data());
        RowDecoder(RowFormat::e4m3, dim, false, true).decode(row.data(), plain.data());
        for (std::uint32_t i = 0; i < dim; ++i) {
            CHECK(fast[i] == plain[i]);
            if ((row[i] & 0x7f) != 0x7f) CHECK(fast[i] == bf16_of(value_of(row[i], 127)));
        }
    }
}

}  // namespace
}  // namespace tierd

int main() {
    RUN(tierd::every_pair_is_exact);
    RUN(tierd::modes_change_nothing);
    RUN(tierd::scalar_scaled_rows);
}

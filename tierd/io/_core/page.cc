#include "page.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cpu.h"

namespace tierd {

Geometry make_geometry(std::uint32_t row_bytes, std::uint64_t rows) {
    if (row_bytes == 0 || row_bytes > kRowBytesMax)
        throw std::invalid_argument("row_bytes must be between 1 and " + std::to_string(kRowBytesMax) +
                                    ", got " + std::to_string(row_bytes));
    Geometry g{};
    g.row_bytes = row_bytes;
    g.stride = row_stride(row_bytes);
    g.rows_per_page = rows_per_page(row_bytes);
    g.rows = rows;
    g.pages = (rows + g.rows_per_page - 1) / g.rows_per_page;
    return g;
}

namespace {

constexpr std::uint32_t mix32(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    x ^= x >> 16;
    return x;
}

std::uint32_t seed_of(std::uint64_t row_number, TagKey key) {
    return mix32(static_cast<std::uint32_t>(row_number) ^ key.key0) +
           mix32(static_cast<std::uint32_t>(row_number >> 32) ^ key.key1);
}

// Compiled twice: for the baseline instruction set and, on x86-64, for AVX2.
TIERD_ALWAYS_INLINE std::uint32_t tag_body(const std::uint8_t* row, std::uint32_t words,
                                           std::uint32_t seed) {
    std::uint32_t acc = 0;
    for (std::uint32_t o = 0; o < words; ++o) {
        std::uint32_t x;
        std::memcpy(&x, row + 4 * static_cast<std::size_t>(o), 4);
        x = (x ^ (o * 0x9E3779B1u + seed)) * 0x85EBCA6Bu;
        x ^= x >> 13;
        x *= 0xC2B2AE35u;
        acc ^= x ^ (x >> 16);
    }
    return mix32(acc ^ seed);
}
std::uint32_t tag_base(const std::uint8_t* row, std::uint32_t words, std::uint32_t seed) {
    return tag_body(row, words, seed);
}
#if TIERD_X86
TIERD_AVX2 std::uint32_t tag_avx2(const std::uint8_t* row, std::uint32_t words, std::uint32_t seed) {
    return tag_body(row, words, seed);
}
#endif

std::uint32_t tag_of(const std::uint8_t* row, std::uint32_t words, std::uint32_t seed) {
#if TIERD_X86
    if (cpu().avx2) return tag_avx2(row, words, seed);
#endif
    return tag_base(row, words, seed);
}

}  // namespace

TagKey tag_key(ImageKey key) {
    // splitmix64 of the identity: neighbouring images and generations get unrelated keys.
    std::uint64_t z = key.image_id ^ (static_cast<std::uint64_t>(key.generation) * 0x9E3779B97F4A7C15ull);
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return {static_cast<std::uint32_t>(z), static_cast<std::uint32_t>(z >> 32)};
}

std::uint32_t row_tag(const void* row, std::uint32_t stride, std::uint64_t row_number, TagKey key) {
    return tag_of(static_cast<const std::uint8_t*>(row), stride / 4, seed_of(row_number, key));
}

void pack_pages(const std::uint8_t* rows, std::uint64_t row_count, std::uint64_t first_page,
                const Geometry& g, ImageKey key, std::uint8_t* pages) {
    const TagKey tags = tag_key(key);
    const std::uint32_t words = g.stride / 4;
    for (std::uint64_t done = 0, p = 0; done < row_count; ++p) {
        std::uint8_t* page = pages + p * kPageBytes;
        std::memset(page, 0, kPageBytes);
        const std::uint32_t n =
            static_cast<std::uint32_t>(std::min<std::uint64_t>(g.rows_per_page, row_count - done));
        std::uint8_t* tag = page + static_cast<std::size_t>(g.rows_per_page) * g.stride;
        for (std::uint32_t r = 0; r < n; ++r) {
            std::uint8_t* row = page + static_cast<std::size_t>(r) * g.stride;
            std::memcpy(row, rows + (done + r) * g.row_bytes, g.row_bytes);
            const std::uint64_t number = (first_page + p) * g.rows_per_page + r;
            const std::uint32_t value = tag_of(row, words, seed_of(number, tags));
            std::memcpy(tag + 4 * static_cast<std::size_t>(r), &value, 4);
        }
        PageTrailer t{kPageMagic,     kPageVersion, static_cast<std::uint16_t>(n), key.image_id,
                      first_page + p, key.generation, 0};
        std::memcpy(page + kPageBytes - kTrailerBytes, &t, kTrailerBytes);
        t.crc = crc32c(page, kPageBytes - 4);
        std::memcpy(page + kPageBytes - 4, &t.crc, 4);
        done += n;
    }
}

PageFault check_page(const std::uint8_t* page, std::uint64_t page_number, const Geometry& g,
                     ImageKey key, bool check_crc, bool check_tags) {
    PageTrailer t;
    std::memcpy(&t, page + kPageBytes - kTrailerBytes, kTrailerBytes);
    if (t.magic != kPageMagic) return PageFault::magic;
    if (t.version != kPageVersion) return PageFault::version;
    if (t.image_id != key.image_id) return PageFault::image;
    if (t.generation != key.generation) return PageFault::generation;
    if (t.page != page_number) return PageFault::number;
    const std::uint64_t first = page_number * g.rows_per_page;
    const std::uint64_t expected = std::min<std::uint64_t>(g.rows_per_page, g.rows - std::min(first, g.rows));
    if (t.rows != expected) return PageFault::rows;
    if (check_crc && crc32c(page, kPageBytes - 4) != t.crc) return PageFault::crc;
    if (check_tags) {
        const TagKey tags = tag_key(key);
        const std::uint8_t* tag = page + static_cast<std::size_t>(g.rows_per_page) * g.stride;
        for (std::uint32_t r = 0; r < t.rows; ++r) {
            std::uint32_t stored;
            std::memcpy(&stored, tag + 4 * static_cast<std::size_t>(r), 4);
            const std::uint8_t* row = page + static_cast<std::size_t>(r) * g.stride;
            if (tag_of(row, g.stride / 4, seed_of(first + r, tags)) != stored) return PageFault::tag;
        }
    }
    return PageFault::ok;
}

}  // namespace tierd

// A page on a device: rows, row tags, trailer. See docs/format.md.
//
//     0                     row 0 .. row n-1, back to back, each padded to row_stride
//     rows_per_page*stride  one u32 tag per row (rows_per_page of them, absent rows have tag 0)
//     ...                   zero
//     4064                  PageTrailer
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol.h"

namespace tierd {

inline constexpr std::uint32_t kPageMagic = 0x50445254;  // "TRDP"
inline constexpr std::uint16_t kPageVersion = 1;
inline constexpr std::uint32_t kTrailerBytes = 32;
inline constexpr std::uint32_t kRowBytesMax = kPageBytes - kTrailerBytes - 4;

struct PageTrailer {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t rows;  // rows in this page; only the last page of an image has fewer than it could
    std::uint64_t image_id;
    std::uint64_t page;  // page number in the image
    std::uint32_t generation;
    std::uint32_t crc;  // CRC32C of the 4,092 bytes before it
};
static_assert(sizeof(PageTrailer) == kTrailerBytes);
static_assert(offsetof(PageTrailer, crc) == kTrailerBytes - 4);

// Rows are stored at a multiple of 4 bytes so that the tag is a hash of whole words.
constexpr std::uint32_t row_stride(std::uint32_t row_bytes) { return (row_bytes + 3) / 4 * 4; }
constexpr std::uint32_t rows_per_page(std::uint32_t row_bytes) {
    return (kPageBytes - kTrailerBytes) / (row_stride(row_bytes) + 4);
}

// What a table's pages carry, and how its rows are tagged.
struct ImageKey {
    std::uint64_t image_id;
    std::uint32_t generation;
};

struct Geometry {
    std::uint32_t row_bytes;
    std::uint32_t stride;
    std::uint32_t rows_per_page;
    std::uint64_t rows;
    std::uint64_t pages;
};
Geometry make_geometry(std::uint32_t row_bytes, std::uint64_t rows);

// Why a page was refused. The order is the order of the checks.
enum class PageFault : std::uint32_t {
    ok = 0,
    magic = 1,
    version = 2,
    image = 3,
    generation = 4,
    number = 5,
    rows = 6,
    crc = 7,
    tag = 8,
};

// --- CRC32C (Castagnoli), hardware where there is any -------------------------------------------
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc = 0);
const char* crc32c_engine();

// --- row tags ------------------------------------------------------------------------------------
// The tag of a row is a keyed hash of its words:
//     key   = two u32 of splitmix64(image_id ^ generation * C)
//     seed  = mix32(row_lo ^ key0) + mix32(row_hi ^ key1)
//     x_o   = (w_o ^ (o * 0x9E3779B1 + seed)) * 0x85EBCA6B;  x_o ^= x_o >> 13;  x_o *= 0xC2B2AE35;
//             x_o ^= x_o >> 16
//     tag   = mix32(xor over o of x_o, xor seed)
// Each step is a bijection of one word, so a change confined to one word always changes the tag;
// any other change, and any other row, generation or image, passes with probability 2^-32.
struct TagKey {
    std::uint32_t key0;
    std::uint32_t key1;
};
TagKey tag_key(ImageKey key);
std::uint32_t row_tag(const void* row, std::uint32_t stride, std::uint64_t row_number, TagKey key);

// --- whole pages ---------------------------------------------------------------------------------
// Packs rows [first_page * rows_per_page, +row_count) from `rows` (row_bytes apart) into pages.
void pack_pages(const std::uint8_t* rows, std::uint64_t row_count, std::uint64_t first_page,
                const Geometry& geometry, ImageKey key, std::uint8_t* pages);

// Checks identity, generation and page number (always), then CRC and tags as asked.
PageFault check_page(const std::uint8_t* page, std::uint64_t page_number, const Geometry& geometry,
                     ImageKey key, bool check_crc, bool check_tags);

}  // namespace tierd

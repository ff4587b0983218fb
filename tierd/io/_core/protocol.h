// The shared-memory protocol between one engine rank (the client) and the servers of its rings.
//
// docs/protocol.md explains the rules; this header is the only place in C++ that gives them
// numbers, and tests/unit/test_protocol.py holds the Python and Triton constants against it.
//
// Fault model: either side may be stopped, killed or resumed at any instruction; a killed
// server's reads may still land in its own arena afterwards; the client's memory may hold any
// bytes at all (a server bounds-checks a private copy of a request before it acts on it).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierd {

inline constexpr std::uint32_t kChannelMagic = 0x4e484354;  // "TCHN"
inline constexpr std::uint32_t kChannelAbi = 2;
// A server serves channels of this version and the one before: 1 has neither guardian nor leaving.
inline constexpr std::uint32_t kChannelAbiOldest = 1;
inline constexpr std::uint32_t kLineBytes = 64;
inline constexpr std::uint32_t kPageBytes = 4096;
inline constexpr std::uint32_t kRingDepth = 8;  // requests between publish and retire
inline constexpr std::uint32_t kRingsMax = 64;  // a table number has 6 bits
inline constexpr std::uint32_t kRowsMaxLimit = 1u << 20;    // largest channel.rows_max
inline constexpr std::uint32_t kArenaPagesLimit = 1u << 21;  // 8 GiB an arena

enum class Owner : std::uint32_t { daemon = 0, guardian = 1 };

enum class Priority : std::uint32_t { decode = 0, prefill = 1 };

// Result of one request. Anything but ok means that no row of the request may be used.
enum class Status : std::uint32_t {
    none = 0,         // not answered yet
    ok = 1,           // every page landed and passed its checks
    read_error = 2,   // the device answered with an errno, twice
    short_read = 3,   // fewer than 4,096 bytes, twice
    wrong_page = 4,   // foreign magic, version, image, generation or page number, twice
    bad_crc = 5,      // a sampled page's CRC did not match, twice
    bad_request = 6,  // the request itself is nonsense; the client's fault
    cancelled = 7,    // the server is stopping or the table went away
};

// Every word below sits in a 64-byte line of its own and has exactly one writer, named beside it.
// Words are levels: they only grow (modulo 2^32) and are never reset while the channel lives.
struct alignas(kLineBytes) Line32 {
    std::uint32_t value;
    std::uint8_t pad[kLineBytes - 4];
};

struct alignas(kLineBytes) TenureLine {
    // One aligned 64-bit word, stored whole: who owns the ring, and how often that has changed.
    std::uint32_t owner;  // Owner
    std::uint32_t epoch;
    std::uint8_t pad[kLineBytes - 8];
};

struct alignas(kLineBytes) StatusLine {
    // word[sequence % kRingDepth] = sequence << 32 | Status. The sequence makes the word
    // self-describing: fill takes a request's pages from the arena whose word carries it.
    std::uint64_t word[kRingDepth];
};

struct RingControl {
    Line32 doorbell;      // client: last published sequence
    Line32 retired;       // client: last sequence whose pages it no longer needs
    Line32 waiter;        // client: 1 while it sleeps in a futex on done_d
    Line32 done_d;        // daemon: last sequence completed in order
    StatusLine status_d;  // daemon: written before done_d
    Line32 beat;          // daemon: the pump's loop counter
    Line32 parked;        // daemon: 1 while the pump sleeps and wants its eventfd rung
    Line32 drained;       // daemon: epoch for which it holds no read in flight
    Line32 done_g;        // guardian: as done_d
    StatusLine status_g;  // guardian: as status_d
    TenureLine tenure;    // guardian
    Line32 leaving;       // daemon: 1 once it wants the guardian to take the ring over
    Line32 quota;         // daemon: 1 + the ways per set that the ring's table is to have; 0: as it has
    std::uint8_t pad[1024 - 13 * kLineBytes];
};

struct alignas(kLineBytes) DescriptorHeader {
    std::uint32_t sequence;
    std::uint32_t count;       // missing rows listed, 1..rows_max
    std::uint32_t first_page;  // row k's page lands in arena page (first_page + k) % arena_pages
    std::uint32_t priority;    // Priority
    std::uint8_t pad[kLineBytes - 16];
};
// A descriptor is its header and three u32 arrays of rows_max entries, each padded to a line:
// page[k] (page number in the image), row[k] (row in that page), slot[k] (cache slot or ~0).

struct RingEntry {
    std::uint64_t control;      // offsets from the start of the channel, 64 B aligned
    std::uint64_t descriptors;  // kRingDepth descriptors of descriptor_bytes(rows_max)
    std::uint64_t arena_d;      // page aligned, arena_pages pages, written by the daemon alone
    std::uint64_t arena_g;      // page aligned, arena_pages pages, written by the guardian alone
    std::uint64_t stats;        // RingStats
    std::uint64_t samples;      // SampleHeader, then its entries (u64); 0 = none
    std::uint32_t rows_max;
    std::uint32_t arena_pages;
    std::uint32_t table;  // the client's table number, 0..63
    std::uint32_t flags;  // kRingFlag*
};
inline constexpr std::uint32_t kRingFlagGpu = 1;  // the client is a GPU: it cannot ring the eventfd
inline constexpr std::uint32_t kRingFlagGuarded = 2;  // a guardian answers what a daemon leaves
// Requests of this ring are hints: the daemon reads their pages into memory of its own, arena_pages
// pages, where another ring of the same channel and table finds them. The ring has no arenas, and no guardian
// serves it.
inline constexpr std::uint32_t kRingFlagHint = 4;

// Written by the client alone, read by the daemon for metrics. Counters since attach.
struct alignas(kLineBytes) RingStats {
    std::uint64_t lookups;       // row ids resolved
    std::uint64_t hits;          // of them found in the cache
    std::uint64_t misses;        // of them claimed a slot
    std::uint64_t bypasses;      // of them read from their page (no slot could be claimed)
    std::uint64_t demands;       // ids at a gather that had not been kicked
    std::uint64_t steps;         // gathers
    std::uint64_t late_steps;    // gathers with a stall of more than 20 us
    std::uint64_t stall_ns;      // time waited
    std::uint64_t tag_errors;    // rows whose tag did not match; each stops the engine
    std::uint64_t ring_full;     // publishes that had to wait for room
    std::uint64_t failed;        // requests that failed
    std::uint64_t published;     // requests
    std::uint64_t quota;         // 1 + the ways per set in force; 0: this client takes no wishes
    std::uint64_t pad[3];
};

// Row numbers sampled for miss curves (SHARDS): written by the client alone, read by the daemon. The
// entries follow in a circle. One is the row (bits 0..33), whether prefill asked for it (bit 34) and
// the low 24 bits of the number of the kick that did (bits 40..63), a counter of the client's cache:
// tables that share a cache share the counter, so it orders their samples.
struct alignas(kLineBytes) SampleHeader {
    std::uint64_t written;    // entries ever written; number k lies at k % capacity
    std::uint32_t capacity;   // entries, a power of two
    std::uint32_t threshold;  // a row is sampled if sample_hash(row) is below it; of 2^32
    std::uint8_t pad[kLineBytes - 16];
};
inline constexpr std::uint32_t kSampleCapacity = 4096;
inline constexpr std::uint64_t kSamplePrefill = 1ull << 34;
inline constexpr std::uint32_t kSampleStampShift = 40;
inline constexpr std::uint32_t kSampleThreshold = 1u << 26;  // one row in 64

// A fixed hash, so that the same rows are sampled whoever samples them.
constexpr std::uint32_t sample_hash(std::uint64_t row) {
    std::uint32_t x = static_cast<std::uint32_t>(row) ^
                      (static_cast<std::uint32_t>(row >> 32) * 0x9E3779B1u + 0x51AB5EEDu);
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

struct ChannelHeader {
    std::uint32_t magic;
    std::uint32_t abi;
    std::uint64_t total_bytes;
    std::uint32_t ring_count;
    std::uint32_t rank;
    std::uint32_t world;
    std::uint32_t pid;
    std::uint8_t client_id[16];
    std::uint8_t pad[kLineBytes - 48];
    RingEntry rings[kRingsMax];
    std::uint8_t tail[2 * kPageBytes - kLineBytes - kRingsMax * sizeof(RingEntry)];
};

constexpr std::uint32_t array_bytes(std::uint32_t rows_max) {
    return (rows_max * 4 + kLineBytes - 1) / kLineBytes * kLineBytes;
}
constexpr std::uint64_t descriptor_bytes(std::uint32_t rows_max) {
    return kLineBytes + 3ull * array_bytes(rows_max);
}

// Sequences are compared modulo 2^32: a is before b if b - a is a small positive number.
constexpr bool reached(std::uint32_t level, std::uint32_t sequence) {
    return static_cast<std::int32_t>(level - sequence) >= 0;
}

static_assert(sizeof(RingControl) == 1024);
static_assert(sizeof(RingEntry) == 64);
static_assert(sizeof(SampleHeader) == kLineBytes);
static_assert(sizeof(RingStats) == 128);
static_assert(sizeof(ChannelHeader) == 2 * kPageBytes);
static_assert(offsetof(RingControl, tenure) % 8 == 0);

}  // namespace tierd

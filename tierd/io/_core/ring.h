// Typed access to a ring in a mapped channel. No policy: offsets, atomics, bounds.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "protocol.h"

namespace tierd {

// Words shared with another process: plain integers in a mapping, accessed through atomic_ref.
inline std::uint32_t load_acquire(const std::uint32_t& word) {
    return std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(word)).load(std::memory_order_acquire);
}
inline void store_release(std::uint32_t& word, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(word).store(value, std::memory_order_release);
}
inline std::uint64_t load_acquire(const std::uint64_t& word) {
    return std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}
inline void store_release(std::uint64_t& word, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(word).store(value, std::memory_order_release);
}

struct Tenure {
    std::uint32_t owner;
    std::uint32_t epoch;
};
inline Tenure load_tenure(const TenureLine& line) {
    const auto& word = *static_cast<const std::uint64_t*>(static_cast<const void*>(&line));
    const std::uint64_t v = load_acquire(word);
    return {static_cast<std::uint32_t>(v), static_cast<std::uint32_t>(v >> 32)};
}
inline void store_tenure(TenureLine& line, Tenure t) {
    auto& word = *static_cast<std::uint64_t*>(static_cast<void*>(&line));
    store_release(word, static_cast<std::uint64_t>(t.epoch) << 32 | t.owner);
}
inline std::uint64_t status_word(std::uint32_t sequence, Status status) {
    return static_cast<std::uint64_t>(sequence) << 32 | static_cast<std::uint32_t>(status);
}

struct Descriptor {
    DescriptorHeader* header;
    std::uint32_t* page;
    std::uint32_t* row;
    std::uint32_t* slot;
};

// A ring's parts inside a mapping of `bytes` bytes at `base`. The constructor checks that every
// part lies inside the mapping, aligned and within the protocol's limits; std::invalid_argument
// names the part that does not.
struct RingView {
    RingControl* control = nullptr;
    std::uint8_t* descriptors = nullptr;
    std::uint8_t* arena_d = nullptr;
    std::uint8_t* arena_g = nullptr;
    RingStats* stats = nullptr;
    SampleHeader* samples = nullptr;  // null where the ring has none
    std::uint32_t rows_max = 0;
    std::uint32_t arena_pages = 0;
    std::uint32_t table = 0;
    std::uint32_t flags = 0;

    RingView() = default;
    RingView(std::uint8_t* base, std::uint64_t bytes, const RingEntry& e)
        : rows_max(e.rows_max), arena_pages(e.arena_pages), table(e.table), flags(e.flags) {
        if (rows_max == 0 || rows_max > kRowsMaxLimit)
            throw std::invalid_argument("ring: rows_max out of range");
        if (arena_pages < rows_max || arena_pages > kArenaPagesLimit)
            throw std::invalid_argument("ring: arena_pages below rows_max or above the limit");
        if (table >= kRingsMax) throw std::invalid_argument("ring: table number out of range");
        const auto part = [&](std::uint64_t offset, std::uint64_t size, std::uint64_t align,
                              const char* name) {
            if (offset % align != 0 || offset < sizeof(ChannelHeader) || offset > bytes ||
                size > bytes - offset)
                throw std::invalid_argument(std::string("ring: ") + name + " lies outside the channel");
            return base + offset;
        };
        const std::uint64_t arena = static_cast<std::uint64_t>(arena_pages) * kPageBytes;
        control = reinterpret_cast<RingControl*>(part(e.control, sizeof(RingControl), kLineBytes, "control"));
        descriptors = part(e.descriptors, kRingDepth * descriptor_bytes(rows_max), kLineBytes, "descriptors");
        stats = reinterpret_cast<RingStats*>(part(e.stats, sizeof(RingStats), kLineBytes, "stats"));
        if (e.samples != 0) {
            constexpr std::uint64_t kEntries = kSampleCapacity * sizeof(std::uint64_t);
            samples = reinterpret_cast<SampleHeader*>(
                part(e.samples, sizeof(SampleHeader) + kEntries, kLineBytes, "samples"));
        }
        if ((flags & kRingFlagHint) != 0) return;  // its pages stay with the daemon
        arena_d = part(e.arena_d, arena, kPageBytes, "arena D");
        arena_g = part(e.arena_g, arena, kPageBytes, "arena G");
    }

    Descriptor descriptor(std::uint32_t sequence) const {
        std::uint8_t* at = descriptors + (sequence % kRingDepth) * descriptor_bytes(rows_max);
        const std::uint32_t step = array_bytes(rows_max);
        auto* arrays = at + kLineBytes;
        return {reinterpret_cast<DescriptorHeader*>(at), reinterpret_cast<std::uint32_t*>(arrays),
                reinterpret_cast<std::uint32_t*>(arrays + step),
                reinterpret_cast<std::uint32_t*>(arrays + 2 * static_cast<std::size_t>(step))};
    }
};

}  // namespace tierd

// The pages that a hint ring has read: where they lie in the daemon's memory, until the client lets
// go of the hint. Never consulted for anything but speed: who finds nothing reads the device.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol.h"

namespace tierd {

class StagingCache {
  public:
    struct Entry {
        std::uint32_t page = 0;      // of the image
        std::uint32_t place = 0;     // in the hint ring's memory, in pages
        std::uint32_t sequence = 0;  // of the hint
        bool used = false;
    };

    // Room for `pages` and as much again, so that few sets overflow.
    void reserve(std::uint32_t pages) {
        sets_.assign(std::bit_ceil(std::size_t{pages} * 2 / kWays + 1), {});
    }
    bool empty() const { return sets_.empty(); }

    // A full set loses its oldest entry.
    void put(std::uint32_t page, std::uint32_t place, std::uint32_t sequence) {
        Set& set = set_of(page);
        Entry* victim = &set[0];
        for (Entry& entry : set) {
            if (entry.used && entry.page == page) {
                victim = &entry;
                break;
            }
            if (victim->used && (!entry.used || older(entry, *victim))) victim = &entry;
        }
        *victim = {page, place, sequence, true};
    }

    // Where a page lies, or null. Hints up to `retired` are forgotten: their memory is others' now.
    const Entry* find(std::uint32_t page, std::uint32_t retired) {
        for (Entry& entry : set_of(page)) {
            if (!entry.used || entry.page != page) continue;
            if (!reached(retired, entry.sequence)) return &entry;
            entry.used = false;
        }
        return nullptr;
    }
    void prefetch(std::uint32_t page) const { __builtin_prefetch(&sets_[index_of(page)]); }

  private:
    static constexpr std::size_t kWays = 4;
    using Set = std::array<Entry, kWays>;

    static bool older(const Entry& a, const Entry& b) {
        return static_cast<std::int32_t>(a.sequence - b.sequence) < 0;
    }
    std::size_t index_of(std::uint32_t page) const {
        return (page * 0x9E3779B97F4A7C15ull >> 32) & (sets_.size() - 1);
    }
    Set& set_of(std::uint32_t page) { return sets_[index_of(page)]; }

    std::vector<Set> sets_;
};

}  // namespace tierd

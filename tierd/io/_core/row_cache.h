// The directory and the rows of the CPU twin's cache: the same words and the same rules as the
// GPU's (one pool of slots, 32-way set-associative, shared by the tables of one row size).
//
// One 64-bit word per slot: table 6 bits | row + 1 34 bits | stamp 24 bits; 0 is an empty slot.
// The stamp is the number, modulo 2^24, of the kick that last touched the slot.
//
// Who may touch a slot's bytes: only the table whose number is in the word. Between the kick that
// claims or hits a slot and the end of the gather that reads it, the word's stamp is younger than
// the table's retired stamp, and nobody takes such a word away. A table stores its retired stamp
// (release) after its last use of the bytes; whoever takes the slot has loaded that stamp
// (acquire) before. So bytes need no lock, and several threads may look up different tables at
// once. One table is looked up by one thread at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>

#include "protocol.h"

namespace tierd {

inline constexpr std::uint32_t kWays = 32;
inline constexpr std::uint32_t kTablesMax = kRingsMax;  // a table number has 6 bits
inline constexpr std::uint32_t kStampBits = 24;
inline constexpr std::uint32_t kStampMask = (1u << kStampBits) - 1;
inline constexpr std::uint64_t kRowsLimit = (1ull << 34) - 2;  // row + 1 fits its 34 bits
inline constexpr std::uint32_t kNoSlot = ~0u;
// A sweep leaves no word older than kAgeMax kicks; one is due every kSweepEvery kicks. Their sum
// stays below half the range of a stamp, so a modular difference always has the right sign.
inline constexpr std::uint32_t kAgeMax = 1u << 22;
inline constexpr std::uint32_t kSweepEvery = 1u << 20;

// How much younger stamp `a` is than stamp `b`, in kicks; negative if it is older.
constexpr std::int32_t stamp_difference(std::uint32_t a, std::uint32_t b) {
    return static_cast<std::int32_t>((a - b) << (32 - kStampBits)) >> (32 - kStampBits);
}

class RowCache {
  public:
    RowCache(std::uint32_t sets, std::uint32_t row_bytes, std::uint32_t first_stamp);
    ~RowCache();
    RowCache(const RowCache&) = delete;
    RowCache& operator=(const RowCache&) = delete;

    std::uint32_t row_bytes() const { return row_bytes_; }
    std::uint32_t sets() const { return sets_max_; }
    std::uint32_t sets_in_use() const { return sets_.load(std::memory_order_relaxed); }
    // Kicks so far, plus first_stamp. A stamp is this number modulo 2^24.
    std::uint64_t kicks() const { return kicks_.load(std::memory_order_relaxed); }

    // Sets in use from now on. Fewer sets clear the words they give up, except words that a table
    // has yet to gather; those stay what they are and are found again if the sets come back.
    void resize(std::uint32_t sets);

    // A table number is bound to one table at a time; std::invalid_argument if it is taken.
    void attach(std::uint32_t table, std::uint32_t quota);
    // Empties the table's words. The table must have nothing left to fill or to gather.
    void detach(std::uint32_t table);
    // Ways per set that the table may hold. Takes effect at the next miss; flushes nothing.
    void set_quota(std::uint32_t table, std::uint32_t ways);

    // One kick's look at the directory. Lookups share the cache; a sweep, resize or detach waits
    // until the last of them is gone.
    class Lookup {
      public:
        Lookup(RowCache& cache, std::uint32_t table);
        std::uint64_t kick() const { return kick_; }
        void prefetch(std::uint64_t row) const;
        struct Place {
            std::uint32_t slot;  // kNoSlot: nothing may go, the row bypasses the cache
            bool hit;            // false: the slot was claimed for this row and is to be filled
        };
        Place find_or_claim(std::uint64_t row) const;

      private:
        RowCache& cache_;
        std::shared_lock<std::shared_mutex> shared_;
        std::uint32_t table_;
        std::uint64_t kick_;
    };

    // The table has gathered everything that it kicked up to and with number `kick`.
    void retire(std::uint32_t table, std::uint64_t kick);
    // The table has gathered everything before kick number `kick`, whose claims are in flight.
    void retire_before(std::uint32_t table, std::uint64_t kick);
    // Takes back a claim whose row never came. Only for slots younger than the retired stamp.
    void empty(std::uint32_t table, std::uint64_t row, std::uint32_t slot);

    // Whether the slot's word names the row.
    bool names(std::uint32_t table, std::uint64_t row, std::uint32_t slot) const;
    std::uint8_t* bytes(std::uint32_t slot) const {
        return rows_ + static_cast<std::size_t>(slot) * slot_bytes_;
    }

    // Words of the table, over all sets; for tests and reports.
    std::uint64_t held(std::uint32_t table);

  private:
    std::uint64_t* set_of(std::uint64_t key) const;
    struct Victim {
        std::uint32_t way;  // kWays: none may go
        std::uint64_t word;
    };
    Victim find_victim(std::uint64_t* set, std::uint32_t table, std::uint32_t stamp) const;
    bool may_go(std::uint64_t word) const;
    std::shared_lock<std::shared_mutex> share();
    std::unique_lock<std::shared_mutex> own();
    void sweep_if_due();
    void sweep();

    const std::uint32_t sets_max_;
    const std::uint32_t row_bytes_;
    const std::uint32_t slot_bytes_;
    std::size_t words_bytes_ = 0;
    std::size_t rows_bytes_ = 0;
    std::uint64_t* words_ = nullptr;
    std::uint8_t* rows_ = nullptr;

    std::atomic<std::uint32_t> sets_;
    std::atomic<std::uint64_t> kicks_;
    std::atomic<std::uint64_t> swept_;  // kicks at the last sweep
    std::array<std::atomic<std::uint32_t>, kTablesMax> quota_{};
    std::array<std::atomic<std::uint32_t>, kTablesMax> retired_{};  // stamps
    std::array<bool, kTablesMax> attached_{};  // under own()

    std::shared_mutex gate_;  // shared by lookups, owned by sweep, resize, attach and detach
    std::mutex door_;         // held to enter the gate, so that lookups cannot starve an owner
};

}  // namespace tierd

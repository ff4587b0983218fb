#include "row_cache.h"

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

#include <sys/mman.h>

#include "page.h"

namespace tierd {

namespace {

constexpr std::uint32_t kSetsLimit = 1u << 26;  // slot numbers stay below 2^31
// A lookup that lost its way to another table this often in a row bypasses the cache.
constexpr int kTries = 64;

using Word = std::atomic_ref<std::uint64_t>;

constexpr std::uint64_t key_of(std::uint32_t table, std::uint64_t row) {
    return static_cast<std::uint64_t>(table) << 58 | (row + 1) << kStampBits;
}
constexpr std::uint32_t table_of(std::uint64_t word) {
    return static_cast<std::uint32_t>(word >> 58);
}
constexpr std::uint32_t stamp_of(std::uint64_t word) {
    return static_cast<std::uint32_t>(word) & kStampMask;
}
constexpr std::uint64_t key_part(std::uint64_t word) { return word & ~std::uint64_t{kStampMask}; }

constexpr std::uint64_t mix64(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

void* map_zeroes(std::size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        throw std::system_error(errno, std::generic_category(),
                                "memory for a row cache of " + std::to_string(bytes) + " bytes");
    // Rows are looked up at random: huge pages save a TLB miss each. Refusal is harmless.
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

}  // namespace

RowCache::RowCache(std::uint32_t sets, std::uint32_t row_bytes, std::uint32_t first_stamp)
    : sets_max_(sets),
      row_bytes_(row_bytes),
      slot_bytes_((row_bytes + 7) / 8 * 8),
      sets_(sets),
      kicks_(first_stamp),
      swept_(first_stamp) {
    if (sets == 0 || sets > kSetsLimit)
        throw std::invalid_argument("sets must be between 1 and " + std::to_string(kSetsLimit) +
                                    ", got " + std::to_string(sets));
    if (row_bytes == 0 || row_bytes > kRowBytesMax)
        throw std::invalid_argument("row_bytes must be between 1 and " +
                                    std::to_string(kRowBytesMax) + ", got " +
                                    std::to_string(row_bytes));
    const std::size_t slots = static_cast<std::size_t>(sets) * kWays;
    words_bytes_ = slots * sizeof(std::uint64_t);
    rows_bytes_ = slots * slot_bytes_;
    words_ = static_cast<std::uint64_t*>(map_zeroes(words_bytes_));
    try {
        rows_ = static_cast<std::uint8_t*>(map_zeroes(rows_bytes_));
    } catch (...) {
        munmap(words_, words_bytes_);
        throw;
    }
}

RowCache::~RowCache() {
    munmap(words_, words_bytes_);
    munmap(rows_, rows_bytes_);
}

std::shared_lock<std::shared_mutex> RowCache::share() {
    const std::lock_guard door(door_);
    return std::shared_lock(gate_);
}

std::unique_lock<std::shared_mutex> RowCache::own() {
    const std::lock_guard door(door_);
    return std::unique_lock(gate_);
}

// --- lookup --------------------------------------------------------------------------------------

// Rows whose set is not in use share the sets that are. So a smaller cache is used evenly, and
// making it smaller moves no row of a set that stays.
std::uint64_t* RowCache::set_of(std::uint64_t key) const {
    const std::uint64_t h = mix64(key);
    const std::uint64_t in_use = sets_.load(std::memory_order_relaxed);
    std::uint64_t set = (h >> 32) * sets_max_ >> 32;
    if (set >= in_use) set = (h & 0xffffffff) * in_use >> 32;
    return words_ + set * kWays;
}

bool RowCache::may_go(std::uint64_t word) const {
    const std::uint32_t retired = retired_[table_of(word)].load(std::memory_order_acquire);
    return stamp_difference(stamp_of(word), retired) <= 0;
}

RowCache::Victim RowCache::find_victim(std::uint64_t* set, std::uint32_t table,
                                       std::uint32_t stamp) const {
    std::array<std::uint64_t, kWays> words;
    std::array<std::uint8_t, kTablesMax> held{};
    for (std::uint32_t way = 0; way < kWays; ++way) {
        words[way] = Word(set[way]).load(std::memory_order_relaxed);
        if (words[way] != 0) ++held[table_of(words[way])];
    }
    const auto quota = [&](std::uint32_t t) { return quota_[t].load(std::memory_order_relaxed); };
    const bool at_quota = held[table] >= quota(table);
    Victim own{kWays, 0}, other{kWays, 0};
    std::int32_t own_age = std::numeric_limits<std::int32_t>::min(), other_age = own_age;
    for (std::uint32_t way = 0; way < kWays; ++way) {
        const std::uint64_t word = words[way];
        if (word == 0) {
            if (!at_quota) return {way, 0};
            continue;
        }
        const std::uint32_t t = table_of(word);
        if (t != table && (at_quota || held[t] <= quota(t))) continue;
        Victim& best = t == table ? own : other;
        std::int32_t& best_age = t == table ? own_age : other_age;
        const std::int32_t age = stamp_difference(stamp, stamp_of(word));
        if (age > best_age && may_go(word)) {
            best = {way, word};
            best_age = age;
        }
    }
    // Below its quota a table grows at the cost of those above theirs. If none of these may go
    // (or the quotas add up to more than there are ways), replacing a row of its own still beats
    // not caching this one.
    return other.way != kWays ? other : own;
}

RowCache::Lookup::Lookup(RowCache& cache, std::uint32_t table) : cache_(cache), table_(table) {
    cache.sweep_if_due();
    shared_ = cache.share();
    kick_ = cache.kicks_.fetch_add(1, std::memory_order_relaxed) + 1;
}

void RowCache::Lookup::prefetch(std::uint64_t row) const {
    const auto* set = reinterpret_cast<const std::uint8_t*>(cache_.set_of(key_of(table_, row)));
    for (std::uint32_t line = 0; line < kWays * 8; line += kLineBytes)
        __builtin_prefetch(set + line, 1);
}

RowCache::Lookup::Place RowCache::Lookup::find_or_claim(std::uint64_t row) const {
    const std::uint64_t key = key_of(table_, row);
    std::uint64_t* set = cache_.set_of(key);
    const std::uint32_t stamp = static_cast<std::uint32_t>(kick_) & kStampMask;
    const auto slot_of = [&](std::uint32_t way) {
        return static_cast<std::uint32_t>(set - cache_.words_) + way;
    };
    // Nobody but this table's own thread brings in a word of this key, so a failed exchange means
    // that another table took the way: look again.
    for (int tries = 0; tries < kTries; ++tries) {
        std::uint32_t way = 0;
        std::uint64_t word = 0;
        for (; way < kWays; ++way) {
            word = Word(set[way]).load(std::memory_order_relaxed);
            if (key_part(word) == key) break;
        }
        const bool hit = way != kWays;
        if (hit && stamp_of(word) == stamp) return {slot_of(way), true};
        if (!hit) {
            const Victim victim = cache_.find_victim(set, table_, stamp);
            if (victim.way == kWays) break;
            way = victim.way;
            word = victim.word;
        }
        if (Word(set[way]).compare_exchange_strong(word, key | stamp, std::memory_order_acq_rel,
                                                   std::memory_order_relaxed))
            return {slot_of(way), hit};
    }
    return {kNoSlot, false};
}

// --- what changes under lookups ------------------------------------------------------------------

void RowCache::retire(std::uint32_t table, std::uint64_t kick) {
    // A table that was gathered ages after its kick had its words restamped by a sweep, at most to
    // kAgeMax - 1 kicks before that sweep: its retired stamp must not be older than that.
    const std::uint64_t now = kicks();
    if (kick + kAgeMax - 1 < now) kick = now - (kAgeMax - 1);
    retired_[table].store(static_cast<std::uint32_t>(kick) & kStampMask, std::memory_order_release);
}

void RowCache::retire_before(std::uint32_t table, std::uint64_t kick) {
    // Sweeps restamp the words of a kick ages ago to just behind the retired stamp, which they move
    // as well. What retire() makes of such a kick could lie past them, and they would go.
    if (kick + kAgeMax / 2 > kicks()) retire(table, kick - 1);
}

bool RowCache::names(std::uint32_t table, std::uint64_t row, std::uint32_t slot) const {
    const std::uint64_t word = Word(words_[slot]).load(std::memory_order_relaxed);
    return key_part(word) == key_of(table, row);
}

void RowCache::empty(std::uint32_t table, std::uint64_t row, std::uint32_t slot) {
    const auto shared = share();  // a sweep may not restamp the word meanwhile
    Word word(words_[slot]);
    if (key_part(word.load(std::memory_order_relaxed)) == key_of(table, row))
        word.store(0, std::memory_order_release);
}

void RowCache::sweep_if_due() {
    const auto due = [&] {
        return kicks() - swept_.load(std::memory_order_relaxed) >= kSweepEvery;
    };
    if (!due()) return;
    const auto owned = own();
    if (!due()) return;  // another thread has done it while we waited
    sweep();
    swept_.store(kicks(), std::memory_order_relaxed);
}

void RowCache::sweep() {
    const std::uint32_t floor = static_cast<std::uint32_t>(kicks() - kAgeMax) & kStampMask;
    const auto too_old = [&](std::uint32_t stamp) { return stamp_difference(stamp, floor) < 0; };
    const std::size_t slots = words_bytes_ / sizeof(std::uint64_t);
    for (std::size_t slot = 0; slot < slots; ++slot) {
        Word word(words_[slot]);
        const std::uint64_t old = word.load(std::memory_order_relaxed);
        if (old == 0 || !too_old(stamp_of(old))) continue;
        // What is in flight must stay younger than its table's retired stamp.
        const std::uint32_t stamp = may_go(old) ? floor : (floor + 1) & kStampMask;
        word.store(key_part(old) | stamp, std::memory_order_release);
    }
    // After the words, or a word in flight would look retired for a moment.
    for (auto& retired : retired_) {
        std::uint32_t old = retired.load(std::memory_order_relaxed);
        // A failed exchange means that the table has just retired something younger.
        if (too_old(old)) retired.compare_exchange_strong(old, floor, std::memory_order_acq_rel);
    }
}

void RowCache::resize(std::uint32_t sets) {
    if (sets == 0 || sets > sets_max_)
        throw std::invalid_argument("sets must be between 1 and " + std::to_string(sets_max_) +
                                    ", got " + std::to_string(sets));
    const auto owned = own();
    sets_.store(sets, std::memory_order_relaxed);
    const std::size_t slots = words_bytes_ / sizeof(std::uint64_t);
    for (std::size_t slot = static_cast<std::size_t>(sets) * kWays; slot < slots; ++slot) {
        Word word(words_[slot]);
        const std::uint64_t old = word.load(std::memory_order_relaxed);
        if (old != 0 && may_go(old)) word.store(0, std::memory_order_release);
    }
}

void RowCache::attach(std::uint32_t table, std::uint32_t quota) {
    const auto owned = own();
    if (table >= kTablesMax || attached_[table])
        throw std::invalid_argument("table number " + std::to_string(table) +
                                    " is out of range or in use in this cache");
    set_quota(table, quota);
    attached_[table] = true;
    retired_[table].store(static_cast<std::uint32_t>(kicks()) & kStampMask,
                          std::memory_order_release);
}

void RowCache::detach(std::uint32_t table) {
    const auto owned = own();
    const std::size_t slots = words_bytes_ / sizeof(std::uint64_t);
    for (std::size_t slot = 0; slot < slots; ++slot) {
        Word word(words_[slot]);
        const std::uint64_t old = word.load(std::memory_order_relaxed);
        if (old != 0 && table_of(old) == table) word.store(0, std::memory_order_release);
    }
    quota_[table].store(0, std::memory_order_relaxed);
    attached_[table] = false;
}

void RowCache::set_quota(std::uint32_t table, std::uint32_t ways) {
    if (ways > kWays)
        throw std::invalid_argument("a quota is 0 to " + std::to_string(kWays) +
                                    " ways per set, got " + std::to_string(ways));
    quota_[table].store(ways, std::memory_order_relaxed);
}

std::uint64_t RowCache::held(std::uint32_t table) {
    const auto shared = share();
    std::uint64_t count = 0;
    for (std::size_t slot = 0; slot < words_bytes_ / sizeof(std::uint64_t); ++slot) {
        const std::uint64_t word = Word(words_[slot]).load(std::memory_order_relaxed);
        count += word != 0 && table_of(word) == table;
    }
    return count;
}

}  // namespace tierd

// One ring as its server sees it: which requests are waiting, being read or answered.
//
// The protocol's rules for a server live here (docs/protocol.md): copy a request out once and judge
// the copy, answer in order, look at the tenure before a read is submitted and before a request is
// completed, and report a drained ring only when no read of it is in flight. Daemon and guardian
// share them; they differ in whose arena and words they write, and in who may change the tenure.
//
// Fault model: every word of the channel may hold any value at any time. A server never indexes
// with, waits for, or loops over a number it has not bounded first.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "deadline_heap.h"
#include "extent_map.h"
#include "guardian.h"
#include "page.h"
#include "protocol.h"
#include "reader.h"
#include "ring.h"
#include "staging_cache.h"

namespace tierd {

// A table as the pump serves it.
struct ServedTable {
    ImageKey key{};
    Geometry geometry{};
    std::uint64_t window_ns = 0;
    ExtentMap map;
    std::vector<ExtentMap> copies;  // the next tiers, in order: the same pages on other devices
    std::uint32_t rings = 0;        // that use it

    bool uses(std::uint32_t device) const {
        return map.uses(device) ||
               std::any_of(copies.begin(), copies.end(),
                           [device](const ExtentMap& copy) { return copy.uses(device); });
    }
    // Where to read a page: the first two attempts go to the first tier, each further one to the next.
    const ExtentMap& tier(std::uint32_t attempt) const {
        return attempt < 2 ? map : copies[attempt - 2];
    }
    std::uint32_t attempts() const { return 2 + static_cast<std::uint32_t>(copies.size()); }
};

// The server's private copy of one request, and how far it has come.
struct ServerRequest {
    std::uint32_t sequence = 0;
    std::uint32_t first_page = 0;
    std::uint32_t issued = 0;     // reads given to the reader so far, always rows 0..issued-1
    std::uint32_t limit = 0;      // reads to issue in all; lowered to `issued` when it has failed
    std::uint32_t in_flight = 0;  // of the issued ones, not yet reaped
    bool hinted = false;          // a hint may have its pages: `rows` is copied out
    Status status = Status::ok;
    std::uint64_t seen_ns = 0;       // when its doorbell was seen
    std::uint64_t key = 0;           // its deadline, see request_key()
    std::uint32_t* pages = nullptr;  // rows_max numbers, bounds-checked
    std::uint32_t* rows = nullptr;   // in their pages; copied out only where a hint may have them
};

inline constexpr std::uint32_t kStatusCount = 8;

// Read times of requests: bucket 0 counts those below 8 us, each bound is sqrt(2) times the one
// before, the last bucket takes the rest (from 5.9 s on).
inline constexpr std::uint32_t kReadTimeBuckets = 40;

constexpr std::uint32_t read_time_bucket(std::uint64_t ns) {
    constexpr std::uint64_t kUnitNs = 500;  // 8 us are 2^4 of them
    constexpr std::uint32_t kFirst = 4;
    const std::uint64_t units = ns / kUnitNs;
    if (units < 1u << kFirst) return 0;
    const auto octave = static_cast<std::uint32_t>(std::bit_width(units)) - 1;
    if (octave >= kFirst + kReadTimeBuckets / 2) return kReadTimeBuckets - 1;
    const std::uint32_t upper = (units * units) >> (2 * octave + 1) != 0;
    const std::uint32_t bucket = 1 + 2 * (octave - kFirst) + upper;
    return bucket < kReadTimeBuckets ? bucket : kReadTimeBuckets - 1;
}

struct RingCounters {
    std::array<std::uint64_t, kStatusCount> answered{};  // requests, by Status
    std::uint64_t pages = 0;                             // of the requests answered ok
    std::uint64_t jumps = 0;                             // nonsense doorbells
    std::uint64_t takeovers = 0;                         // times the guardian took the ring
    std::uint64_t staged = 0;                            // of the pages, found where a hint left them
    std::uint64_t read_ns = 0;                           // of all requests, from doorbell to answer
    std::array<std::uint64_t, kReadTimeBuckets> read_times{};  // requests, by the same time

    void add(const RingCounters& other) {
        for (std::uint32_t i = 0; i < kStatusCount; ++i) answered[i] += other.answered[i];
        pages += other.pages;
        jumps += other.jumps;
        takeovers += other.takeovers;
        staged += other.staged;
        read_ns += other.read_ns;
        for (std::uint32_t i = 0; i < kReadTimeBuckets; ++i) read_times[i] += other.read_times[i];
    }
};

// Decode before prefill, then the earliest deadline: when it was seen plus its table's window.
constexpr std::uint64_t request_key(std::uint32_t priority, std::uint64_t seen_ns,
                                    std::uint64_t window_ns) {
    constexpr std::uint64_t kLast = (1ull << 63) - 1;
    const std::uint64_t deadline = window_ns > kLast - seen_ns ? kLast : seen_ns + window_ns;
    return static_cast<std::uint64_t>(priority) << 63 | deadline;
}

class ServerRing {
  public:
    ServerRing(const RingView& view, ServedTable* table, Owner role = Owner::daemon);

    // --- tenure ----------------------------------------------------------------------------------
    // Starts serving a ring that has no read of this server in flight: reports it drained under the
    // present epoch (the devices are open, so no earlier daemon's read can land any more) and, when
    // the daemon owns it, goes on behind the last answered request and returns true.
    bool adopt();
    // True while this server may submit and complete.
    bool ours() const {
        const Tenure now = load_tenure(view_.control->tenure);
        return now.owner == static_cast<std::uint32_t>(role_) && now.epoch == epoch_;
    }
    bool serving() const { return serving_; }
    bool closing() const { return closing_; }
    std::uint32_t epoch() const { return epoch_; }  // under which it is served
    // The ring was taken: nothing more is submitted or answered. Call adopt() again and again once
    // in_flight is 0.
    void lose();
    // For the guardian alone. It takes the ring under a new epoch, whoever had it, and goes on
    // behind the last answered request; no read of an earlier tenure of its own may be in flight.
    void take();
    // From now on nothing more is accepted; true once all is answered and the daemon has the ring.
    bool hand_back();

    // --- requests --------------------------------------------------------------------------------
    // Whether accept() would take something in.
    bool has_news() const;
    // Takes in what the doorbell announces.
    void accept(std::uint64_t now_ns);
    // The request whose reads go out next, or null.
    ServerRequest* issuing() {
        return issue_ == accepted_ + 1 ? nullptr : &requests_[issue_ % kRingDepth];
    }
    // Call after a request's `issued` or `limit` changed: steps over fully issued requests.
    void advance_issue();
    // Whether the next request has to wait: an earlier one still reads into a page that it wants.
    // That happens only after the other server has answered the earlier one, or to a client that
    // lists pages it has not got back.
    bool blocked();
    // Answers every request at the head that has nothing left to do. `now_ns` 0: nobody counts time.
    void complete(std::uint64_t now_ns = 0);
    void fail(ServerRequest& request, Status status);
    // Reads that must finish before the oldest request can be answered.
    std::uint32_t head_remaining() const;
    // Removal: nothing more is accepted or issued; once in_flight is 0, cancel_rest() answers all,
    // except on a ring that another server will go on with.
    void close();
    void cancel_rest();

    ServerRequest& request(std::uint32_t number) { return requests_[number]; }
    std::uint8_t* arena(std::uint32_t page) const {
        return arena_ + static_cast<std::size_t>(page) * kPageBytes;
    }
    std::uint32_t arena_page(const ServerRequest& request, std::uint32_t row) const {
        // Both terms are below arena_pages (row < rows_max <= arena_pages).
        const std::uint32_t page = request.first_page + row;
        return page >= view_.arena_pages ? page - view_.arena_pages : page;
    }
    std::int32_t buffer_of(std::uint32_t page) const {
        return fixed ? first_buffer + static_cast<std::int32_t>(page >> kChunkShift) : kNoBuffer;
    }

    // --- hints -----------------------------------------------------------------------------------
    bool is_hint() const { return (view_.flags & kRingFlagHint) != 0; }
    // Copies what a row's consumer reads of a page, the row and its tag, from where a hint has left
    // the page to where the request wants it. False: nothing there, read the device.
    bool take_staged(const ServerRequest& request, std::uint32_t row);

    const RingView& view() const { return view_; }
    RingControl& control() const { return *view_.control; }
    const ServedTable& table() const { return *table_; }

    // For the pump's books.
    std::uint64_t key = 0;    // of the most urgent request not fully issued
    std::uint64_t order = 0;  // when the ring was added
    std::size_t heap_at = kNotInHeap;
    std::uint32_t in_flight = 0;
    std::uint32_t channel = 0;
    std::uint32_t number = 0;  // in its channel
    std::uint32_t table_number = 0;
    ServerRing* hint = nullptr;  // the ring that hints at this one's pages
    bool fixed = false;  // arena D is registered
    std::int32_t first_buffer = kNoBuffer;
    std::uint32_t buffers = 0;  // reserved, from first_buffer on
    RingCounters counters;
    RingWatch watch;  // the guardian's

  private:
    // Whether another server answers what this one leaves.
    bool others_go_on() const {
        return role_ == Owner::guardian || (view_.flags & kRingFlagGuarded) != 0;
    }
    bool is_news(std::uint32_t doorbell) const;
    void start_at(std::uint32_t base);
    void start_behind_answers();
    void take_in(std::uint32_t sequence, std::uint64_t now_ns);
    void answer(std::uint32_t sequence, Status status);
    void stage(const ServerRequest& request);
    const std::uint8_t* staged_page(std::uint32_t page);
    void wake_waiter();

    RingView view_;
    ServedTable* table_;
    const Owner role_;
    std::uint8_t* const arena_;  // this server's
    Line32& done_word_;
    StatusLine& status_;
    bool serving_ = false;
    bool closing_ = false;
    bool yielding_ = false;       // the guardian is on its way out
    std::uint32_t epoch_ = 0;     // under which it was adopted
    std::uint32_t accepted_ = 0;  // last sequence taken in
    std::uint32_t issue_ = 1;     // first sequence not fully issued, or accepted_ + 1
    std::uint32_t done_ = 0;      // last sequence answered
    std::array<ServerRequest, kRingDepth> requests_{};
    std::unique_ptr<std::uint32_t[]> page_numbers_;  // and row numbers: ServerRequest's arrays
    StagingCache staging_;                           // of a hint ring
};

}  // namespace tierd

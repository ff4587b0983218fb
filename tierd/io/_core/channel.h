// The client's side of a channel: the shared memory itself, and raw requests on one ring.
//
// A ring has one client, and that client is one thread at a time: a RingClient is not locked. Two
// threads may share one if one of them publishes and the other waits and retires.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "driver.h"
#include "protocol.h"
#include "ring.h"

namespace tierd {

// A request that was not answered, or a ring that had no room, within the caller's time.
struct TimeoutError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct RingSpec {
    std::uint32_t rows_max;
    std::uint32_t arena_pages;
    std::uint32_t table;
    std::uint32_t flags;
};

// Owns a memfd laid out as docs/protocol.md says: header, then per ring control, descriptors and
// stats, then per ring arena D and arena G. Sealed against growing, shrinking and further seals,
// so that no other holder of the fd can make a mapped page vanish.
class Channel {
  public:
    using ClientId = std::array<std::uint8_t, 16>;

    // Throws std::invalid_argument for sizes the protocol forbids, std::system_error if the
    // system refuses the memory.
    Channel(std::uint32_t rank, std::uint32_t world, const ClientId& client_id,
            const std::vector<RingSpec>& rings);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    int fd() const { return fd_; }
    std::uint8_t* base() const { return base_; }
    std::uint64_t bytes() const { return bytes_; }
    std::uint32_t ring_count() const { return ring_count_; }
    RingView ring(std::uint32_t index) const;  // std::invalid_argument if there is none

    // A ring has one client at a time; std::invalid_argument if it has one already.
    void take_ring(std::uint32_t index);
    void release_ring(std::uint32_t index) { taken_[index].clear(); }

  private:
    std::array<std::atomic_flag, kRingsMax> taken_{};
    int fd_ = -1;
    std::uint8_t* base_ = nullptr;
    std::uint64_t bytes_ = 0;
    std::uint32_t ring_count_ = 0;
};

// What a descriptor lists: `count` missing rows.
struct RequestRows {
    const std::uint32_t* page;  // page number in the image
    const std::uint32_t* row;   // row in that page
    const std::uint32_t* slot;  // cache slot, or ~0
    std::uint32_t count;
};

class RingClient {
  public:
    // `wake_fd` is the pump's eventfd (duplicated here), or -1. `first_sequence` is the level that
    // every word of an untouched ring starts from, before any server has seen it; tests use it to
    // come near 2^32. A ring that was used before is taken over where it stands, once everything
    // on it is answered.
    RingClient(std::shared_ptr<Channel> channel, std::uint32_t ring, int wake_fd,
               std::uint32_t spin_us, std::uint32_t first_sequence = 0);
    ~RingClient();
    RingClient(const RingClient&) = delete;
    RingClient& operator=(const RingClient&) = delete;

    const RingView& ring() const { return ring_; }
    std::uint32_t published() const { return published_; }

    // From now on publishing wakes another pump; a thread that publishes meanwhile wakes either.
    void rewake(int wake_fd);

    // Whether a request of `count` rows could be published now.
    bool has_room(std::uint32_t count) const;
    // Publishes into room that is there (has_room); returns the sequence.
    std::uint32_t publish(const RequestRows& rows, Priority priority);
    // As publish, but waits for another thread to retire requests; TimeoutError after timeout_ns.
    std::uint32_t publish_when_room(const RequestRows& rows, Priority priority,
                                    std::uint64_t timeout_ns);

    bool answered(std::uint32_t sequence) const;
    // The request's status, or nothing if no server answered in time.
    std::optional<Status> wait(std::uint32_t sequence, std::uint64_t timeout_ns);
    // From now on waits turn `driver` instead of sleeping, and its time is the client's.
    void drive(std::shared_ptr<Driver> driver) { driver_ = std::move(driver); }
    std::uint64_t now_ns() const;
    // The arena that holds an answered request's pages.
    const std::uint8_t* arena(std::uint32_t sequence) const;
    // Page k of an answered request that is not retired.
    const std::uint8_t* page(const std::uint8_t* arena, std::uint32_t sequence,
                             std::uint32_t k) const;
    std::uint32_t count(std::uint32_t sequence) const;
    // Gives the pages back. In order: `sequence` must be the oldest request not yet retired.
    void retire(std::uint32_t sequence);

    // Reads row 0 of every listed page, `batch` pages a request, `depth` requests out; returns
    // seconds. std::runtime_error names the first request that failed.
    double replay(const std::uint32_t* pages, std::uint64_t page_count, std::uint32_t batch,
                  std::uint32_t depth);

  private:
    struct Answer {
        Status status;
        const std::uint8_t* arena;
    };
    // A request between publish and retire.
    struct Outstanding {
        std::uint32_t first_page;
        std::uint32_t count;
    };
    Answer answer(std::uint32_t sequence) const;
    void take_levels(std::uint32_t first_sequence);
    void wake_pump() const;
    std::optional<Status> wait_turns(std::uint32_t sequence, std::uint64_t timeout_ns);
    void sleep_on_done(std::uint32_t sequence, std::uint64_t timeout_ns);

    std::shared_ptr<Channel> channel_;
    std::uint32_t index_;
    RingView ring_;
    std::shared_ptr<Driver> driver_;
    int wake_fd_ = -1;
    std::uint64_t spin_ns_;
    std::uint32_t published_ = 0;             // last published sequence: the doorbell, unshared
    std::uint64_t cursor_ = 0;                // arena pages ever allotted
    std::atomic<std::uint64_t> released_{0};  // of them given back
    std::array<Outstanding, kRingDepth> outstanding_{};  // by sequence % depth
};

// Counters of RingStats have one writer: a plain load and a relaxed store are enough.
inline void add_relaxed(std::uint64_t& counter, std::uint64_t amount) {
    std::atomic_ref<std::uint64_t> word(counter);
    word.store(word.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

// Readers may be other threads and other processes.
inline std::uint64_t load_relaxed(const std::uint64_t& counter) {
    return std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(counter))
        .load(std::memory_order_relaxed);
}

inline std::uint32_t load_relaxed(const std::uint32_t& word) {
    return std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(word))
        .load(std::memory_order_relaxed);
}

inline void store_relaxed(std::uint64_t& word, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(word).store(value, std::memory_order_relaxed);
}

std::uint64_t monotonic_ns();
const char* status_name(Status status);

}  // namespace tierd

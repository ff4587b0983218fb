// What a guardian sees of the daemon on one ring: does it answer, does it turn, is it ready again?
//
// A guardian is a pump that owns the other arena and changes the tenure (docs/protocol.md, "Two
// servers"). Being wrong is harmless: a ring may be taken from a healthy daemon at any time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol.h"
#include "ring.h"

namespace tierd {

// How many requests wait for an answer; more than a ring's depth is nonsense.
inline std::uint32_t unanswered(const RingControl& c) {
    const std::uint32_t doorbell = load_acquire(c.doorbell.value);
    return std::min(doorbell - load_acquire(c.done_d.value),
                    doorbell - load_acquire(c.done_g.value));
}

class RingWatch {
  public:
    // One look at a ring that the daemon has. True when requests have waited for `limit_ns` and the
    // daemon's loop stood still all the while, or when it asks to be relieved.
    bool suspects(const RingControl& c, std::uint64_t now_ns, std::uint64_t limit_ns) {
        if (load_acquire(c.leaving.value) == 1) return true;
        const std::uint32_t waiting = unanswered(c);
        const std::uint32_t beat = load_acquire(c.beat.value);
        // Between two looks the whole machine may have stood still, and this thread with it: one
        // look counts for half the limit at most.
        still_ns_ += std::min(now_ns - looked_ns_, limit_ns / 2);
        looked_ns_ = now_ns;
        if (waiting == 0 || waiting > kRingDepth || beat != beat_) still_ns_ = 0;
        beat_ = beat;
        return still_ns_ >= limit_ns;
    }

    // One look at a ring that the guardian has under `epoch`. True once the daemon holds no read in
    // flight for that epoch and its loop has turned since.
    bool daemon_is_ready(const RingControl& c, std::uint32_t epoch) {
        const std::uint32_t beat = load_acquire(c.beat.value);
        if (load_acquire(c.drained.value) != epoch || load_acquire(c.leaving.value) == 1) {
            drained_ = false;
            return false;
        }
        if (!drained_) {
            drained_ = true;
            beat_ = beat;
        }
        return beat != beat_;
    }

    // The ring has changed hands.
    void restart(std::uint64_t now_ns) {
        still_ns_ = 0;
        looked_ns_ = now_ns;
        drained_ = false;
    }

    // The status of the oldest request that failed since the last call, with no server able to
    // answer it, or `none`; `sequence` says which.
    Status failure(const RingControl& c, std::uint32_t& sequence) {
        const std::uint32_t answered = load_acquire(c.doorbell.value) - unanswered(c);
        std::uint32_t s = answered - judged_ > kRingDepth ? answered - kRingDepth : judged_;
        judged_ = answered;
        while (s != answered) {
            ++s;
            const Status d = status_of(c.status_d, s);
            const Status g = status_of(c.status_g, s);
            if (d == Status::ok || g == Status::ok || (d == Status::none && g == Status::none)) continue;
            sequence = s;
            return d == Status::none ? g : d;
        }
        return Status::none;
    }

  private:
    static Status status_of(const StatusLine& line, std::uint32_t sequence) {
        const std::uint64_t word = load_acquire(line.word[sequence % kRingDepth]);
        return static_cast<std::uint32_t>(word >> 32) == sequence
                   ? static_cast<Status>(static_cast<std::uint32_t>(word))
                   : Status::none;
    }

    std::uint32_t beat_ = 0;
    std::uint64_t looked_ns_ = 0;
    std::uint64_t still_ns_ = 0;
    bool drained_ = false;
    std::uint32_t judged_ = 0;
};

}  // namespace tierd

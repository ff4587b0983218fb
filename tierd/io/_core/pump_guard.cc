// The data path of a pump that is an engine's guardian. See pump.h and guardian.h.
//
// While the daemon serves, the guardian looks at the rings a few times in the time that it grants
// the daemon, and does nothing else. Once it suspects the daemon on one ring it takes all of them,
// since they have the same daemon; it hands them back one by one. It makes no CUDA call, allocates
// nothing, and takes no lock that Python could hold.
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <ctime>

#include "channel.h"
#include "guardian.h"
#include "pump.h"

namespace tierd {
namespace {

// Looks in the time that a daemon may stand still.
constexpr std::uint64_t kLooks = 5;
// A ring in the guardian's hands is looked at every park_us while it is in use, and else this
// often: nobody rings a guardian.
constexpr std::uint64_t kInUseNs = 100'000'000;
constexpr std::uint64_t kQuietNs = 1'000'000;
// The engine may say what it knows of a failure before it is ended.
constexpr timespec kLastWords{2, 0};

}  // namespace

// From any thread.
void Pump::alarm() {
    alarm_.store(true, std::memory_order_release);
    ring_eventfd(wake_fd_);
}

void Pump::start_guarding(ServerRing& ring) {
    const std::uint64_t now = simulated_ ? turn_ns() : monotonic_ns();
    std::uint32_t ignored = 0;
    ring.watch.failure(ring.control(), ignored);
    ring.watch.restart(now);
    // An earlier guardian of this engine had it; all its reads are reaped.
    if (load_tenure(ring.control().tenure).owner == static_cast<std::uint32_t>(Owner::guardian))
        ring.take();
    rings_.push_back(&ring);
}

bool Pump::guard_rings(std::uint64_t now_ns) {
    bool take = alarm_.load(std::memory_order_relaxed) && alarm_.exchange(false);
    for (ServerRing* ring : rings_)
        if (!ring->serving()) take |= ring->watch.suspects(ring->control(), now_ns, suspect_ns_);
    bool busy = false;
    for (ServerRing* ring : rings_) {
        if (!ring->serving() && take) {
            ring->take();
            ring->watch.restart(now_ns);
        }
        if (ring->serving()) busy |= guard_ring(*ring, now_ns);
        if (options_.end_rank && (ring->view().flags & kRingFlagGpu) != 0) look_for_failure(*ring);
    }
    if (busy) news_ns_ = now_ns;
    return busy;
}

// One look at a ring that the guardian has.
bool Pump::guard_ring(ServerRing& ring, std::uint64_t now_ns) {
    if (ring.watch.daemon_is_ready(ring.control(), ring.epoch())) {
        if (!ring.hand_back()) return false;
        heap_.remove(&ring);
        ring.watch.restart(now_ns);
        return true;
    }
    return look_at_requests(ring, now_ns);
}

void Pump::look_for_failure(ServerRing& ring) {
    std::uint32_t sequence = 0;
    const Status status = ring.watch.failure(ring.control(), sequence);
    if (status == Status::none) return;
    const ImageKey& key = ring.table().key;
    const DescriptorHeader& request = *ring.view().descriptor(sequence).header;
    std::fprintf(stderr,
                 "tierd guardian: request %" PRIu32 " failed: %s, image %016" PRIx64
                 ", generation %" PRIu32 ", %" PRIu32
                 " rows; the GPU cannot go on without them, so this rank ends; run: tierd verify\n",
                 sequence, status_name(status), key.image_id, key.generation, request.count);
    nanosleep(&kLastWords, nullptr);
    _exit(1);
}

std::uint64_t Pump::guard_limit_ns() const {
    std::uint64_t limit = suspect_ns_ / kLooks;
    const bool in_use = monotonic_ns() - news_ns_ < kInUseNs;
    for (const ServerRing* ring : rings_)
        if (ring->serving()) limit = std::min(limit, in_use ? park_ns_ : kQuietNs);
    return limit;
}

}  // namespace tierd

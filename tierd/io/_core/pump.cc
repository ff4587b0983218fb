// The data path. See pump.h.
#include "pump.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "channel.h"
#include "page.h"
#include "reader_sim.h"

namespace tierd {
namespace {

// The guardian suspects a server whose beat stands still for 20 ms, so a pump that waits for reads
// looks up more often than that.
constexpr std::uint64_t kBeatNs = 5'000'000;
// How soon a ring in the guardian's hands is looked at again.
constexpr std::uint64_t kTakenNs = 1'000'000;
// Nothing at all to do: a lost wake-up costs no more than this.
constexpr std::uint64_t kIdleNs = 100'000'000;
// Between two batches the kernel's work on the reads drives our few tables out of the cache, so they
// are asked for this many pages before they are used; so are the trailers that are judged, which
// the device has just written.
constexpr std::uint32_t kIssueMax = 64;  // pages looked at before the first of them are submitted
constexpr std::size_t kAheadTable = 16;
constexpr std::size_t kAheadTrailer = 6;

void relax_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::uint64_t nanoseconds(const timeval& t) {
    return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(t.tv_usec) * 1'000;
}

}  // namespace

void Pump::run() noexcept {
    prepare_thread();
    reader_->begin();
    std::uint64_t quiet_since = monotonic_ns();
    while (!exit_.load(std::memory_order_acquire)) {
        const std::uint64_t now = monotonic_ns();
        const bool more = run_commands();
        const bool busy = work(now);
        if (spin_ns_ == 0 && !more && !issuable()) {
            sleep();  // what was issued goes in with it, in one call
            continue;
        }
        reader_->submit();
        if (busy || more)
            quiet_since = now;
        else if (now - quiet_since < spin_ns_)
            relax_cpu();
        else
            sleep();
    }
    reader_->end();
    save_cpu_times();
}

bool Pump::work(std::uint64_t now_ns) {
    bool busy = reap(now_ns);
    busy |= look_at_rings(now_ns);
    // A deep queue is filled a part at a time: the device begins with the first reads, and the first
    // pages are judged, while later ones still go out.
    for (std::uint32_t left = options_.queue_depth; issue(now_ns);) {
        busy = true;
        left -= std::min(left, kIssueMax);
        if (simulated_ || left == 0 || !issuable()) break;
        reader_->submit();
        reap(now_ns);
    }
    return busy;
}

void Pump::turn() {
    if (!simulated_) throw std::runtime_error("only a simulated pump is turned by hand");
    ++turns_;
    if (stopped_) return;
    run_commands();
    work(turn_ns());
}

std::uint64_t Pump::turn_ns() const { return turns_ * kSimTurnNs; }

void Pump::prepare_thread() {
    pthread_setname_np(pthread_self(), options_.guardian ? "tierd-guardian" : "tierd-pump");
    // The default slack of 50 us would double park_us.
    prctl(PR_SET_TIMERSLACK, 1000);
    if (options_.cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(options_.cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

void Pump::save_cpu_times() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    counts_.cpu_user_ns = nanoseconds(usage.ru_utime);
    counts_.cpu_system_ns = nanoseconds(usage.ru_stime);
}

bool Pump::run_commands() {
    if (!commands_left_ && !commands_new_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(command_mutex_);
    commands_new_.store(false, std::memory_order_relaxed);
    bool busy = false;
    for (std::size_t i = 0; i < commands_.size();) {
        const Progress progress = commands_[i]->step();
        busy |= progress != Progress::waiting;
        if (progress == Progress::finished) {
            commands_[i]->finished = true;
            commands_.erase(commands_.begin() + static_cast<std::ptrdiff_t>(i));
            command_done_.notify_all();
        } else {
            ++i;
        }
    }
    commands_left_ = !commands_.empty();
    return busy;
}

bool Pump::look_at_rings(std::uint64_t now_ns) {
    beats_.store(++counts_.beats, std::memory_order_relaxed);
    if (options_.guardian) return guard_rings(now_ns);
    bool busy = false;
    ++beat_;
    for (ServerRing* ring : rings_) {
        store_release(ring->control().beat.value, beat_);
        if (!ring->serving()) {
            // Until the reads of the lost tenure are reaped, arena D is not drained.
            if (ring->in_flight == 0) busy |= ring->adopt();
        } else if (!ring->ours()) {
            heap_.remove(ring);
            ring->lose();
            busy = true;
        } else {
            busy |= look_at_requests(*ring, now_ns);
        }
    }
    return busy;
}

bool Pump::look_at_requests(ServerRing& ring, std::uint64_t now_ns) {
    if (!ring.has_news()) return false;
    ring.accept(now_ns);
    ring.complete();  // of what was refused at once
    reschedule(ring);
    return true;
}

void Pump::reschedule(ServerRing& ring) {
    if (ring.serving() && !ring.closing() && ring.issuing() != nullptr)
        heap_.put(&ring);
    else
        heap_.remove(&ring);
}

// --- reads ---------------------------------------------------------------------------------------

bool Pump::issue(std::uint64_t now_ns) {
    std::size_t ready = retries_.empty() ? 0 : issue_retries(now_ns);
    bool staged = false;
    const std::size_t most = simulated_ ? options_.queue_depth : kIssueMax;
    for (std::size_t looked_at = 0; looked_at < most && issuable();) {
        ServerRing& ring = *heap_.top();
        if (!ring.ours()) {
            heap_.remove(&ring);  // the next look at the rings finds it lost
            continue;
        }
        if (ring.blocked()) {
            heap_.remove(&ring);  // the next read of this ring that is reaped brings it back
            ++counts_.held_back;
            continue;
        }
        ServerRequest& request = *ring.issuing();
        const auto room = static_cast<std::uint32_t>(std::min(free_.size(), most - looked_at));
        const std::uint32_t count = std::min(room, request.limit - request.issued);
        looked_at += count;
        const std::uint32_t reads =
            issue_request(ring, request, count, now_ns, batch_.data() + ready);
        ready += reads;
        staged |= reads != count;
        ring.advance_issue();
        if (request.in_flight == 0 && request.issued == request.limit) complete(ring);
        reschedule(ring);
    }
    if (ready == 0) return staged;
    counts_.in_flight += static_cast<std::uint32_t>(ready);
    counts_.in_flight_max = std::max(counts_.in_flight_max, counts_.in_flight);
    reader_->push(batch_.data(), ready);
    return true;
}

std::size_t Pump::issue_retries(std::uint64_t now_ns) {
    std::size_t ready = 0;
    for (const std::uint32_t token : retries_) {
        ServerRing& ring = *slots_[token].ring;
        if (ring.serving() && ring.ours())
            batch_[ready++] = prepare(token, now_ns);
        else
            forget(token);
    }
    retries_.clear();
    return ready;
}

// Returns how many reads it has made: pages that a hint has left in memory need none.
std::uint32_t Pump::issue_request(ServerRing& ring, ServerRequest& request, std::uint32_t count,
                                  std::uint64_t now_ns, Read* out) {
    const ExtentMap& map = ring.table().map;
    const auto number = static_cast<std::uint8_t>(request.sequence % kRingDepth);
    const std::uint32_t* pages = request.pages + request.issued;
    const std::uint32_t ahead = std::min<std::uint32_t>(count, kAheadTable);
    for (std::uint32_t i = 0; i < ahead; ++i) map.prefetch(pages[i]);
    const auto first = static_cast<std::uint8_t>(attempt_from(ring.table(), 0));
    std::uint32_t reads = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint32_t row = request.issued + i;
        if (ring.hint != nullptr && request.hinted && ring.take_staged(request, row)) continue;
        if (i + ahead < count) map.prefetch(pages[i + ahead]);
        const std::uint32_t token = free_.back();
        free_.pop_back();
        slots_[token] = {&ring, now_ns, row, 0, number, first};
        out[reads++] = prepare(token, now_ns);
    }
    if (first != 0) counts_.passed_over += reads;
    request.issued += count;
    request.in_flight += reads;
    ring.in_flight += reads;
    return reads;
}

Read Pump::prepare(std::uint32_t token, std::uint64_t now_ns) {
    ReadSlot& slot = slots_[token];
    ServerRing& ring = *slot.ring;
    const ServerRequest& request = ring.request(slot.request);
    const std::uint32_t arena_page = ring.arena_page(request, slot.row);
    const PagePlace place = ring.table().tier(slot.attempt).locate(request.pages[slot.row]);
    slot.submitted_ns = now_ns;
    slot.device = static_cast<std::uint16_t>(place.device);
    ++device_counts_[place.device].in_flight;
    return {ring.arena(arena_page), place.offset, place.device, ring.buffer_of(arena_page), token};
}

bool Pump::reap(std::uint64_t now_ns) {
    const std::size_t n = reader_->reap(done_.data(), done_.size());
    if (n == 0) return false;
    counts_.in_flight -= static_cast<std::uint32_t>(n);
    counts_.reads += n;
    const std::size_t ahead = std::min(n, kAheadTable);
    for (std::size_t i = 0; i < ahead; ++i) __builtin_prefetch(&slots_[done_[i].token]);
    for (std::size_t i = 0; i < n; ++i) {
        if (i + ahead < n) __builtin_prefetch(&slots_[done_[i + ahead].token]);
        if (options_.checks && i + kAheadTrailer < n)
            __builtin_prefetch(target(slots_[done_[i + kAheadTrailer].token]) + kPageBytes -
                               kTrailerBytes);
        const ReadSlot& slot = slots_[done_[i].token];
        const auto bucket =
            static_cast<std::uint32_t>(std::bit_width((now_ns - slot.submitted_ns) / 1000));
        ++counts_.latency_us[std::min(bucket, kLatencyBuckets - 1)];
        DeviceReport& device = device_counts_[slot.device];
        ++device.latency_us[std::min(bucket, kLatencyBuckets - 1)];
        --device.in_flight;
        finish(done_[i].token, done_[i].result);
    }
    return true;
}

// The first attempt from `attempt` on whose tier is there, or table.attempts().
std::uint32_t Pump::ready_from(const ServedTable& table, std::uint32_t attempt) const {
    while (attempt < table.attempts() && !remote_->ready(table.tier(attempt).first_device())) ++attempt;
    return attempt;
}

// As ready_from, but where no tier is there, `attempt` itself: the reader then holds the read for a
// while.
std::uint32_t Pump::attempt_from(const ServedTable& table, std::uint32_t attempt) const {
    if (remote_ == nullptr) return attempt;
    const std::uint32_t ready = ready_from(table, attempt);
    return ready < table.attempts() ? ready : attempt;
}

std::uint32_t Pump::attempt_after(const ReadSlot& slot, std::int32_t result) const {
    const std::uint32_t next = slot.attempt + 1u;
    const ServedTable& table = slot.ring->table();
    if (remote_ == nullptr || next >= table.attempts()) return next;
    if (result < 0 && remote_->is_remote(slot.device)) {
        // One that was held is not held again: the engine would give up before the second time ends.
        if (result == kHeldInVain) return ready_from(table, next);
        // A peer that did not answer is not asked again at once, unless the pages lie nowhere else.
        // A read that then is held waits as the second attempt, so that any tier can end its wait.
        const std::uint32_t elsewhere = slot.attempt == 0 ? ready_from(table, 2) : table.attempts();
        if (elsewhere < table.attempts()) return elsewhere;
    }
    return attempt_from(table, next);
}

// Whether a held read has nothing to wait for any more: another tier is there, or another server has
// the ring, for which arena D is to be drained.
bool Pump::released(std::uint32_t token) const {
    const ReadSlot& slot = slots_[token];
    const ServedTable& table = slot.ring->table();
    return !slot.ring->serving() || ready_from(table, slot.attempt) < table.attempts();
}

std::uint8_t* Pump::target(const ReadSlot& slot) const {
    return slot.ring->arena(slot.ring->arena_page(slot.ring->request(slot.request), slot.row));
}

void Pump::finish(std::uint32_t token, std::int32_t result) {
    ReadSlot& slot = slots_[token];
    ServerRing& ring = *slot.ring;
    ServerRequest& request = ring.request(slot.request);
    DeviceReport& device = device_counts_[slot.device];
    ++device.reads;
    if (ring.serving()) {
        const Status status = judge(slot, result);
        if (status != Status::ok) {
            ++device.errors;
            const std::uint32_t next = attempt_after(slot, result);
            if (next < ring.table().attempts() && request.status == Status::ok) {
                ++(next == 1 ? counts_.retries : counts_.next_tier);
                slot.attempt = static_cast<std::uint8_t>(next);
                retries_.push_back(token);
                return;
            }
            ring.fail(request, status);
            ring.advance_issue();
            reschedule(ring);
        }
    }
    forget(token);
    if (request.in_flight != 0) return;
    if (request.issued == request.limit) complete(ring);
    if (ring.heap_at == kNotInHeap) reschedule(ring);  // it may have been blocked
}

void Pump::complete(ServerRing& ring) { ring.complete(simulated_ ? turn_ns() : monotonic_ns()); }

void Pump::forget(std::uint32_t token) {
    const ReadSlot& slot = slots_[token];
    --slot.ring->request(slot.request).in_flight;
    --slot.ring->in_flight;
    free_.push_back(token);
}

Status Pump::judge(const ReadSlot& slot, std::int32_t result) {
    if (result < 0) return Status::read_error;
    if (result != static_cast<std::int32_t>(kPageBytes)) return Status::short_read;
    if (!options_.checks) return Status::ok;
    // A page that failed once, or that came from another node's memory, is never let through on the
    // strength of its trailer alone, whatever is sampled of the others.
    bool check_crc = false;
    const bool always = slot.attempt != 0 || (remote_ != nullptr && remote_->is_remote(slot.device));
    if (always || (options_.crc_sample != 0 && ++crc_turn_ >= options_.crc_sample)) {
        check_crc = true;
        crc_turn_ = 0;
        ++counts_.crc_checked;
    }
    const ServedTable& table = slot.ring->table();
    const std::uint32_t page = slot.ring->request(slot.request).pages[slot.row];
    switch (check_page(target(slot), page, table.geometry, table.key, check_crc, false)) {
        case PageFault::ok: return Status::ok;
        case PageFault::crc: return Status::bad_crc;
        default: return Status::wrong_page;
    }
}

// --- sleep ---------------------------------------------------------------------------------------

bool Pump::news() const {
    if (commands_new_.load(std::memory_order_acquire)) return true;
    return std::any_of(rings_.begin(), rings_.end(), [](const ServerRing* r) { return r->has_news(); });
}

void Pump::set_parked(std::uint32_t value) {
    for (ServerRing* ring : rings_) store_release(ring->control().parked.value, value);
}

void Pump::sleep() {
    // With a full queue a new request could not start anyway: nobody needs to ring.
    // And nobody can ring a guardian: it looks by itself.
    const bool park = !free_.empty() && !options_.guardian;
    if (park) {
        set_parked(1);
        // The client stores the doorbell, fences, and looks at parked; or we see its doorbell here.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (news()) {
            set_parked(0);
            reader_->submit();  // a client that always has news must not hold others' reads back
            return;
        }
        ++counts_.parks;
    }
    reader_->wait(wait_count(), wait_limit_ns());
    if (park) set_parked(0);
}

// How many reads to sleep for. With a full queue, half of it at most, so that the device keeps the
// other half, and an eighth at least: who has switched spinning off wants to save wake-ups. With
// room in the queue a new request must not wait long, so a sixteenth at most. In between: what the
// oldest request of some ring still needs, since nothing can be answered before.
std::uint32_t Pump::wait_count() const {
    const bool full = free_.empty();
    std::uint32_t count = counts_.in_flight / (full ? 2 : 16);
    for (const ServerRing* ring : rings_)
        if (ring->in_flight != 0) count = std::min(count, ring->head_remaining());
    return std::max({count, full ? counts_.in_flight / 8 : 0, 1u});
}

std::uint64_t Pump::wait_limit_ns() const {
    std::uint64_t limit = counts_.in_flight != 0 || commands_left_ ? kBeatNs : kIdleNs;
    if (options_.guardian) return std::min(limit, guard_limit_ns());
    if (gpu_rings_ != 0) limit = std::min(limit, park_ns_);  // a GPU rings no eventfd
    for (const ServerRing* ring : rings_)
        if (!ring->serving()) limit = std::min(limit, kTakenNs);
    return limit;
}

}  // namespace tierd

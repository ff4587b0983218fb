#include "channel.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tierd {

namespace {

// A sleeper looks again this often: the guardian's done_g wakes no futex on done_d.
constexpr std::uint64_t kFutexNs = 2'000'000;
// How long a replay waits for one request before it gives up.
constexpr std::uint64_t kReplayTimeoutNs = 30'000'000'000;
// Reading the clock costs as much as some twenty looks at a cached line.
constexpr int kLooksPerClock = 32;

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

[[noreturn]] void throw_errno(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t align_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

void check_spec(const RingSpec& spec, std::size_t index) {
    const std::string name = "ring " + std::to_string(index) + ": ";
    if (spec.rows_max == 0 || spec.rows_max > kRowsMaxLimit)
        throw std::invalid_argument(name + "rows_max must be between 1 and " +
                                    std::to_string(kRowsMaxLimit) + ", got " +
                                    std::to_string(spec.rows_max));
    if (spec.arena_pages < spec.rows_max || spec.arena_pages > kArenaPagesLimit)
        throw std::invalid_argument(name + "arena_pages must be between rows_max and " +
                                    std::to_string(kArenaPagesLimit) + ", got " +
                                    std::to_string(spec.arena_pages));
    if (spec.table >= kRingsMax)
        throw std::invalid_argument(name + "table must be below " + std::to_string(kRingsMax) +
                                    ", got " + std::to_string(spec.table));
}

// Places every ring's parts; returns the channel's size.
std::uint64_t lay_out(const std::vector<RingSpec>& specs, RingEntry* entries) {
    std::uint64_t at = sizeof(ChannelHeader);
    for (std::size_t i = 0; i < specs.size(); ++i) {
        const RingSpec& spec = specs[i];
        check_spec(spec, i);
        RingEntry& e = entries[i];
        e = {};
        e.rows_max = spec.rows_max;
        e.arena_pages = spec.arena_pages;
        e.table = spec.table;
        e.flags = spec.flags;
        e.control = at;
        e.descriptors = e.control + sizeof(RingControl);
        e.stats = e.descriptors + kRingDepth * descriptor_bytes(spec.rows_max);
        e.samples = e.stats + sizeof(RingStats);
        at = e.samples + sizeof(SampleHeader) + kSampleCapacity * sizeof(std::uint64_t);
    }
    at = align_up(at, kPageBytes);
    for (std::size_t i = 0; i < specs.size(); ++i) {
        if ((specs[i].flags & kRingFlagHint) != 0) continue;
        const std::uint64_t arena = static_cast<std::uint64_t>(specs[i].arena_pages) * kPageBytes;
        entries[i].arena_d = at;
        entries[i].arena_g = at + arena;
        at += 2 * arena;
    }
    return at;
}

}  // namespace

std::uint64_t monotonic_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(t.tv_nsec);
}

const char* status_name(Status status) {
    switch (status) {
        case Status::none: return "none";
        case Status::ok: return "ok";
        case Status::read_error: return "read_error";
        case Status::short_read: return "short_read";
        case Status::wrong_page: return "wrong_page";
        case Status::bad_crc: return "bad_crc";
        case Status::bad_request: return "bad_request";
        case Status::cancelled: return "cancelled";
    }
    return "unknown";
}

// --- Channel -------------------------------------------------------------------------------------

Channel::Channel(std::uint32_t rank, std::uint32_t world, const ClientId& client_id,
                 const std::vector<RingSpec>& rings)
    : ring_count_(static_cast<std::uint32_t>(rings.size())) {
    if (rings.empty() || rings.size() > kRingsMax)
        throw std::invalid_argument("a channel has 1 to " + std::to_string(kRingsMax) +
                                    " rings, got " + std::to_string(rings.size()));
    if (world == 0 || rank >= world)
        throw std::invalid_argument("rank must be below world, got rank " + std::to_string(rank) +
                                    " of " + std::to_string(world));
    std::array<RingEntry, kRingsMax> entries{};
    bytes_ = lay_out(rings, entries.data());

    fd_ = memfd_create("tierd-channel", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw_errno("memfd_create for the channel");
    void* mapped = MAP_FAILED;
    if (ftruncate(fd_, static_cast<off_t>(bytes_)) == 0 &&
        fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        throw std::system_error(error, std::generic_category(),
                                "size, seal and map a channel of " + std::to_string(bytes_) +
                                    " bytes");
    }
    base_ = static_cast<std::uint8_t*>(mapped);

    auto& header = *reinterpret_cast<ChannelHeader*>(base_);
    header.abi = kChannelAbi;
    header.total_bytes = bytes_;
    header.ring_count = ring_count_;
    header.rank = rank;
    header.world = world;
    header.pid = static_cast<std::uint32_t>(getpid());
    std::copy(client_id.begin(), client_id.end(), header.client_id);
    std::copy_n(entries.begin(), ring_count_, header.rings);
    for (std::uint32_t i = 0; i < ring_count_; ++i) {
        auto& samples = *reinterpret_cast<SampleHeader*>(base_ + entries[i].samples);
        samples.capacity = kSampleCapacity;
        samples.threshold = kSampleThreshold;
    }
    // The magic comes last: a header that has it is whole.
    store_release(header.magic, kChannelMagic);
}

Channel::~Channel() {
    munmap(base_, bytes_);
    close(fd_);
}

RingView Channel::ring(std::uint32_t index) const {
    if (index >= ring_count_)
        throw std::invalid_argument("the channel has " + std::to_string(ring_count_) +
                                    " rings, there is no ring " + std::to_string(index));
    const auto& header = *reinterpret_cast<const ChannelHeader*>(base_);
    return {base_, bytes_, header.rings[index]};
}

void Channel::take_ring(std::uint32_t index) {
    if (taken_[index].test_and_set())
        throw std::invalid_argument("ring " + std::to_string(index) + " has a client already");
}

// --- RingClient ----------------------------------------------------------------------------------

RingClient::RingClient(std::shared_ptr<Channel> channel, std::uint32_t ring, int wake_fd,
                       std::uint32_t spin_us, std::uint32_t first_sequence)
    : channel_(std::move(channel)),
      index_(ring),
      ring_(channel_->ring(ring)),
      spin_ns_(static_cast<std::uint64_t>(spin_us) * 1000) {
    channel_->take_ring(ring);
    try {
        take_levels(first_sequence);
        if (wake_fd >= 0) wake_fd_ = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
        if (wake_fd >= 0 && wake_fd_ < 0) throw_errno("dup of the pump's eventfd");
    } catch (...) {
        channel_->release_ring(ring);
        throw;
    }
}

RingClient::~RingClient() {
    if (wake_fd_ >= 0) close(wake_fd_);
    channel_->release_ring(index_);
}

void RingClient::rewake(int wake_fd) {
    if (wake_fd_ < 0) return;
    // The number stays the same, so that no publisher can meet a closed one.
    if (dup3(wake_fd, wake_fd_, O_CLOEXEC) < 0) throw_errno("dup of the pump's eventfd");
}

void RingClient::take_levels(std::uint32_t first_sequence) {
    RingControl& c = *ring_.control;
    const std::uint32_t doorbell = load_acquire(c.doorbell.value);
    published_ = doorbell;
    if (first_sequence == 0) {
        if (doorbell != load_acquire(c.done_d.value) && doorbell != load_acquire(c.done_g.value))
            throw std::invalid_argument("ring " + std::to_string(index_) +
                                        " has requests in flight from an earlier client");
        store_release(c.retired.value, doorbell);
        return;
    }
    if (doorbell != 0 || load_acquire(c.done_d.value) != 0)
        throw std::invalid_argument("first_sequence is for a ring that was never used");
    // All levels start together, so that a server goes on at the same sequence.
    store_release(c.done_d.value, first_sequence);
    store_release(c.done_g.value, first_sequence);
    store_release(c.retired.value, first_sequence);
    store_release(c.doorbell.value, first_sequence);
    published_ = first_sequence;
}

bool RingClient::has_room(std::uint32_t count) const {
    // `retired` is our own word; released_ is stored before it, so the pages counted as released
    // are at least those of the requests that it covers.
    const std::uint32_t retired = load_acquire(ring_.control->retired.value);
    if (published_ + 1 - retired > kRingDepth) return false;
    return cursor_ + count - released_.load(std::memory_order_acquire) <= ring_.arena_pages;
}

std::uint32_t RingClient::publish(const RequestRows& rows, Priority priority) {
    if (rows.count == 0 || rows.count > ring_.rows_max)
        throw std::invalid_argument("a request has 1 to " + std::to_string(ring_.rows_max) +
                                    " rows, got " + std::to_string(rows.count));
    if (!has_room(rows.count)) throw std::logic_error("publish into a ring without room");
    const std::uint32_t sequence = published_ + 1;
    const auto first_page = static_cast<std::uint32_t>(cursor_ % ring_.arena_pages);
    const Descriptor d = ring_.descriptor(sequence);
    d.header->sequence = sequence;
    d.header->count = rows.count;
    d.header->first_page = first_page;
    d.header->priority = static_cast<std::uint32_t>(priority);
    const std::size_t bytes = static_cast<std::size_t>(rows.count) * 4;
    std::memcpy(d.page, rows.page, bytes);
    std::memcpy(d.row, rows.row, bytes);
    std::memcpy(d.slot, rows.slot, bytes);
    outstanding_[sequence % kRingDepth] = {first_page, rows.count};
    cursor_ += rows.count;
    published_ = sequence;
    add_relaxed(ring_.stats->published, 1);
    store_release(ring_.control->doorbell.value, sequence);
    wake_pump();
    return sequence;
}

void RingClient::wake_pump() const {
    // The pump stores `parked`, fences and looks at the doorbells once more before it sleeps. With
    // our fence between doorbell and `parked`, one of the two always sees the other's store.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (wake_fd_ < 0 || load_acquire(ring_.control->parked.value) == 0) return;
    const std::uint64_t one = 1;
    // EAGAIN means that the counter is full, so the pump is awake or about to be.
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
}

std::uint32_t RingClient::publish_when_room(const RequestRows& rows, Priority priority,
                                            std::uint64_t timeout_ns) {
    if (rows.count <= ring_.rows_max && !has_room(rows.count)) {
        add_relaxed(ring_.stats->ring_full, 1);
        const std::uint64_t deadline = monotonic_ns() + timeout_ns;
        while (!has_room(rows.count)) {
            if (monotonic_ns() >= deadline)
                throw TimeoutError("the ring has no room: nothing was retired in time");
            const timespec nap{0, 50'000};
            nanosleep(&nap, nullptr);
        }
    }
    return publish(rows, priority);
}

bool RingClient::answered(std::uint32_t sequence) const {
    return answer(sequence).status != Status::none;
}

RingClient::Answer RingClient::answer(std::uint32_t sequence) const {
    const RingControl& c = *ring_.control;
    const auto look = [&](const Line32& done, const StatusLine& line) {
        // A server that answers is within a ring's depth. The level of one that has long been silent
        // would be ahead of half of all sequences.
        if (load_acquire(done.value) - sequence >= kRingDepth) return Status::none;
        const std::uint64_t word = load_acquire(line.word[sequence % kRingDepth]);
        if (static_cast<std::uint32_t>(word >> 32) != sequence) return Status::none;
        return static_cast<Status>(static_cast<std::uint32_t>(word));
    };
    const Status daemon = look(c.done_d, c.status_d);
    const Status guardian = look(c.done_g, c.status_g);
    // Both may have answered; then both arenas hold the pages, and one good answer is enough.
    if (daemon == Status::ok || guardian == Status::none) return {daemon, ring_.arena_d};
    return {guardian, ring_.arena_g};
}

std::optional<Status> RingClient::wait(std::uint32_t sequence, std::uint64_t timeout_ns) {
    if (answered(sequence)) return answer(sequence).status;
    if (driver_ != nullptr) return wait_turns(sequence, timeout_ns);
    const std::uint64_t start = monotonic_ns();
    const std::uint64_t spin = std::min(spin_ns_, timeout_ns);
    for (;;) {
        for (int i = 0; i < kLooksPerClock; ++i) {
            if (answered(sequence)) return answer(sequence).status;
            pause_cpu();
        }
        const std::uint64_t waited = monotonic_ns() - start;
        if (waited >= timeout_ns) return std::nullopt;
        if (waited >= spin) sleep_on_done(sequence, timeout_ns - waited);
    }
}

std::optional<Status> RingClient::wait_turns(std::uint32_t sequence, std::uint64_t timeout_ns) {
    const std::uint64_t start = now_ns();
    while (!answered(sequence)) {
        if (now_ns() - start >= timeout_ns) return std::nullopt;
        driver_->turn();
    }
    return answer(sequence).status;
}

std::uint64_t RingClient::now_ns() const {
    return driver_ != nullptr ? driver_->turn_ns() : monotonic_ns();
}

void RingClient::sleep_on_done(std::uint32_t sequence, std::uint64_t timeout_ns) {
    RingControl& c = *ring_.control;
    store_release(c.waiter.value, 1);
    // The server stores done, fences and reads `waiter`; as in wake_pump, one of us sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::uint32_t seen = load_acquire(c.done_d.value);
    if (!answered(sequence)) {
        const timespec t{0, static_cast<long>(std::min(timeout_ns, kFutexNs))};
        // Not FUTEX_PRIVATE: the waker is another process. Every return (woken, a changed word,
        // a signal, the time) means the same: look again.
        syscall(SYS_futex, &c.done_d.value, FUTEX_WAIT, seen, &t, nullptr, 0);
    }
    store_release(c.waiter.value, 0);
}

const std::uint8_t* RingClient::arena(std::uint32_t sequence) const {
    return answer(sequence).arena;
}

std::uint32_t RingClient::count(std::uint32_t sequence) const {
    const std::uint32_t retired = load_acquire(ring_.control->retired.value);
    const std::uint32_t published = load_acquire(ring_.control->doorbell.value);
    const std::uint32_t ahead = sequence - retired;
    if (ahead == 0 || ahead > published - retired)
        throw std::invalid_argument("request " + std::to_string(sequence) +
                                    " is not outstanding; retired up to " +
                                    std::to_string(retired));
    return outstanding_[sequence % kRingDepth].count;
}

const std::uint8_t* RingClient::page(const std::uint8_t* arena, std::uint32_t sequence,
                                     std::uint32_t k) const {
    const std::uint64_t first = outstanding_[sequence % kRingDepth].first_page;
    return arena + (first + k) % ring_.arena_pages * kPageBytes;
}

void RingClient::retire(std::uint32_t sequence) {
    const std::uint32_t retired = load_acquire(ring_.control->retired.value);
    // The doorbell, not published_: the publisher may be another thread (see channel.h).
    const std::uint32_t published = load_acquire(ring_.control->doorbell.value);
    if (sequence != retired + 1 || retired == published)
        throw std::invalid_argument("requests retire in order: " + std::to_string(sequence) +
                                    " does not follow " + std::to_string(retired));
    const std::uint64_t pages = outstanding_[sequence % kRingDepth].count;
    released_.store(released_.load(std::memory_order_relaxed) + pages, std::memory_order_release);
    store_release(ring_.control->retired.value, sequence);
}

double RingClient::replay(const std::uint32_t* pages, std::uint64_t page_count,
                          std::uint32_t batch, std::uint32_t depth) {
    if (batch == 0 || batch > ring_.rows_max || depth == 0 || depth > kRingDepth ||
        static_cast<std::uint64_t>(batch) * depth > ring_.arena_pages)
        throw std::invalid_argument("replay: batch and depth must fit rows_max, 8 and the arena");
    if (load_acquire(ring_.control->retired.value) != published_)
        throw std::invalid_argument("replay: the ring has requests that are not retired");
    const std::vector<std::uint32_t> rows(batch, 0);
    const std::vector<std::uint32_t> slots(batch, ~0u);
    std::uint32_t oldest = published_ + 1;
    std::string failure;
    const auto finish_oldest = [&] {
        const std::optional<Status> status = wait(oldest, kReplayTimeoutNs);
        if (!status) throw TimeoutError("replay: no answer to request " + std::to_string(oldest));
        if (*status != Status::ok && failure.empty())
            failure = "replay: request " + std::to_string(oldest) +
                      " failed: " + status_name(*status);
        retire(oldest++);
    };
    const std::uint64_t start = monotonic_ns();
    for (std::uint64_t at = 0; at < page_count && failure.empty(); at += batch) {
        if (published_ - oldest + 1 == depth) finish_oldest();
        const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(batch, page_count - at));
        publish({pages + at, rows.data(), slots.data(), n}, Priority::decode);
    }
    // Also after a failure: the ring can be used again.
    while (oldest != published_ + 1) finish_oldest();
    if (!failure.empty()) throw std::runtime_error(failure);
    return static_cast<double>(monotonic_ns() - start) * 1e-9;
}

}  // namespace tierd

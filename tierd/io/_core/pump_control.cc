// The control path: what may be called from any thread. See pump.h.
//
// A channel's fd comes from a client and is judged here: sealed against shrinking (or its owner
// could make our mapping fault), at least as long as its header says, every ring inside it.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "channel.h"
#include "patience.h"
#include "pump.h"
#include "reader_played.h"
#include "reader_sim.h"

namespace tierd {
namespace {

void require(bool condition, const std::string& what) {
    if (!condition) throw std::invalid_argument(what);
}

[[noreturn]] void refuse_system(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

void require_range(const char* name, std::uint32_t value, std::uint32_t low, std::uint32_t high) {
    require(value >= low && value <= high,
            std::string(name) + " must be between " + std::to_string(low) + " and " +
                std::to_string(high) + ", got " + std::to_string(value));
}

void check_options(const PumpOptions& o) {
    require(o.transport == "auto" || o.transport == "io_uring" || o.transport == "threads" ||
                o.transport == "memory" || o.transport == "simulated",
            "transport must be auto, io_uring, threads, memory or simulated, got " + o.transport);
    require(o.play_base_us >= 0 && o.play_base_us < 1e9 && o.play_page_us >= 0 && o.play_page_us < 1e9,
            "play_base_us and play_page_us must be between 0 and 1e9");
    require_range("queue_depth", o.queue_depth, 1, kQueueDepthMax);
    require_range("read_threads", o.read_threads, 1, kReadThreadsMax);
    require(o.park_us != 0, "park_us must be at least 1");
    require(!o.remote || (!o.guardian && o.transport != "simulated"),
            "remote: guardians and simulated pumps read no remote tables");
    require_range("suspect_ms", o.suspect_ms, 1, 10'000);
    if (o.cpu < 0) return;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    require(o.cpu < CPU_SETSIZE && CPU_ISSET(o.cpu, &allowed),
            "cpu " + std::to_string(o.cpu) + " is not one this process may run on");
}

void check_extents(const std::vector<ExtentRow>& extents, std::uint64_t pages) {
    require(!extents.empty(), "extents: none given");
    constexpr std::uint64_t kDevicePages = 1ull << 50;  // 4 EiB; keeps byte offsets below 2^63
    std::uint64_t next = 0;
    for (const ExtentRow& row : extents) {
        require(row.first_page == next, "extents: sorted and without holes, expected page " +
                                            std::to_string(next) + ", got " +
                                            std::to_string(row.first_page));
        require(row.pages != 0 && row.pages <= kDevicePages && row.device_page < kDevicePages,
                "extents: the run at page " + std::to_string(row.first_page) + " is out of range");
        require(row.device < kDevicesMax, "extents: no device " + std::to_string(row.device));
        next += row.pages;
    }
    require(next >= pages, "extents: they end at page " + std::to_string(next) + ", the image has " +
                               std::to_string(pages));
}

}  // namespace

struct Pump::ServedChannel {
    std::uint8_t* base = nullptr;
    std::uint64_t map_bytes = 0;
    ChannelHeader header{};  // our copy: the client can change its own at any time
    bool closing = false;
    std::vector<std::unique_ptr<ServerRing>> rings;
    std::vector<std::pair<void*, std::size_t>> staging;  // of hint rings

    std::uint8_t* make_staging(std::uint32_t pages) {
        const std::size_t bytes = static_cast<std::size_t>(pages) * kPageBytes;
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) refuse_system("staging memory of a hint ring");
        staging.emplace_back(memory, bytes);
        return static_cast<std::uint8_t*>(memory);
    }

    ~ServedChannel() {
        for (const auto& [memory, bytes] : staging) munmap(memory, bytes);
        if (base != nullptr) munmap(base, map_bytes);
    }
};

// --- life ----------------------------------------------------------------------------------------

Pump::Pump(const PumpOptions& options, const ReaderFactory& factory)
    : options_(options),
      // A guardian never spins: the engine's cores are the engine's.
      spin_ns_(options.guardian ? 0 : static_cast<std::uint64_t>(options.spin_us) * 1000),
      park_ns_(static_cast<std::uint64_t>(options.park_us) * 1000),
      simulated_(options.transport == "simulated"),
      suspect_ns_(std::uint64_t{options.suspect_ms} * 1'000'000) {
    check_options(options_);
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) refuse_system("eventfd");
    try {
        open_reader(factory);
    } catch (...) {
        close(wake_fd_);
        throw;
    }
    slots_.resize(options_.queue_depth);
    batch_.resize(options_.queue_depth);
    done_.resize(options_.queue_depth);
    retries_.reserve(options_.queue_depth);
    free_.reserve(options_.queue_depth);
    for (std::uint32_t i = options_.queue_depth; i-- != 0;) free_.push_back(i);
    rings_.reserve(kPumpRingsMax);
    heap_.reserve(kPumpRingsMax);
}

void Pump::open_reader(const ReaderFactory& factory) {
    const ReaderOptions options{options_.queue_depth, options_.read_threads, wake_fd_};
    reader_ = factory ? factory(options) : make_reader(options);
    if (options_.remote) {
        const std::uint64_t hold_ns = std::uint64_t{options_.remote_hold_ms} * 1'000'000;
        auto remote = std::make_unique<RemoteReader>(
            options, std::move(reader_), hold_ns, [this](std::uint32_t token) { return released(token); });
        remote_ = remote.get();
        reader_ = std::move(remote);
    }
    if (options_.play_base_us == 0 && options_.play_page_us == 0) return;
    const PlayedDevice played{static_cast<std::uint64_t>(options_.play_base_us * 1e3),
                              static_cast<std::uint64_t>(options_.play_page_us * 1e6),
                              options_.play_queues};
    reader_ = make_played_reader(options, played, std::move(reader_));
}

std::unique_ptr<Reader> Pump::make_reader(const ReaderOptions& options) const {
    if (options_.transport == "memory") return make_memory_reader(options);
    if (simulated_) return make_sim_reader(options, options_.seed);
    return make_local_reader(options);
}

std::unique_ptr<Reader> Pump::make_local_reader(const ReaderOptions& options) const {
    std::string reason;
    std::unique_ptr<Reader> reader;
    if (options_.transport != "threads") reader = make_uring_reader(options, reason);
    if (reader != nullptr) return reader;
    if (options_.transport == "io_uring") throw std::runtime_error(reason);
    return make_thread_reader(options, reason);
}

Pump::~Pump() {
    if (is_copy()) {  // nobody is there to be waited for; a child that ends needs nothing tidy
        thread_.detach();
        [[maybe_unused]] Reader* left = reader_.release();
        return;
    }
    stop();
    reader_.reset();
    close_devices();  // of one that was abandoned
    close(wake_fd_);
}

void Pump::check_running_or_fresh() const {
    if (stopped_) throw std::runtime_error("the pump is stopped");
}

void Pump::start() {
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    const std::lock_guard lock(command_mutex_);
    if (running_) throw std::runtime_error("the pump runs already");
    if (simulated_) throw std::runtime_error("a simulated pump has no thread; call turn()");
    // The pump's thread takes no signals: Python's handlers belong to the main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    running_ = true;
    process_ = getpid();
}

// A fork copies the pump but not its thread.
bool Pump::is_copy() const { return process_ != 0 && process_ != getpid(); }

bool Pump::stop(std::uint64_t timeout_ns) {
    if (is_copy()) return true;
    const std::uint64_t deadline = deadline_of(timeout_ns);
    std::vector<std::uint32_t> open;
    {
        const std::lock_guard control(control_mutex_);
        if (ended_) return true;
        stopped_ = true;
        for (auto& [number, channel] : channels_) {
            channel->closing = true;
            open.push_back(number);
        }
    }
    // All of them first, so that one that hangs does not keep the others from being let go of.
    for (const std::uint32_t number : open) {
        if (drain(number, 0))
            forget_channel(number);
        else if (monotonic_ns() - kLookNs > deadline)
            return false;  // it stands still
    }
    for (const std::uint32_t number : open) {
        if (!drain(number, deadline)) return false;
        forget_channel(number);
    }
    {
        const std::lock_guard control(control_mutex_);
        if (ended_) return true;  // by another caller
        // The descriptors go now, not with this object: somebody may wait for the device.
        const bool removed = call(
            [this] {
                for (std::uint32_t device = 0; device < kDevicesMax; ++device)
                    if (devices_[device].used()) reader_->remove_device(device);
                return Progress::finished;
            },
            patience_until(deadline));
        if (!removed) return false;
        ended_ = true;
        close_devices();
    }
    exit_.store(true, std::memory_order_release);
    ring_eventfd(wake_fd_);
    if (thread_.joinable()) thread_.join();
    const auto ended = take_ended_links();
    const std::lock_guard lock(command_mutex_);
    running_ = false;
    // A command that came too late for the thread (only stats can) is run here.
    for (Command* command : commands_) {
        command->step();
        command->finished = true;
    }
    commands_.clear();
    command_done_.notify_all();
    return true;
}

void Pump::close_devices() {
    for (Device& device : devices_) {
        device.remote = false;
        if (device.fd >= 0) close(std::exchange(device.fd, -1));
    }
}

void Pump::leave() {
    // From here, since the loop may stand still, which is a good reason to leave.
    const std::lock_guard control(control_mutex_);
    leaving_ = true;
    for (auto& [number, channel] : channels_)
        for (const auto& ring : channel->rings) store_release(ring->control().leaving.value, 1);
}

bool Pump::call(const Step& step, std::uint64_t timeout_ns) {
    if (is_copy()) throw std::runtime_error("the pump runs in the process that this one was forked from");
    std::unique_lock lock(command_mutex_);
    if (!running_) {
        while (step() != Progress::finished)
            if (simulated_) work(turn_ns());
        return true;
    }
    Command command{step};
    commands_.push_back(&command);
    commands_new_.store(true, std::memory_order_release);
    ring_eventfd(wake_fd_);
    const auto finished = [&command] { return command.finished; };
    if (timeout_ns == kForever) {
        command_done_.wait(lock, finished);
    } else if (!command_done_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), finished)) {
        std::erase(commands_, &command);  // it is not being run: we hold the lock
        return false;
    }
    return true;
}

void Pump::abandon() {
    if (!simulated_) throw std::runtime_error("only a simulated pump can be abandoned");
    if (stopped_) return;
    stopped_ = ended_ = true;
    reader_->end();
    for (ServerRing* ring : rings_) heap_.remove(ring);
    rings_.clear();
    channels_.clear();
}

// --- devices and tables --------------------------------------------------------------------------

std::uint32_t Pump::add_device(int fd) {
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    const int flags = fcntl(fd, F_GETFL);
    require(flags >= 0, "device: fd " + std::to_string(fd) + " is not open");
    require((flags & O_ACCMODE) != O_WRONLY, "device: the fd is not open for reading");
    const std::uint32_t device = free_device();
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) refuse_system("device: dup");
    devices_[device] = {own, 0};
    call([&] {
        device_counts_[device] = {device, 0, 0, 0, {}};
        reader_->add_device(device, own);
        return Progress::finished;
    });
    return device;
}

void Pump::remove_device(std::uint32_t device) {
    const std::lock_guard control(control_mutex_);
    require(device < kDevicesMax && devices_[device].used(),
            "there is no device " + std::to_string(device));
    require(devices_[device].tables == 0,
            "device " + std::to_string(device) + " still holds extents of a table");
    call([&] {
        reader_->remove_device(device);
        return Progress::finished;
    });
    if (devices_[device].fd >= 0) close(devices_[device].fd);
    devices_[device] = {};
}

std::uint32_t Pump::add_table(const ServedTableSpec& spec) {
    auto table = std::make_unique<ServedTable>();
    table->key = {spec.image_id, spec.generation};
    table->geometry = make_geometry(spec.row_bytes, spec.rows);
    table->window_ns = spec.window_ns;
    require(spec.rows != 0, "rows must be at least 1");
    require(table->geometry.pages <= 1ull << 32, "an image has at most 2^32 pages");
    check_extents(spec.extents, table->geometry.pages);
    table->map = ExtentMap(spec.extents);
    require(spec.copies.size() <= kTableCopiesMax,
            "a table has at most " + std::to_string(kTableCopiesMax) + " copies");
    for (const std::vector<ExtentRow>& copy : spec.copies) {
        check_extents(copy, table->geometry.pages);
        table->copies.emplace_back(copy);
    }
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    for (std::uint32_t device = 0; device < kDevicesMax; ++device) {
        const bool used = table->uses(device);
        require(!used || devices_[device].used(), "extents: no device " + std::to_string(device));
        devices_[device].tables += used;
    }
    tables_[next_table_] = std::move(table);
    return next_table_++;
}

void Pump::remove_table(std::uint32_t table) {
    const std::lock_guard control(control_mutex_);
    const auto at = tables_.find(table);
    require(at != tables_.end(), "there is no table " + std::to_string(table));
    require(at->second->rings == 0, "table " + std::to_string(table) + " is still served to " +
                                        std::to_string(at->second->rings) + " rings");
    for (std::uint32_t device = 0; device < kDevicesMax; ++device)
        devices_[device].tables -= at->second->uses(device);
    tables_.erase(at);
}

// --- channels ------------------------------------------------------------------------------------

std::uint32_t Pump::add_channel(int fd) {
    struct stat info {};
    require(fstat(fd, &info) == 0, "channel: fd " + std::to_string(fd) + " is not open");
    const int seals = fcntl(fd, F_GET_SEALS);
    require(seals >= 0, "channel: the fd is not a memfd");
    require((seals & F_SEAL_SHRINK) != 0, "channel: the memfd is not sealed against shrinking");
    const auto size = static_cast<std::uint64_t>(info.st_size);
    require(size >= sizeof(ChannelHeader), "channel: " + std::to_string(size) +
                                               " bytes are shorter than a header");
    auto channel = std::make_unique<ServedChannel>();
    // All of it, because huge pages map only whole; total_bytes then bounds what is used.
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        throw std::invalid_argument(std::string("channel: cannot map it for writing: ") +
                                    std::strerror(errno));
    channel->base = static_cast<std::uint8_t*>(mapped);
    channel->map_bytes = size;
    std::memcpy(&channel->header, channel->base, sizeof(ChannelHeader));
    const ChannelHeader& header = channel->header;
    require(header.magic == kChannelMagic, "channel: the header has no magic");
    require(header.abi >= kChannelAbiOldest && header.abi <= kChannelAbi,
            "channel: ABI " + std::to_string(header.abi) + ", this pump serves " +
                std::to_string(kChannelAbiOldest) + " to " + std::to_string(kChannelAbi));
    require(header.total_bytes >= sizeof(ChannelHeader) && header.total_bytes <= size,
            "channel: the header says " + std::to_string(header.total_bytes) +
                " bytes, the memfd has " + std::to_string(size));
    require(header.ring_count >= 1 && header.ring_count <= kRingsMax,
            "channel: " + std::to_string(header.ring_count) + " rings");
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    channels_[next_channel_] = std::move(channel);
    return next_channel_++;
}

void Pump::add_ring(std::uint32_t channel, std::uint32_t ring, std::uint32_t table) {
    const std::lock_guard control(control_mutex_);
    check_running_or_fresh();
    const auto at = channels_.find(channel);
    require(at != channels_.end() && !at->second->closing,
            "there is no channel " + std::to_string(channel));
    ServedChannel& owner = *at->second;
    require(ring < owner.header.ring_count, "channel " + std::to_string(channel) + " has no ring " +
                                                std::to_string(ring));
    const auto served = tables_.find(table);
    require(served != tables_.end(), "there is no table " + std::to_string(table));
    for (const auto& other : owner.rings)
        require(other->number != ring, "ring " + std::to_string(ring) + " of channel " +
                                           std::to_string(channel) + " is served already");
    require(ring_count_ < kPumpRingsMax,
            "a pump serves at most " + std::to_string(kPumpRingsMax) + " rings");
    RingView view(owner.base, owner.header.total_bytes, owner.header.rings[ring]);
    if ((view.flags & kRingFlagHint) != 0) {
        require(!options_.guardian, "a guardian serves no hints");
        view.arena_d = owner.make_staging(view.arena_pages);
    }
    auto made = std::make_unique<ServerRing>(
        view, served->second.get(), options_.guardian ? Owner::guardian : Owner::daemon);
    made->channel = channel;
    made->number = ring;
    made->table_number = table;
    made->order = next_order_++;
    // Here rather than on the pump's thread: allocating and zeroing the pages is the slow part of
    // registering them. Where it is refused, registering does it.
    // A guardian registers nothing, and its arena costs no memory before it is needed.
    if (!options_.guardian)
        madvise(view.arena_d, static_cast<std::size_t>(view.arena_pages) * kPageBytes,
                MADV_POPULATE_WRITE);
    if (!options_.guardian) store_release(view.control->leaving.value, leaving_ ? 1 : 0);
    owner.rings.push_back(std::move(made));
    ++served->second->rings;
    ++ring_count_;
    ServerRing& joining = *owner.rings.back();
    std::uint32_t registered = 0;
    call([&] { return join_ring(joining, registered); });
}

// On the pump's thread: registers arena D, one chunk a round, then serves the ring.
Pump::Progress Pump::join_ring(ServerRing& ring, std::uint32_t& registered) {
    if (options_.guardian) {
        start_guarding(ring);
        return Progress::finished;
    }
    const std::uint32_t pages = ring.view().arena_pages;
    const std::uint32_t chunks = (pages + kChunkPages - 1) / kChunkPages;
    if (registered == 0) {
        ring.first_buffer = reader_->reserve_buffers(chunks);
        ring.buffers = ring.first_buffer == kNoBuffer ? 0 : chunks;
    }
    if (registered < ring.buffers) {
        const std::uint32_t first = registered * kChunkPages;
        const std::uint64_t bytes =
            static_cast<std::uint64_t>(std::min(kChunkPages, pages - first)) * kPageBytes;
        std::uint8_t* base = ring.view().arena_d + static_cast<std::size_t>(first) * kPageBytes;
        if (reader_->register_buffer(ring.first_buffer + static_cast<std::int32_t>(registered), base,
                                     bytes)) {
            if (++registered < ring.buffers) return Progress::more;
            ring.fixed = true;
        } else {
            // All or nothing: what a partly registered arena pins, another arena can use.
            reader_->release_buffers(ring.first_buffer, ring.buffers);
            ring.buffers = 0;
        }
    }
    rings_.push_back(&ring);
    link_hints(ring, true);
    gpu_rings_ += (ring.view().flags & kRingFlagGpu) != 0;
    ring.adopt();
    return Progress::finished;
}

bool Pump::remove_channel(std::uint32_t channel, std::uint64_t timeout_ns) {
    const std::uint64_t deadline = deadline_of(timeout_ns);
    {
        const std::lock_guard control(control_mutex_);
        const auto at = channels_.find(channel);
        require(at != channels_.end(), "there is no channel " + std::to_string(channel));
        at->second->closing = true;
    }
    if (!drain(channel, deadline)) return false;
    forget_channel(channel);
    return true;
}

// False if the deadline passed first. What was begun goes on with the next call.
bool Pump::drain(std::uint32_t channel, std::uint64_t deadline_ns) {
    bool drained = false;
    const auto step = [&] {
        const Progress progress = drain_channel(channel);
        drained = progress == Progress::finished;
        return monotonic_ns() >= deadline_ns ? Progress::finished : progress;
    };
    return call(step, patience_until(deadline_ns)) && drained;
}

// On the pump's thread: finished once no ring of the channel is left there.
Pump::Progress Pump::drain_channel(std::uint32_t channel) {
    bool left = false;
    Progress progress = Progress::waiting;
    for (std::size_t i = 0; i < rings_.size();) {
        ServerRing& ring = *rings_[i];
        const Progress one =
            ring.channel == channel ? release_ring(ring) : Progress::waiting;
        if (one == Progress::finished) continue;  // it is gone from rings_
        left |= ring.channel == channel;
        if (one == Progress::more) progress = Progress::more;
        ++i;
    }
    return left ? progress : Progress::finished;
}

Pump::Progress Pump::release_ring(ServerRing& ring) {
    ring.close();
    heap_.remove(&ring);
    if (ring.in_flight != 0) return Progress::waiting;
    ring.cancel_rest();
    if (ring.buffers != 0) {  // one chunk a round: the kernel unpins page by page
        --ring.buffers;
        reader_->release_buffers(ring.first_buffer + static_cast<std::int32_t>(ring.buffers), 1);
        return Progress::more;
    }
    link_hints(ring, false);
    if (!options_.guardian) store_release(ring.control().parked.value, 0);
    gpu_rings_ -= (ring.view().flags & kRingFlagGpu) != 0;
    counts_.totals.add(ring.counters);
    rings_.erase(std::find(rings_.begin(), rings_.end(), &ring));
    return Progress::finished;
}

void Pump::forget_channel(std::uint32_t channel) {
    std::unique_ptr<ServedChannel> gone;  // unmapped after the lock is given back: it takes a while
    const std::lock_guard control(control_mutex_);
    const auto at = channels_.find(channel);
    if (at == channels_.end()) return;
    for (const auto& ring : at->second->rings) {
        --tables_.at(ring->table_number)->rings;
        --ring_count_;
    }
    gone = std::move(at->second);
    channels_.erase(at);
}

// On the pump's thread: a ring and the hints for its table find each other, or part.
void Pump::link_hints(ServerRing& ring, bool link) {
    for (ServerRing* other : rings_) {
        if (other->channel != ring.channel || other->table_number != ring.table_number) continue;
        if (other->is_hint() == ring.is_hint()) continue;
        ServerRing& reader = ring.is_hint() ? *other : ring;
        reader.hint = !link ? nullptr : ring.is_hint() ? &ring : other;
    }
}

// --- statistics ----------------------------------------------------------------------------------

std::optional<PumpStats> Pump::stats(std::uint64_t timeout_ns) {
    PumpStats out;
    std::vector<std::shared_ptr<RemoteLink>> ended;
    const Step step = [&] {
        collect(out);
        ended = take_ended_links();
        return Progress::finished;
    };
    if (!call(step, timeout_ns)) return std::nullopt;
    return out;
}

PumpStats Pump::stats() { return *stats(kForever); }

void Pump::collect(PumpStats& out) {
    if (std::this_thread::get_id() == thread_.get_id()) save_cpu_times();
    out = counts_;
    out.wakes = reader_->wakes();
    for (const ServerRing* ring : rings_) {
        out.totals.add(ring->counters);
        out.rings.push_back({ring->channel, ring->number, ring->table_number, ring->serving(),
                             ring->in_flight, ring->counters});
    }
    for (const DeviceReport& device : device_counts_)
        if (device.reads != 0) out.devices.push_back(device);
}

}  // namespace tierd

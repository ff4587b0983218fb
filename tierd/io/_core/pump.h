// One native thread that serves the rings of many channels.
//
// In the daemon it serves arena D. As an engine's guardian (PumpOptions::guardian) it serves arena
// G, and only while the daemon does not; what it does in between is in pump_guard.cc.
//
// The data path (pump.cc) belongs to that thread alone: it looks at every ring, puts the waiting
// requests into deadline order, keeps at most queue_depth reads in flight, judges each page and
// answers. The control path (pump_control.cc) runs in the callers' threads; what it has to change
// on the data path it hands over as a command and awaits. Nothing is allocated on the data path.
//
// Fault model: a client may be killed at any point and its channel may hold any bytes; devices may
// fail, misdirect, cut short or delay any read; the guardian may take a ring at any time.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "deadline_heap.h"
#include "driver.h"
#include "extent_map.h"
#include "protocol.h"
#include "reader.h"
#include "reader_remote.h"
#include "server_ring.h"

namespace tierd {

inline constexpr std::uint32_t kPumpRingsMax = 4096;
inline constexpr std::uint32_t kLatencyBuckets = 32;
inline constexpr std::uint32_t kTableCopiesMax = 7;
inline constexpr std::uint64_t kForever = ~0ull;

struct PumpOptions {
    std::string transport = "auto";  // "auto", "io_uring", "threads", "memory" or "simulated"
    std::uint32_t queue_depth = 128;
    std::uint32_t read_threads = 16;
    std::uint32_t spin_us = 50;
    std::uint32_t park_us = 50;
    std::uint32_t crc_sample = 16;  // one page in so many, 0 none; retries and peers' pages always
    bool checks = true;
    int cpu = -1;  // pins the thread; -1 leaves it to the scheduler
    std::uint64_t seed = 0;  // of a simulated pump
    // Plays a slower device (reader_played.h), unless both are 0.
    double play_base_us = 0;
    double play_page_us = 0;
    std::uint32_t play_queues = 0;
    bool guardian = false;
    std::uint32_t suspect_ms = 20;  // how long a daemon may stand still while a request waits
    // A guardian's answer to a request of a GPU ring that failed for good: say why and end the
    // process, since a GPU that waits for rows cannot be told otherwise.
    bool end_rank = false;
    // Whether tables may lie in other nodes' memory, and how long a read of one that lies nowhere
    // else waits for its peer to come back.
    bool remote = false;
    std::uint32_t remote_hold_ms = 5000;
};

struct ServedTableSpec {
    std::uint64_t image_id;
    std::uint32_t generation;
    std::uint32_t row_bytes;
    std::uint64_t rows;
    std::uint64_t window_ns;
    std::vector<ExtentRow> extents;
    std::vector<std::vector<ExtentRow>> copies;  // the same pages elsewhere, at most kTableCopiesMax
};

struct RingReport {
    std::uint32_t channel, ring, table;
    bool serving;  // false while the guardian serves it
    std::uint32_t in_flight;
    RingCounters counters;
};

struct DeviceReport {
    std::uint32_t device;
    std::uint64_t reads, errors;
    std::uint32_t in_flight;
    std::array<std::uint64_t, kLatencyBuckets> latency_us;  // buckets as PumpStats::latency_us
};

struct PumpStats {
    RingCounters totals;  // of all rings, removed ones included
    std::uint64_t reads = 0, retries = 0, next_tier = 0, crc_checked = 0;
    std::uint64_t passed_over = 0;  // pages whose first tier was known to be away
    std::uint32_t in_flight = 0, in_flight_max = 0;
    std::uint64_t parks = 0, wakes = 0, beats = 0;
    std::uint64_t held_back = 0;  // looks at a request whose pages were still being read into
    std::uint64_t cpu_user_ns = 0, cpu_system_ns = 0;  // of the pump's thread
    // From submission to reaping; bucket i counts reads below 2^i us (and not below 2^(i-1)).
    std::array<std::uint64_t, kLatencyBuckets> latency_us{};
    std::vector<RingReport> rings;
    std::vector<DeviceReport> devices;
};

// Makes the reader instead of PumpOptions::transport: for transports of other kinds, and for faults.
using ReaderFactory = std::function<std::unique_ptr<Reader>(const ReaderOptions&)>;

// Every method may be called from any thread. std::invalid_argument for what the caller got wrong,
// std::runtime_error for what the system refused or a pump that is stopped.
//
// A simulated pump has no thread: its owner calls turn(), and every other method from the same
// thread. Its time is the number of turns.
class Pump : public Driver {
  public:
    explicit Pump(const PumpOptions& options, const ReaderFactory& factory = {});
    ~Pump() override;
    Pump(const Pump&) = delete;
    Pump& operator=(const Pump&) = delete;

    std::string transport() const { return reader_->name(); }
    std::string transport_reason() const { return reader_->reason(); }
    int wake_fd() const { return wake_fd_; }

    std::uint32_t add_device(int fd);
    void remove_device(std::uint32_t device);
    // A device that is one image in a peer's memory. It is away until link_remote().
    std::uint32_t add_remote();
    // From now on the devices' pages are read through `link`, which this pump's thread alone uses
    // from here on. False if it failed meanwhile.
    bool link_remote(const std::shared_ptr<RemoteLink>& link,
                     const std::vector<std::pair<std::uint32_t, std::vector<RemotePlace>>>& devices);
    // Ends a link, as if the peer had gone.
    void drop_link(const std::shared_ptr<RemoteLink>& link, const std::string& why);
    std::uint32_t add_table(const ServedTableSpec& spec);
    void remove_table(std::uint32_t table);
    std::uint32_t add_channel(int fd);
    void add_ring(std::uint32_t channel, std::uint32_t ring, std::uint32_t table);
    // Waits until no read of the channel is in flight, for at most `timeout_ns`; false if some are
    // left (call again: the channel takes nothing new meanwhile).
    bool remove_channel(std::uint32_t channel, std::uint64_t timeout_ns = kForever);
    void start();
    // As remove_channel for all, then ends the thread. False if reads are left; then the thread
    // goes on and so must the process's memory, but stop() may be called again.
    bool stop(std::uint64_t timeout_ns = kForever);
    // Nothing if the loop stood still for `timeout_ns`.
    std::optional<PumpStats> stats(std::uint64_t timeout_ns);
    PumpStats stats();
    // The loop counter, readable while the loop stands still.
    const std::atomic<std::uint64_t>& beat_counter() const { return beats_; }
    std::uint64_t beats() const { return beats_.load(std::memory_order_relaxed); }
    // Asks the guardians of all rings to take over, now and of rings added later.
    void leave();
    // A guardian's: take every ring from the daemon with the next look.
    void alarm();

    // For simulated pumps alone. abandon() is what a killed process leaves: nothing more is
    // answered, the reads in flight land, the channels are unmapped. Turns do nothing then.
    void turn() override;
    std::uint64_t turn_ns() const override;
    void abandon();

  private:
    struct ServedChannel;
    struct Device {
        int fd = -1;
        std::uint32_t tables = 0;  // that have an extent on it
        bool remote = false;
        bool used() const { return fd >= 0 || remote; }
    };
    // A read between issue and answer. Its number is the token that the reader gives back. Small,
    // because the kernel's work on the reads in between drives the slots out of the cache.
    struct ReadSlot {
        ServerRing* ring;
        std::uint64_t submitted_ns;
        std::uint32_t row;
        std::uint16_t device;
        std::uint8_t request;  // sequence % kRingDepth
        std::uint8_t attempt;  // from 0; see ServedTable::tier
    };
    static_assert(sizeof(ReadSlot) == 24);
    // What one round of a command achieved. `waiting` is for reads in flight: the pump may sleep.
    enum class Progress { waiting, more, finished };
    // Called on every round of the pump's thread until it has finished.
    using Step = std::function<Progress()>;
    struct Command {
        const Step& step;
        bool finished = false;
    };

    // --- control path (pump_control.cc) ----------------------------------------------------------
    void open_reader(const ReaderFactory& factory);
    std::unique_ptr<Reader> make_reader(const ReaderOptions& options) const;
    std::unique_ptr<Reader> make_local_reader(const ReaderOptions& options) const;
    std::uint32_t free_device() const;
    void check_running_or_fresh() const;
    bool is_copy() const;
    void call(const Step& step) { call(step, kForever); }
    bool call(const Step& step, std::uint64_t timeout_ns);
    Progress join_ring(ServerRing& ring, std::uint32_t& registered);
    Progress drain_channel(std::uint32_t channel);
    Progress release_ring(ServerRing& ring);
    bool drain(std::uint32_t channel, std::uint64_t deadline_ns);
    void link_hints(ServerRing& ring, bool link);
    void forget_channel(std::uint32_t channel);
    void close_devices();
    void collect(PumpStats& out);
    // On the pump's thread; the caller lets go of them on its own.
    std::vector<std::shared_ptr<RemoteLink>> take_ended_links();

    // --- data path (pump.cc), the pump's thread only ---------------------------------------------
    void run() noexcept;
    bool work(std::uint64_t now_ns);
    void prepare_thread();
    void save_cpu_times();
    bool run_commands();
    bool look_at_rings(std::uint64_t now_ns);
    bool look_at_requests(ServerRing& ring, std::uint64_t now_ns);
    // pump_guard.cc
    void start_guarding(ServerRing& ring);
    bool guard_rings(std::uint64_t now_ns);
    bool guard_ring(ServerRing& ring, std::uint64_t now_ns);
    void look_for_failure(ServerRing& ring);
    std::uint64_t guard_limit_ns() const;
    bool issue(std::uint64_t now_ns);
    // Whether issue() could make a read now.
    bool issuable() const { return !free_.empty() && !heap_.empty(); }
    std::size_t issue_retries(std::uint64_t now_ns);
    std::uint32_t issue_request(ServerRing& ring, ServerRequest& request, std::uint32_t count,
                                std::uint64_t now_ns, Read* out);
    std::uint32_t ready_from(const ServedTable& table, std::uint32_t attempt) const;
    std::uint32_t attempt_from(const ServedTable& table, std::uint32_t attempt) const;
    std::uint32_t attempt_after(const ReadSlot& slot, std::int32_t result) const;
    bool released(std::uint32_t token) const;
    std::uint8_t* target(const ReadSlot& slot) const;
    Read prepare(std::uint32_t token, std::uint64_t now_ns);
    bool reap(std::uint64_t now_ns);
    void finish(std::uint32_t token, std::int32_t result);
    void complete(ServerRing& ring);
    void forget(std::uint32_t token);
    Status judge(const ReadSlot& slot, std::int32_t result);
    void reschedule(ServerRing& ring);
    void sleep();
    bool news() const;
    void set_parked(std::uint32_t value);
    std::uint32_t wait_count() const;
    std::uint64_t wait_limit_ns() const;

    const PumpOptions options_;
    const std::uint64_t spin_ns_;
    const std::uint64_t park_ns_;
    int wake_fd_ = -1;
    std::unique_ptr<Reader> reader_;
    RemoteReader* remote_ = nullptr;  // reader_ where tables may be remote

    // What the callers know; guarded by control_mutex_.
    std::mutex control_mutex_;
    std::array<Device, kDevicesMax> devices_{};
    std::map<std::uint32_t, std::unique_ptr<ServedTable>> tables_;
    std::map<std::uint32_t, std::unique_ptr<ServedChannel>> channels_;
    std::uint32_t next_table_ = 0;
    std::uint32_t next_channel_ = 0;
    std::uint64_t next_order_ = 0;
    std::uint32_t ring_count_ = 0;
    bool stopped_ = false;  // takes nothing new
    bool leaving_ = false;  // the guardians are to take over
    bool ended_ = false;    // the thread has gone

    // Commands; guarded by command_mutex_.
    std::mutex command_mutex_;
    std::condition_variable command_done_;
    std::vector<Command*> commands_;
    bool running_ = false;
    int process_ = 0;  // where it was started
    std::atomic<bool> commands_new_{false};
    std::atomic<bool> exit_{false};
    std::thread thread_;

    // The data path's own.
    std::vector<ServerRing*> rings_;
    DeadlineHeap<ServerRing> heap_;
    std::vector<ReadSlot> slots_;
    std::vector<std::uint32_t> free_;     // tokens
    std::vector<std::uint32_t> retries_;  // tokens of reads to try once more
    std::vector<Read> batch_;
    std::vector<ReadDone> done_;
    bool commands_left_ = false;
    const bool simulated_;
    const std::uint64_t suspect_ns_;
    std::atomic<bool> alarm_{false};
    std::atomic<std::uint64_t> beats_{0};
    std::uint64_t news_ns_ = 0;  // when a guardian last had something to serve
    std::uint64_t turns_ = 0;
    std::uint32_t gpu_rings_ = 0;
    std::uint32_t beat_ = 0;
    std::uint32_t crc_turn_ = 0;
    PumpStats counts_;  // totals of removed rings, and everything that is not a ring's
    std::array<DeviceReport, kDevicesMax> device_counts_{};
};

}  // namespace tierd

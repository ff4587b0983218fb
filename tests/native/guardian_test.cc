// A daemon's pump and an engine's guardian over the same rings in one process, for the sanitizers:
// take-overs while nothing is wrong, daemons that stop in the middle of a step and go on, and
// daemons that never come back, over a device whose reads land late. Every page is checked.
// TIERD_TEST_SECONDS sets the length of each part (default 1).
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel.h"
#include "check.h"
#include "guardian.h"
#include "pump.h"
#include "pump_load.h"

using namespace tierd;

namespace {

constexpr std::uint32_t kRings = 3;

void nap(std::uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

double seconds() {
    const char* text = std::getenv("TIERD_TEST_SECONDS");
    return text != nullptr ? std::atof(text) : 1;
}

// Waits for something that another thread does in its own time.
void eventually(const std::function<bool()>& done) {
    const std::uint64_t end = monotonic_ns() + kAnswerNs;
    while (!done()) {
        CHECK(monotonic_ns() < end);
        nap(200);
    }
}

// A device whose reads land late, also when the pump that asked for them has stopped; and a switch
// that stops the pump's thread wherever it next waits, as SIGSTOP would.
class LateReader final : public Reader {
  public:
    struct Switch {
        std::atomic<bool> frozen{false};
        std::atomic<std::uint32_t> late_us{0};
        std::atomic<bool> hurry{false};  // what waits lands now
        std::atomic<std::uint64_t> in_flight{0};
    };

    LateReader(Switch& control, int fd, std::uint32_t depth)
        : control_(control), fd_(fd), depth_(depth), thread_([this] { land(); }) {}
    ~LateReader() override {
        stop_.store(true);
        thread_.join();
    }

    const char* name() const override { return "late"; }
    std::string reason() const override { return ""; }
    void begin() override {}
    void end() override {}
    void add_device(std::uint32_t, int) override {}
    void remove_device(std::uint32_t) override {}
    std::int32_t reserve_buffers(std::uint32_t) override { return kNoBuffer; }
    bool register_buffer(std::int32_t, std::uint8_t*, std::uint64_t) override { return false; }
    void release_buffers(std::int32_t, std::uint32_t) override {}
    void submit() override {}
    std::uint64_t wakes() const override { return 0; }

    void push(const Read* reads, std::size_t count) override {
        const std::lock_guard lock(mutex_);
        const std::uint64_t due = monotonic_ns() + control_.late_us.load() * std::uint64_t{1000};
        for (std::size_t i = 0; i < count; ++i) {
            // The rule of docs/protocol.md: never two reads in flight into one page.
            for (const auto& [other, at] : waiting_) CHECK(other.target != reads[i].target);
            waiting_.emplace_back(reads[i], due);
        }
        control_.in_flight.fetch_add(count);
        CHECK(waiting_.size() <= depth_);
    }
    std::size_t reap(ReadDone* done, std::size_t room) override {
        const std::lock_guard lock(mutex_);
        const std::size_t n = std::min(room, landed_.size());
        std::copy_n(landed_.begin(), n, done);
        landed_.erase(landed_.begin(), landed_.begin() + static_cast<std::ptrdiff_t>(n));
        return n;
    }
    void wait(std::uint32_t, std::uint64_t timeout_ns) override {
        nap(std::min<std::uint64_t>(timeout_ns / 1000, 50));
        while (control_.frozen.load()) nap(100);
    }

  private:
    void land() {
        while (!stop_.load()) {
            {
                const std::lock_guard lock(mutex_);
                const std::uint64_t now = monotonic_ns();
                for (std::size_t i = 0; i < waiting_.size();) {
                    const auto& [read, due] = waiting_[i];
                    if (due > now && !control_.hurry.load()) {
                        ++i;
                        continue;
                    }
                    const ssize_t n = pread(fd_, read.target, kPageBytes, static_cast<off_t>(read.offset));
                    landed_.push_back({read.token, static_cast<std::int32_t>(n)});
                    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
                    control_.in_flight.fetch_sub(1);
                }
            }
            nap(50);
        }
    }

    Switch& control_;
    const int fd_;
    const std::size_t depth_;
    std::mutex mutex_;
    std::vector<std::pair<Read, std::uint64_t>> waiting_;
    std::vector<ReadDone> landed_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

// A pump over the image, on every ring of a channel.
struct Served {
    Served(const ImageFile& image, const Channel& channel, PumpOptions options,
           const ReaderFactory& factory = {})
        : pump(options, factory) {
        const std::uint32_t table = serve_image(pump, image, 1'000'000);
        number = pump.add_channel(channel.fd());
        pump.start();
        for (std::uint32_t ring = 0; ring < channel.ring_count(); ++ring)
            pump.add_ring(number, ring, table);
    }
    Pump pump;
    std::uint32_t number;
};

PumpOptions guardian_options() {
    PumpOptions options;
    options.guardian = true;
    options.suspect_ms = 5;
    options.read_threads = 2;
    options.queue_depth = 32;
    options.crc_sample = 1;
    return options;
}

// Client threads on every ring, until they are told to stop.
class Engine {
  public:
    explicit Engine(const ImageFile& image) : channel(make_channel(kRings, kRingFlagGuarded)) {
        for (std::uint32_t i = 0; i < kRings; ++i) {
            clients_.push_back(std::make_unique<RingClient>(channel, i, -1, i == 2 ? 0 : 20,
                                                            i == 1 ? 0xFFFFFFF0u : 0));
            // By its address: the vector moves while the threads run.
            threads_.emplace_back([this, &image, i, client = clients_.back().get()] {
                use_ring(*client, image, 30 + i, stop_);
            });
        }
    }
    void stop() {
        stop_.store(true);
        for (auto& thread : threads_) thread.join();
    }
    std::uint64_t served() const {
        std::uint64_t sum = 0;
        for (const auto& client : clients_) sum += load_acquire(client->ring().control->retired.value);
        return sum;
    }
    // Waits until the client has used a few more requests.
    void goes_on() const {
        const std::uint64_t before = served();
        eventually([&] { return served() - before >= 8; });
    }
    bool owned_by(Owner owner) const {
        for (std::uint32_t i = 0; i < kRings; ++i)
            if (load_tenure(channel->ring(i).control->tenure).owner !=
                static_cast<std::uint32_t>(owner))
                return false;
        return true;
    }
    const std::shared_ptr<Channel> channel;

  private:
    std::vector<std::unique_ptr<RingClient>> clients_;
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

// The guardian is made to think the worst of a healthy daemon, over and over.
void false_alarms(const char* transport) {
    const ImageFile image;
    PumpOptions options;
    options.transport = transport;
    options.spin_us = 0;
    options.queue_depth = 32;
    options.read_threads = 3;
    Engine engine(image);
    Served daemon(image, *engine.channel, options);
    PumpOptions watching = guardian_options();
    watching.transport = transport;
    Served guardian(image, *engine.channel, watching);
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(seconds() * 1e9);
    std::uint64_t alarms = 0;
    while (monotonic_ns() < end) {
        guardian.pump.alarm();
        ++alarms;
        eventually([&] { return guardian.pump.stats().totals.takeovers >= alarms * kRings; });
        eventually([&] { return engine.owned_by(Owner::daemon); });
        engine.goes_on();
    }
    engine.stop();
    const PumpStats theirs = daemon.pump.stats(), ours = guardian.pump.stats();
    std::printf("  %s: %lu alarms, daemon %lu pages, guardian %lu pages\n", transport,
                static_cast<unsigned long>(alarms), static_cast<unsigned long>(theirs.totals.pages),
                static_cast<unsigned long>(ours.totals.pages));
    CHECK(alarms > 3);
    CHECK(theirs.totals.pages > 0 && ours.totals.pages > 0);
}
void false_alarms_threads() { false_alarms("threads"); }
void false_alarms_uring() { false_alarms("auto"); }

// The daemon stops in the middle of its reads, which land while the guardian serves and the client
// uses the pages again; then it goes on.
void stop_and_go_on() {
    const ImageFile image;
    LateReader::Switch theirs, ours;
    Engine engine(image);
    PumpOptions options;
    options.queue_depth = 24;
    options.spin_us = 0;
    Served daemon(image, *engine.channel, options, [&](const ReaderOptions& o) {
        return std::make_unique<LateReader>(theirs, image.fd, o.queue_depth);
    });
    Served guardian(image, *engine.channel, guardian_options(), [&](const ReaderOptions& o) {
        return std::make_unique<LateReader>(ours, image.fd, o.queue_depth);
    });
    std::mt19937 random(1);
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(2 * seconds() * 1e9);
    std::uint64_t stops = 0;
    while (monotonic_ns() < end || stops < 5) {
        theirs.late_us.store(random() % 2 == 0 ? 30'000 : 200);
        ours.late_us.store(random() % 4 == 0 ? 10'000 : 0);
        nap(random() % 3'000);
        theirs.frozen.store(true);
        ++stops;
        engine.goes_on();
        CHECK(guardian.pump.stats().totals.takeovers > 0);
        theirs.frozen.store(false);
        if (random() % 3 != 0) eventually([&] { return engine.owned_by(Owner::daemon); });
    }
    engine.stop();
    std::printf("  %lu stops, %lu take-overs, %lu looks at requests held back\n",
                static_cast<unsigned long>(stops),
                static_cast<unsigned long>(guardian.pump.stats().totals.takeovers),
                static_cast<unsigned long>(guardian.pump.stats().held_back));
}

// One daemon after another stops for good. Its successor is let in once the last read of its
// predecessor has landed, as the exclusive open of the device does.
void one_daemon_after_another() {
    const ImageFile image;
    Engine engine(image);
    LateReader::Switch ours;
    Served guardian(image, *engine.channel, guardian_options(), [&](const ReaderOptions& o) {
        return std::make_unique<LateReader>(ours, image.fd, o.queue_depth);
    });
    PumpOptions options;
    options.spin_us = 0;
    std::vector<std::unique_ptr<LateReader::Switch>> switches;
    std::vector<std::unique_ptr<Served>> daemons;
    std::mt19937 random(2);
    for (int i = 0; i < 12; ++i) {
        LateReader::Switch& control = *switches.emplace_back(std::make_unique<LateReader::Switch>());
        control.late_us.store(i % 2 == 0 ? 20'000 : 100);
        daemons.push_back(std::make_unique<Served>(
            image, *engine.channel, options, [&](const ReaderOptions& o) {
                return std::make_unique<LateReader>(control, image.fd, o.queue_depth);
            }));
        eventually([&] { return engine.owned_by(Owner::daemon); });
        engine.goes_on();
        nap(random() % 5'000);
        control.frozen.store(true);
        engine.goes_on();
        eventually([&] { return control.in_flight.load() == 0; });
    }
    engine.stop();
    CHECK(guardian.pump.stats().totals.takeovers >= 12);
    for (auto& control : switches) control->frozen.store(false);
}

// A daemon that is told to stop asks to be relieved; nothing is cancelled and nobody waits 5 ms.
void an_orderly_leave() {
    const ImageFile image;
    Engine engine(image);
    Served guardian(image, *engine.channel, guardian_options());
    PumpOptions options;
    options.spin_us = 0;
    for (int i = 0; i < 10; ++i) {
        Served daemon(image, *engine.channel, options);
        eventually([&] { return engine.owned_by(Owner::daemon); });
        engine.goes_on();
        daemon.pump.leave();
        eventually([&] { return engine.owned_by(Owner::guardian); });
        CHECK(daemon.pump.stop());
        CHECK(daemon.pump.stats().totals.answered[static_cast<int>(Status::cancelled)] == 0);
        engine.goes_on();
    }
    engine.stop();
}

// A read that hangs holds up neither removal nor stop for longer than they were given.
void a_read_that_hangs() {
    const ImageFile image;
    LateReader::Switch theirs;
    theirs.late_us.store(60'000'000);
    PumpOptions options;
    options.spin_us = 0;
    const auto channel = make_channel(1);
    Served daemon(image, *channel, options, [&](const ReaderOptions& o) {
        return std::make_unique<LateReader>(theirs, image.fd, o.queue_depth);
    });
    RingClient client(channel, 0, -1, 0);
    const std::uint32_t page = 3;
    client.publish({&page, &page, &page, 1}, Priority::decode);
    eventually([&] { return theirs.in_flight.load() == 1; });
    CHECK(!daemon.pump.remove_channel(daemon.number, 5'000'000));
    CHECK(!daemon.pump.stop(5'000'000));
    CHECK(!client.answered(1));
    theirs.hurry.store(true);
    CHECK(daemon.pump.stop());
    CHECK(client.wait(1, 0) == Status::ok);  // it was read after all
}

}  // namespace

int main() {
    RUN(false_alarms_threads);
    RUN(false_alarms_uring);
    RUN(stop_and_go_on);
    RUN(one_daemon_after_another);
    RUN(an_orderly_leave);
    RUN(a_read_that_hangs);
    return 0;
}

// A whole pump under load in one process, for the sanitizers: client threads publish, wait, check
// and retire on their own rings, a guardian takes a ring and hands it back again and again, and a
// channel comes and goes. TIERD_TEST_SECONDS sets the length of each part (default 1).
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "channel.h"
#include "check.h"
#include "page.h"
#include "pump.h"
#include "pump_load.h"

using namespace tierd;

namespace {

constexpr std::uint32_t kRings = 4;
constexpr std::uint32_t kGuardedRing = 3;

// Answers what is outstanding into arena G; returns the next sequence to answer.
std::uint32_t answer_as_guardian(const RingView& ring, const ImageFile& image, std::uint32_t next) {
    RingControl& c = *ring.control;
    for (const std::uint32_t doorbell = load_acquire(c.doorbell.value); next != doorbell + 1; ++next) {
        const Descriptor request = ring.descriptor(next);
        for (std::uint32_t k = 0; k < request.header->count; ++k) {
            const std::uint32_t to = (request.header->first_page + k) % ring.arena_pages;
            CHECK(pread(image.fd, ring.arena_g + std::size_t{to} * kPageBytes, kPageBytes,
                        static_cast<off_t>(request.page[k]) * kPageBytes) == kPageBytes);
        }
        store_release(c.status_g.word[next % kRingDepth], status_word(next, Status::ok));
        store_release(c.done_g.value, next);
    }
    return next;
}

// Takes the ring, serves it, and hands it back once the daemon says that it is drained.
void play_guardian(const RingView& ring, const ImageFile& image, const std::atomic<bool>& stop) {
    RingControl& c = *ring.control;
    std::uint32_t epoch = load_tenure(c.tenure).epoch;
    while (!stop.load()) {
        store_tenure(c.tenure, {1, ++epoch});
        const std::uint32_t doorbell = load_acquire(c.doorbell.value);
        const std::uint32_t behind = std::min(doorbell - load_acquire(c.done_d.value),
                                              doorbell - load_acquire(c.done_g.value));
        std::uint32_t next = doorbell - behind + 1;
        do {
            next = answer_as_guardian(ring, image, next);
            std::this_thread::yield();
        } while (load_acquire(c.drained.value) != epoch);
        store_tenure(c.tenure, {0, ++epoch});
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the daemon's turn
    }
}

// A client that is removed in the middle of its requests: every one of them is answered.
void visit(Pump& pump, std::uint32_t table, const ImageFile& image, std::mt19937& random) {
    const auto channel = make_channel(1);
    RingClient client(channel, 0, pump.wake_fd(), 0, static_cast<std::uint32_t>(random()) | 1);
    const std::uint32_t number = pump.add_channel(channel->fd());
    pump.add_ring(number, 0, table);
    const Zeros zeros{};
    const std::array<std::uint32_t, 8> pages{1, 2, 3, 4, 5, 6, 7, 8};
    const std::uint32_t first = client.published() + 1;
    for (std::uint32_t i = 0; i < kRingDepth; ++i)
        client.publish({pages.data(), zeros.data(), zeros.data(), 8}, Priority::decode);
    if (random() % 2 == 0) CHECK(client.wait(first, kAnswerNs) == Status::ok);
    pump.remove_channel(number);
    for (std::uint32_t s = first; s != first + kRingDepth; ++s) {
        const auto status = client.wait(s, 0);
        CHECK(status == Status::ok || status == Status::cancelled);
        if (status == Status::ok) CHECK(image.right(client.page(client.arena(s), s, 7), 8));
        client.retire(s);
    }
}

void wait_for_the_end() {
    const char* text = std::getenv("TIERD_TEST_SECONDS");
    std::this_thread::sleep_for(std::chrono::duration<double>(text != nullptr ? std::atof(text) : 1));
}

void serve_many_clients(const PumpOptions& options) {
    const ImageFile image;
    Pump pump(options);
    const std::uint32_t quick = serve_image(pump, image, 1'000'000);
    const std::uint32_t slow = serve_image(pump, image, 8'000'000);
    const auto channel = make_channel(kRings);
    std::vector<std::unique_ptr<RingClient>> clients;
    for (std::uint32_t i = 0; i < kRings; ++i)  // ring 1 passes 2^32; ring 2 never spins
        clients.push_back(std::make_unique<RingClient>(channel, i, pump.wake_fd(), i == 2 ? 0 : 20,
                                                       i == 1 ? 0xFFFFFFF0u : 0));
    const std::uint32_t number = pump.add_channel(channel->fd());
    pump.add_ring(number, 0, quick);
    pump.add_ring(number, 1, slow);
    pump.start();
    pump.add_ring(number, 2, slow);
    pump.add_ring(number, kGuardedRing, quick);

    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < kRings; ++i)
        threads.emplace_back([&, i] { use_ring(*clients[i], image, 10 + i, stop); });
    threads.emplace_back([&] { play_guardian(channel->ring(kGuardedRing), image, stop); });
    threads.emplace_back([&] {
        std::mt19937 random(5);
        while (!stop.load()) {
            visit(pump, quick, image, random);
            CHECK(pump.stats().in_flight_max <= options.queue_depth);
        }
    });
    wait_for_the_end();
    stop.store(true);
    for (auto& thread : threads) thread.join();

    const PumpStats stats = pump.stats();
    const auto answered = [&stats](Status status) {
        return static_cast<unsigned long>(stats.totals.answered[static_cast<int>(status)]);
    };
    std::printf("  %s: %lu ok, %lu cancelled, %lu take-overs, %lu parks\n",
                pump.transport().c_str(), answered(Status::ok), answered(Status::cancelled),
                static_cast<unsigned long>(stats.totals.takeovers),
                static_cast<unsigned long>(stats.parks));
    CHECK(answered(Status::ok) > 20);
    CHECK(stats.totals.takeovers > 0);
    CHECK(stats.retries == 0);
    for (const Status bad : {Status::read_error, Status::short_read, Status::wrong_page,
                             Status::bad_crc, Status::bad_request})
        CHECK(answered(bad) == 0);
    pump.stop();
    pump.stop();
}

void serve(const char* transport, std::uint32_t spin_us) {
    PumpOptions options;
    options.transport = transport;
    options.spin_us = spin_us;
    options.queue_depth = 32;
    options.read_threads = 3;
    options.crc_sample = 1;
    serve_many_clients(options);
}

void threads_spinning() { serve("threads", 20); }
void threads_parking() { serve("threads", 0); }
void uring_spinning() { serve("auto", 20); }
void uring_parking() { serve("auto", 0); }

}  // namespace

int main() {
    RUN(threads_spinning);
    RUN(threads_parking);
    RUN(uring_spinning);
    RUN(uring_parking);
    return 0;
}

// A client that writes anything anywhere into its own channel while a daemon's pump and a guardian
// serve it. Nobody else may notice: a neighbour on the same pump reads on and every page is right,
// the pump answers its callers, and the wild channel can be removed. Run under AddressSanitizer.
// TIERD_TEST_SECONDS sets the length of each part (default 1), TIERD_TEST_SEED replays one.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "channel.h"
#include "check.h"
#include "guardian.h"
#include "pump.h"
#include "pump_load.h"

using namespace tierd;

namespace {

constexpr std::uint32_t kWildRings = 2;

double number(const char* name, double otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atof(text) : otherwise;
}

// Writes of every kind: raw bytes, and words that come close to what a server believes.
class Vandal {
  public:
    Vandal(Channel& channel, unsigned seed) : channel_(channel), random_(seed) {}

    void strike() {
        switch (random_() % 8) {
            case 0: bytes(channel_.base(), channel_.bytes()); break;
            case 1: bytes(channel_.base(), sizeof(ChannelHeader)); break;
            case 2: {
                RingControl& c = *ring().control;
                bytes(reinterpret_cast<std::uint8_t*>(&c), sizeof c);
                break;
            }
            case 3: {  // a doorbell near what is there
                std::uint32_t& doorbell = ring().control->doorbell.value;
                store_release(doorbell, load_acquire(doorbell) + random_() % 12 - 2);
                break;
            }
            case 4: {  // a descriptor that is nearly sane
                const RingView view = ring();
                RingControl& c = *view.control;
                const std::uint32_t sequence = load_acquire(c.doorbell.value) + 1;
                const Descriptor d = view.descriptor(sequence);
                d.header->sequence = sequence;
                d.header->count = static_cast<std::uint32_t>(random_() % (kRowsMax + 2));
                d.header->first_page = static_cast<std::uint32_t>(random_() % (view.arena_pages + 1));
                d.header->priority = random_() % 2;
                for (std::uint32_t i = 0; i < kRowsMax; ++i)
                    d.page[i] = static_cast<std::uint32_t>(random_() % (kPages + kPages / 500));
                store_release(c.doorbell.value, sequence);
                break;
            }
            case 5:  // the tenure, as no guardian would write it
                store_tenure(ring().control->tenure, {static_cast<std::uint32_t>(random_() % 3),
                                                      static_cast<std::uint32_t>(random_() % 5)});
                break;
            case 6: {  // levels that go back or jump
                RingControl& c = *ring().control;
                const std::array<std::uint32_t*, 6> levels{&c.done_d.value, &c.done_g.value,
                                                           &c.retired.value, &c.drained.value,
                                                           &c.beat.value, &c.leaving.value};
                store_release(*levels[random_() % levels.size()],
                              static_cast<std::uint32_t>(random_() % 4 == 0 ? random_() : random_() % 4));
                break;
            }
            default: {  // nothing at all
                RingControl& c = *ring().control;
                std::memset(static_cast<void*>(&c), 0, sizeof c);
                break;
            }
        }
    }

  private:
    // As it was at the start: the header may say anything by now.
    RingView ring() { return rings_[random_() % kWildRings]; }
    void bytes(std::uint8_t* base, std::uint64_t size) {
        const std::uint64_t length = std::min<std::uint64_t>(size, 1 + random_() % 64);
        std::uint8_t* at = base + random_() % (size - length + 1);
        for (std::uint64_t i = 0; i < length; ++i) at[i] = static_cast<std::uint8_t>(random_());
    }

    Channel& channel_;
    std::array<RingView, kWildRings> rings_{channel_.ring(0), channel_.ring(1)};
    std::mt19937_64 random_;
};

void add_rings(Pump& pump, std::uint32_t channel, std::uint32_t table) {
    for (std::uint32_t ring = 0; ring < kWildRings; ++ring) pump.add_ring(channel, ring, table);
}

void wild_bytes_harm_their_own_client_alone(const char* transport, unsigned seed) {
    const ImageFile image;
    PumpOptions options;
    options.transport = transport;
    options.spin_us = seed % 2 == 0 ? 0 : 20;
    options.queue_depth = 32;
    options.read_threads = 3;
    Pump daemon(options);
    options.guardian = true;
    options.suspect_ms = 2;
    Pump guardian(options);
    const std::uint32_t table = serve_image(daemon, image, 1'000'000);
    const std::uint32_t guarded = serve_image(guardian, image, 0);
    daemon.start();
    guardian.start();

    const auto neighbour = make_channel(1);
    RingClient client(neighbour, 0, daemon.wake_fd(), 0);
    daemon.add_ring(daemon.add_channel(neighbour->fd()), 0, table);
    std::atomic<bool> stop{false};
    std::thread user([&] { use_ring(client, image, seed, stop); });

    const std::uint64_t end = monotonic_ns() +
                              static_cast<std::uint64_t>(number("TIERD_TEST_SECONDS", 1) * 1e9);
    std::uint64_t strikes = 0, lives = 0;
    while (monotonic_ns() < end || lives < 3) {
        const auto wild = make_channel(kWildRings, kRingFlagGuarded);
        const std::uint32_t theirs = daemon.add_channel(wild->fd());
        const std::uint32_t own = guardian.add_channel(wild->fd());
        add_rings(daemon, theirs, table);
        add_rings(guardian, own, guarded);
        Vandal vandal(*wild, seed + static_cast<unsigned>(lives));
        for (int i = 0; i < 2'000; ++i, ++strikes) {
            vandal.strike();
            if (i % 64 == 0) std::this_thread::yield();
        }
        // The loops turn: both answer at once, and let go of the channel.
        CHECK(daemon.stats(kAnswerNs).has_value());
        CHECK(guardian.stats(kAnswerNs).has_value());
        CHECK(guardian.remove_channel(own, kAnswerNs));
        CHECK(daemon.remove_channel(theirs, kAnswerNs));
        ++lives;
    }
    const std::uint32_t& retired = client.ring().control->retired.value;
    const std::uint32_t before = load_acquire(retired);
    while (load_acquire(retired) - before < 20) std::this_thread::yield();
    stop.store(true);
    user.join();
    std::printf("  %s, seed %u: %lu channels, %lu strikes, %lu requests of theirs served\n", transport,
                seed, static_cast<unsigned long>(lives), static_cast<unsigned long>(strikes),
                static_cast<unsigned long>(daemon.stats().totals.pages));
}

// A header of any bytes is refused with a reason or served within its bounds.
void wild_headers(unsigned seed) {
    const ImageFile image;
    Pump pump(PumpOptions{});
    const std::uint32_t table = serve_image(pump, image, 0);
    pump.start();
    std::mt19937_64 random(seed);
    int refused = 0, served = 0;
    for (int i = 0; i < 3'000; ++i) {
        const auto channel = make_channel(1);
        auto* header = reinterpret_cast<std::uint8_t*>(channel->base());
        for (std::uint64_t n = 1 + random() % 6; n != 0; --n) {
            // Mostly the first ring's entry, which decides what is touched.
            const std::size_t at = random() % 3 != 0 ? offsetof(ChannelHeader, rings) + random() % 64
                                                     : random() % sizeof(ChannelHeader);
            header[at] = static_cast<std::uint8_t>(random() % 3 == 0 ? 0 : random());
        }
        try {
            const std::uint32_t number = pump.add_channel(channel->fd());
            try {
                pump.add_ring(number, 0, table);
                ++served;
            } catch (const std::invalid_argument&) {
                ++refused;
            }
            CHECK(pump.remove_channel(number, kAnswerNs));
        } catch (const std::invalid_argument&) {
            ++refused;
        }
    }
    std::printf("  %d refused, %d served\n", refused, served);
    CHECK(refused > 100 && served > 100);
}

}  // namespace

int main() {
    const auto seed = static_cast<unsigned>(number("TIERD_TEST_SEED", 1));
    std::printf("replay: TIERD_TEST_SEED=%u build/asan/channel_fuzz_test\n", seed);
    wild_bytes_harm_their_own_client_alone("threads", seed);
    wild_bytes_harm_their_own_client_alone("auto", seed + 1);
    wild_headers(seed);
    return 0;
}

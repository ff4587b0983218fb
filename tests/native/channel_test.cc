// One thread publishes, another waits and retires, a third answers as daemon and guardian in turn.
#include <thread>

#include "channel.h"
#include "check.h"
#include "memory_server.h"

namespace tierd {
namespace {

constexpr std::uint64_t kPatient = 100'000'000'000;

// Rows of 264 bytes: 15 a page.
const MemoryImage& image() {
    static const MemoryImage one(1500, 264, {0x1234, 1}, 1);
    return one;
}

std::shared_ptr<Channel> make_channel(std::uint32_t rows_max, std::uint32_t arena_pages) {
    return std::make_shared<Channel>(0, 1, Channel::ClientId{},
                                     std::vector<RingSpec>{{rows_max, arena_pages, 0, 0}});
}

void publisher_and_retirer(std::uint32_t first_sequence, std::uint32_t spin_us) {
    constexpr std::uint32_t kRequests = 2000;
    const auto channel = make_channel(8, 21);
    RingClient client(channel, 0, -1, spin_us, first_sequence);
    MemoryServer server;
    server.add(client.ring(), image());
    server.start();
    std::thread retirer([&] {
        for (std::uint32_t i = 1; i <= kRequests; ++i) {
            const std::uint32_t sequence = first_sequence + i;
            while (!reached(load_acquire(client.ring().control->doorbell.value), sequence))
                std::this_thread::yield();
            CHECK(client.wait(sequence, kPatient) == Status::ok);
            const std::uint8_t* arena = client.arena(sequence);
            const Descriptor d = client.ring().descriptor(sequence);
            for (std::uint32_t k = 0; k < client.count(sequence); ++k)
                CHECK(std::memcmp(client.page(arena, sequence, k),
                                  image().pages.data() + d.page[k] * std::size_t{kPageBytes},
                                  kPageBytes) == 0);
            client.retire(sequence);
        }
    });
    std::mt19937 random(3);
    std::uint32_t pages[8], rows[8] = {}, slots[8];
    std::memset(slots, 0xff, sizeof slots);
    for (std::uint32_t i = 1; i <= kRequests; ++i) {
        const std::uint32_t count = 1 + random() % 8;
        for (std::uint32_t k = 0; k < count; ++k)
            pages[k] = static_cast<std::uint32_t>(random() % image().geometry.pages);
        CHECK(client.publish_when_room({pages, rows, slots, count}, Priority::decode, kPatient) ==
              first_sequence + i);
    }
    retirer.join();
    CHECK(client.ring().stats->published == kRequests);
}

void two_threads_share_a_ring() { publisher_and_retirer(0, 50); }
void sequences_wrap() { publisher_and_retirer(~0u - 1000, 50); }
void a_waiter_that_never_spins() { publisher_and_retirer(5, 0); }

void replay_reports_a_failure_and_goes_on() {
    const auto channel = make_channel(4, 32);
    RingClient client(channel, 0, -1, 50);
    MemoryServer server({.fail_one_in = 20, .corrupt_one_in = 0});
    server.add(client.ring(), image());
    server.start();
    std::vector<std::uint32_t> pages(400);
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::uint32_t>(i % 100);
    int failures = 0;
    for (int i = 0; i < 20; ++i) {
        try {
            client.replay(pages.data(), pages.size(), 4, 8);
        } catch (const std::runtime_error& error) {
            CHECK(std::string(error.what()).find("read_error") != std::string::npos);
            ++failures;
        }
    }
    CHECK(failures > 10);
}

}  // namespace
}  // namespace tierd

int main() {
    RUN(tierd::two_threads_share_a_ring);
    RUN(tierd::sequences_wrap);
    RUN(tierd::a_waiter_that_never_spins);
    RUN(tierd::replay_reports_a_failure_and_goes_on);
}

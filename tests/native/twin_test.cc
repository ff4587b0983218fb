// The twin's directory and tables under threads: eight tables in one cache, each driven by its own
// thread, quotas and sets moving meanwhile, every row compared; and the long life of a stamp.
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "memory_server.h"
#include "twin.h"

namespace tierd {
namespace {

constexpr std::uint32_t kTables = 8;
constexpr std::uint32_t kRows = 900;
constexpr std::uint32_t kDim = 256;
constexpr std::uint64_t kPatient = 100'000'000'000;
#if defined(__SANITIZE_THREAD__)
constexpr bool kLongLives = false;  // twelve million kicks of one thread: minutes, to see nothing
#else
constexpr bool kLongLives = true;
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSteps = 300;
#else
constexpr int kSteps = 2000;
#endif

Ids ids_of(const std::vector<std::int64_t>& ids) {
    return {ids.data(), true, ids.size(), {static_cast<std::int64_t>(ids.size())}, {1}};
}

struct Node {
    Node(std::uint32_t sets, std::uint32_t first_stamp, MemoryServer::Faults faults)
        : server(faults) {
        std::vector<RingSpec> rings;
        for (std::uint32_t t = 0; t < kTables; ++t) {
            rings.push_back({16, 40, t, 0});
            images.push_back(
                std::make_unique<MemoryImage>(kRows, 264, ImageKey{100 + t, t}, 10 + t));
        }
        channel = std::make_shared<Channel>(0, 1, Channel::ClientId{}, rings);
        cache = std::make_shared<RowCache>(sets, 264, first_stamp);
        for (std::uint32_t t = 0; t < kTables; ++t) {
            // Half of the rings start where sequences are about to wrap.
            if (t % 2 != 0) RingClient(channel, t, -1, 0, ~0u - 50);
            const TwinOptions options{t,     images[t]->key, kRows, kDim, RowFormat::e4m3_e8m0,
                                      false, 4,              kPatient, 20};
            tables.push_back(std::make_unique<TwinTable>(cache, channel, t, -1, options));
            server.add(channel->ring(t), *images[t]);
        }
        server.start();
    }

    std::vector<std::unique_ptr<MemoryImage>> images;
    std::shared_ptr<Channel> channel;
    std::shared_ptr<RowCache> cache;
    std::vector<std::unique_ptr<TwinTable>> tables;
    MemoryServer server;
};

// Gathers and compares every row; a failure must be an exception. Returns whether there was one.
bool gather_and_compare(TwinTable& table, const MemoryImage& image,
                        const std::vector<std::int64_t>& ids) {
    std::vector<std::uint16_t> out(ids.size() * kDim, 0xA5A5), want(kDim);
    try {
        table.gather(ids_of(ids), out.data());
    } catch (const std::runtime_error& error) {
        CHECK(std::strncmp(error.what(), "request failed: ", 16) == 0);
        return true;
    }
    const RowDecoder decoder(RowFormat::e4m3_e8m0, kDim, false, true);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        decoder.decode(image.row(static_cast<std::uint64_t>(ids[i])), want.data());
        CHECK(std::memcmp(want.data(), out.data() + i * kDim, kDim * 2) == 0);
    }
    return false;
}

int drive(Node& node, std::uint32_t t) {
    TwinTable& table = *node.tables[t];
    std::mt19937 random(t);
    int failures = 0;
    std::vector<std::int64_t> ids;
    const auto draw = [&] {
        ids.resize(random() % 50);
        for (auto& id : ids) id = random() % 3 != 0 ? random() % 40 : random() % kRows;
    };
    for (int step = 0; step < kSteps; ++step) {
        draw();
        const unsigned choice = random() % 8;
        if (choice == 0) table.set_quota(random() % 13);
        if (choice != 1) {
            try {
                table.kick(ids_of(ids));
            } catch (const std::runtime_error&) {
                ++failures;
            }
        }
        if (choice == 2) draw();     // gather other ids than were kicked
        if (choice == 3) continue;   // never gather them
        failures += gather_and_compare(table, *node.images[t], ids);
    }
    return failures;
}

std::uint64_t stress(Node& node) {
    std::atomic<int> running{kTables};
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < kTables; ++t)
        threads.emplace_back([&, t] {
            failures += drive(node, t);
            --running;
        });
    std::mt19937 random(99);
    while (running.load() != 0) {
        node.cache->resize(1 + static_cast<std::uint32_t>(random() % node.cache->sets()));
        CHECK(node.cache->held(random() % kTables) <= node.cache->sets() * kWays);
        std::this_thread::yield();
    }
    for (auto& thread : threads) thread.join();
    std::uint64_t failed = 0, hits = 0, bypasses = 0;
    for (const auto& table : node.tables) {
        const RingStats& s = table->stats();
        CHECK(s.lookups == s.hits + s.misses + s.bypasses);
        failed += s.failed;
        hits += s.hits;
        bypasses += s.bypasses;
    }
    std::printf("  %d failures met, %llu hits, %llu bypasses\n", failures.load(),
                static_cast<unsigned long long>(hits), static_cast<unsigned long long>(bypasses));
    CHECK(hits > 1000 && bypasses > 100);
    CHECK((failed == 0) == (failures.load() == 0));
    return failed;
}

void eight_tables_in_four_sets() {
    Node node(4, kStampMask - 100, {});
    CHECK(stress(node) == 0);
}

void eight_tables_with_faults() {
    Node node(4, 0, {.fail_one_in = 40, .corrupt_one_in = 40});
    CHECK(stress(node) > 100);
    // The last word on every table: it still serves, once its fault is gone.
    for (std::uint32_t t = 0; t < kTables; ++t) {
        const std::vector<std::int64_t> ids{1, 2, 3, 899, 3};
        while (gather_and_compare(*node.tables[t], *node.images[t], ids)) {
        }
    }
}

// --- stamps --------------------------------------------------------------------------------------

using Place = RowCache::Lookup::Place;

// Looks rows [first, first + count) up in one kick, and returns its number.
std::uint64_t claim(RowCache& cache, std::uint32_t table, std::uint64_t first, int count) {
    const RowCache::Lookup lookup(cache, table);
    for (const std::uint64_t end = first + static_cast<std::uint64_t>(count); first != end; ++first)
        CHECK(lookup.find_or_claim(first).slot != kNoSlot);
    return lookup.kick();
}

// More kicks than half the range of a stamp, with words of both kinds left behind: those retired
// must stay the first to go, those in flight must stay. Without sweeps both would look young.
void a_wrapped_stamp_never_looks_young() {
    RowCache cache(1, 264, kStampMask - 100);
    for (const std::uint32_t table : {0u, 1u, 2u, 3u}) cache.attach(table, 8);
    const std::uint64_t in_flight = claim(cache, 0, 0, 8);
    cache.retire(1, claim(cache, 1, 0, 8));
    for (std::uint64_t kicks = 0; kicks < (1u << 23) + (1u << 22); ++kicks)
        cache.retire(2, RowCache::Lookup(cache, 2).kick());
    cache.retire(2, claim(cache, 2, 0, 8));
    cache.retire(3, claim(cache, 3, 0, 8));
    CHECK(cache.held(0) == 8 && cache.held(1) == 8);
    // Table 3 may have everything now; what it takes are the old words, not the young ones of
    // table 2 and not the oldest of all, which are in flight.
    for (const std::uint32_t table : {0u, 1u, 2u}) cache.set_quota(table, 0);
    cache.set_quota(3, 32);
    cache.retire(3, claim(cache, 3, 100, 8));
    CHECK(cache.held(0) == 8 && cache.held(1) == 0 && cache.held(2) == 8);
    cache.retire(3, claim(cache, 3, 200, 8));
    CHECK(cache.held(0) == 8 && cache.held(2) == 0);
    {
        const RowCache::Lookup lookup(cache, 0);
        for (std::uint64_t row = 0; row < 8; ++row) CHECK(lookup.find_or_claim(row).hit);
    }
    cache.retire(0, in_flight);  // a gather ages after its kick
    claim(cache, 3, 300, 8);     // takes table 3's own oldest: table 0 has hit its words since
    CHECK(cache.held(0) == 8);
    cache.retire(0, cache.kicks());
    claim(cache, 3, 400, 8);
    CHECK(cache.held(0) == 0 && cache.held(3) == 32);
}

void a_gather_ages_after_its_kick() {
    RowCache cache(1, 264, 0);
    cache.attach(0, 8);
    cache.attach(1, 32);
    const std::uint64_t kick = claim(cache, 0, 0, 8);
    for (std::uint64_t kicks = 0; kicks < (1u << 23) + (1u << 22); ++kicks)
        cache.retire(1, RowCache::Lookup(cache, 1).kick());
    cache.retire(1, claim(cache, 1, 0, 24));
    cache.set_quota(0, 0);
    cache.retire(1, claim(cache, 1, 100, 4));  // replaces its own: table 0's are in flight
    CHECK(cache.held(0) == 8 && cache.held(1) == 24);
    cache.retire(0, kick);
    claim(cache, 1, 200, 8);
    CHECK(cache.held(0) == 0 && cache.held(1) == 32);
}

// A kick that is never gathered waits ages for its fill: its slots must not have gone to others
// when that comes, nor their rows' bytes been replaced.
void a_fill_ages_after_its_claim() {
    Node node(1, 0, {});
    node.tables[0]->kick(ids_of({1, 2, 3}));
    for (std::uint64_t kicks = 0; kicks < kAgeMax + 2 * kSweepEvery; ++kicks)
        node.tables[1]->kick(ids_of({}));
    node.tables[0]->kick(ids_of({}));
    for (const auto& table : node.tables) table->set_quota(0);
    node.tables[1]->set_quota(kWays);
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < kWays; ++id) ids.push_back(id);
    CHECK(!gather_and_compare(*node.tables[1], *node.images[1], ids));
    CHECK(node.cache->held(0) == 3);
    CHECK(!gather_and_compare(*node.tables[0], *node.images[0], {}));
    CHECK(!gather_and_compare(*node.tables[1], *node.images[1], ids));
}

void claims_that_were_taken_back() {
    RowCache cache(1, 264, 0);
    cache.attach(0, 32);
    Place place{};
    {
        const RowCache::Lookup lookup(cache, 0);
        place = lookup.find_or_claim(7);
        CHECK(!place.hit && lookup.find_or_claim(7).hit);
    }
    cache.empty(0, 8, place.slot);  // not what the slot holds
    CHECK(cache.held(0) == 1);
    cache.empty(0, 7, place.slot);
    CHECK(cache.held(0) == 0);
    const RowCache::Lookup lookup(cache, 0);
    CHECK(!lookup.find_or_claim(7).hit);
}

void rows_spread_over_the_sets_in_use() {
    RowCache cache(48, 8, 0);
    cache.attach(0, 32);
    for (const std::uint32_t sets : {48u, 40u, 24u, 7u}) {
        cache.resize(sets);
        cache.retire(0, cache.kicks());
        std::uint32_t claimed = 0;
        const RowCache::Lookup lookup(cache, 0);
        for (std::uint64_t row = 0; row < sets * 16; ++row)
            claimed += lookup.find_or_claim(row).slot < sets * kWays;
        CHECK(claimed > sets * 16 * 99 / 100);  // half full: hardly a set is crowded
    }
}

}  // namespace
}  // namespace tierd

int main() {
    RUN(tierd::claims_that_were_taken_back);
    RUN(tierd::rows_spread_over_the_sets_in_use);
    if (tierd::kLongLives) {
        RUN(tierd::a_wrapped_stamp_never_looks_young);
        RUN(tierd::a_gather_ages_after_its_kick);
        RUN(tierd::a_fill_ages_after_its_claim);
    }
    RUN(tierd::eight_tables_in_four_sets);
    RUN(tierd::eight_tables_with_faults);
}

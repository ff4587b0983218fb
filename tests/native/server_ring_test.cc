// The pump's parts that need no thread: deadline heap, extent map, and one ring's state machine with
// the test in the places of client, guardian and device.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel.h"
#include "check.h"
#include "deadline_heap.h"
#include "extent_map.h"
#include "page.h"
#include "server_ring.h"

using namespace tierd;

namespace {

// --- heap and extents ----------------------------------------------------------------------------

struct Item {
    std::uint64_t key = 0;
    std::uint64_t order = 0;
    std::size_t heap_at = kNotInHeap;
};

void heap_agrees_with_a_scan() {
    std::mt19937 random(1);
    std::vector<Item> items(100);
    for (std::size_t i = 0; i < items.size(); ++i) items[i].order = i;
    DeadlineHeap<Item> heap;
    heap.reserve(items.size());
    for (int step = 0; step < 20'000; ++step) {
        Item& item = items[random() % items.size()];
        if (random() % 3 == 0) {
            heap.remove(&item);
        } else {
            item.key = random() % 50;
            heap.put(&item);
        }
        const Item* first = nullptr;
        for (const Item& other : items)
            if (other.heap_at != kNotInHeap &&
                (first == nullptr || other.key < first->key ||
                 (other.key == first->key && other.order < first->order)))
                first = &other;
        CHECK(heap.empty() == (first == nullptr));
        if (first != nullptr) CHECK(heap.top() == first);
    }
}

void extents_agree_with_a_scan() {
    std::mt19937 random(2);
    for (int round = 0; round < 50; ++round) {
        std::vector<ExtentRow> rows;
        std::uint64_t page = 0;
        for (int i = 0; i < 40; ++i) {
            // Mostly the 2 MiB of staging, sometimes odd lengths; sometimes the next run adjoins.
            const std::uint64_t pages = random() % 3 != 0 ? 512 : 1 + random() % 900;
            std::uint64_t at = random() % 100'000;
            std::uint64_t device = random() % 4;
            if (!rows.empty() && random() % 4 == 0) {
                device = rows.back().device;
                at = rows.back().device_page + rows.back().pages;
            }
            rows.push_back({page, pages, device, at});
            page += pages;
        }
        const ExtentMap map(rows);
        std::size_t run = 0;
        for (std::uint64_t p = 0; p < page; ++p) {
            if (p == rows[run].first_page + rows[run].pages) ++run;
            const PagePlace place = map.locate(p);
            CHECK(place.device == rows[run].device);
            CHECK(place.offset == (rows[run].device_page + p - rows[run].first_page) * kPageBytes);
        }
        for (std::uint32_t device = 0; device < 5; ++device)
            CHECK(map.uses(device) ==
                  std::any_of(rows.begin(), rows.end(),
                              [device](const ExtentRow& row) { return row.device == device; }));
    }
}

// --- one ring ------------------------------------------------------------------------------------

constexpr std::uint32_t kPages = 1000;
constexpr std::uint64_t kWindow = 1'000'000;

struct Rig {
    explicit Rig(std::uint32_t first_sequence = 0, std::uint32_t arena_pages = 128,
                 std::uint32_t flags = 0)
        : channel(std::make_shared<Channel>(0, 1, Channel::ClientId{},
                                            std::vector<RingSpec>{{16, arena_pages, 0, flags}})),
          client(channel, 0, -1, 0, first_sequence) {
        table.key = {7, 1};
        table.geometry = make_geometry(264, std::uint64_t{kPages} * rows_per_page(264));
        table.window_ns = kWindow;
        table.map = ExtentMap({{0, kPages, 0, 0}});
        ring = std::make_unique<ServerRing>(channel->ring(0), &table);
        ring->adopt();
    }

    std::uint32_t publish(const std::vector<std::uint32_t>& pages,
                          Priority priority = Priority::decode) {
        const std::vector<std::uint32_t> zeros(pages.size(), 0);
        const auto count = static_cast<std::uint32_t>(pages.size());
        return client.publish({pages.data(), zeros.data(), zeros.data(), count}, priority);
    }
    // What a pump does with a request's reads, without reading.
    void issue(std::uint32_t count) {
        ServerRequest& q = *ring->issuing();
        q.issued += count;
        q.in_flight += count;
        ring->in_flight += count;
        ring->advance_issue();
    }
    void issue_all() {
        while (const ServerRequest* q = ring->issuing()) issue(q->limit - q->issued);
    }
    void land(std::uint32_t sequence) {
        ServerRequest& q = ring->request(sequence % kRingDepth);
        ring->in_flight -= q.in_flight;
        q.in_flight = 0;
        ring->complete();
    }
    Status status(std::uint32_t sequence) {
        const std::uint64_t word = load_acquire(control().status_d.word[sequence % kRingDepth]);
        return static_cast<std::uint32_t>(word >> 32) == sequence
                   ? static_cast<Status>(static_cast<std::uint32_t>(word))
                   : Status::none;
    }
    RingControl& control() { return ring->control(); }
    std::uint32_t done() { return load_acquire(control().done_d.value); }

    std::shared_ptr<Channel> channel;
    RingClient client;
    ServedTable table;
    std::unique_ptr<ServerRing> ring;
};

void requests_are_answered_in_order() {
    for (const std::uint32_t first : {0u, 0xFFFFFFFCu}) {  // across the wrap as well
        Rig rig(first);
        for (std::uint32_t i = 1; i <= kRingDepth; ++i) CHECK(rig.publish({i, i + 1}) == first + i);
        CHECK(rig.ring->has_news());
        rig.ring->accept(0);
        CHECK(!rig.ring->has_news());
        rig.issue_all();
        CHECK(rig.ring->in_flight == 2 * kRingDepth);
        rig.land(first + 2);
        CHECK(rig.done() == first);
        rig.land(first + 1);
        CHECK(rig.done() == first + 2);
        for (std::uint32_t i = kRingDepth; i >= 3; --i) rig.land(first + i);
        CHECK(rig.done() == first + kRingDepth);
        for (std::uint32_t i = 1; i <= kRingDepth; ++i) CHECK(rig.status(first + i) == Status::ok);
        CHECK(rig.ring->counters.pages == 2 * kRingDepth);
    }
}

void spoil(int kind, const Descriptor& d) {
    switch (kind) {
        case 0: d.header->sequence += 8; break;
        case 1: d.header->count = 0; break;
        case 2: d.header->count = 17; break;
        case 3: d.header->count = 0xFFFFFFFF; break;
        case 4: d.header->first_page = 128; break;
        case 5: d.header->priority = 2; break;
        default: d.page[1] = kPages; break;
    }
}

void nonsense_is_refused_and_only_that() {
    for (int kind = 0; kind < 7; ++kind) {
        Rig rig;
        rig.publish({1, 2, 3});
        rig.publish({4, 5, 6});
        rig.publish({7, 8, 9});
        spoil(kind, rig.ring->view().descriptor(2));
        rig.ring->accept(0);
        rig.issue_all();
        CHECK(rig.ring->in_flight == 6);
        rig.land(1);
        rig.land(3);
        CHECK(rig.done() == 3);
        CHECK(rig.status(1) == Status::ok);
        CHECK(rig.status(2) == Status::bad_request);
        CHECK(rig.status(3) == Status::ok);
    }
}

void a_wild_doorbell_heals() {
    for (const std::uint32_t doorbell : {1000u, 0x80000000u, 0xFFFFFFFFu}) {
        Rig rig;
        rig.publish({1});
        rig.ring->accept(0);
        rig.issue_all();
        store_release(rig.control().doorbell.value, doorbell);
        CHECK(!rig.ring->has_news());  // what is in flight comes first
        rig.land(1);
        CHECK(rig.status(1) == Status::ok);
        CHECK(rig.ring->has_news());
        rig.ring->accept(0);
        rig.ring->complete();
        CHECK(rig.done() == doorbell);
        CHECK(rig.status(doorbell) == Status::bad_request);
        CHECK(rig.ring->counters.jumps == 1);
        CHECK(!rig.ring->has_news());
    }
}

void a_doorbell_that_goes_back_waits() {
    Rig rig;
    for (std::uint32_t i = 1; i <= 3; ++i) rig.publish({i});
    rig.ring->accept(0);
    rig.issue_all();
    store_release(rig.control().doorbell.value, 1);
    CHECK(!rig.ring->has_news());
    rig.ring->accept(0);  // as if it had gone back between the two looks; 2^32 steps lie behind it
    for (std::uint32_t i = 1; i <= 3; ++i) rig.land(i);
    CHECK(rig.done() == 3);
    CHECK(rig.ring->has_news());
    rig.ring->accept(0);
    CHECK(rig.ring->counters.jumps == 1);
}

void the_order_is_by_deadline() {
    CHECK(request_key(0, 100, 50) < request_key(0, 100, 60));
    CHECK(request_key(0, 100, 60) < request_key(0, 200, 0));
    CHECK(request_key(0, 1ull << 62, ~0ull) < request_key(1, 0, 0));
    CHECK(request_key(0, 5, ~0ull) == (1ull << 63) - 1);

    Rig rig;
    rig.publish({1}, Priority::prefill);
    rig.ring->accept(10);
    CHECK(rig.ring->key == request_key(1, 10, kWindow));
    // A decode request behind a prefill one of its ring cannot be answered before it: both hurry.
    rig.publish({2}, Priority::decode);
    rig.ring->accept(20);
    CHECK(rig.ring->key == request_key(0, 20, kWindow));
    rig.publish({3}, Priority::prefill);
    rig.ring->accept(30);
    CHECK(rig.ring->key == request_key(0, 20, kWindow));
    rig.issue(1);
    CHECK(rig.ring->key == request_key(0, 20, kWindow));
    rig.issue(1);
    CHECK(rig.ring->key == request_key(1, 30, kWindow));
}

void a_failed_request_stops_reading_and_holds_its_place() {
    Rig rig;
    rig.publish({1, 2, 3, 4});
    rig.publish({5});
    rig.ring->accept(0);
    ServerRequest& first = *rig.ring->issuing();
    rig.issue(2);
    rig.ring->fail(first, Status::bad_crc);
    rig.ring->fail(first, Status::read_error);  // the first reason stays
    rig.ring->advance_issue();
    CHECK(rig.ring->issuing()->sequence == 2);
    rig.issue_all();
    rig.land(2);
    CHECK(rig.done() == 0);  // reads of the failed request are still in flight
    rig.land(1);
    CHECK(rig.done() == 2);
    CHECK(rig.status(1) == Status::bad_crc);
    CHECK(rig.status(2) == Status::ok);
}

void a_taken_ring_is_drained_before_it_says_so() {
    Rig rig;
    rig.publish({1});
    rig.publish({2});
    rig.ring->accept(0);
    rig.issue_all();
    store_tenure(rig.control().tenure, {1, 1});
    CHECK(!rig.ring->ours());
    rig.land(1);  // reaped, but not answered: the guardian does that
    CHECK(rig.done() == 0);
    rig.ring->lose();
    CHECK(load_acquire(rig.control().drained.value) == 0);
    rig.land(2);
    CHECK(rig.ring->in_flight == 0);
    CHECK(!rig.ring->adopt());
    CHECK(load_acquire(rig.control().drained.value) == 1);
    // The guardian answers the first and hands back; the daemon goes on behind it.
    store_release(rig.control().done_g.value, 1);
    store_tenure(rig.control().tenure, {0, 2});
    CHECK(!rig.ring->ours());
    CHECK(rig.ring->adopt());
    CHECK(rig.ring->ours());
    rig.ring->accept(0);
    rig.issue_all();
    CHECK(rig.ring->in_flight == 1);
    rig.land(2);
    CHECK(rig.done() == 2);
    CHECK(rig.status(2) == Status::ok);
}

void a_restarted_daemon_goes_on_behind_either_server() {
    for (const auto& [done_d, done_g] : {std::pair{0xFFFFFFFEu, 1u}, std::pair{1u, 0xFFFFFFFEu}}) {
        Rig rig(0xFFFFFFFE);
        RingControl& c = rig.control();
        store_release(c.done_d.value, done_d);
        store_release(c.done_g.value, done_g);
        store_release(c.doorbell.value, 2);
        store_tenure(c.tenure, {0, 6});
        ServerRing later(rig.channel->ring(0), &rig.table);
        CHECK(later.adopt());
        CHECK(load_acquire(c.drained.value) == 6);
        later.accept(0);
        later.complete();
        CHECK(later.counters.answered[static_cast<int>(Status::bad_request)] == 1);  // 2 alone
        CHECK(rig.done() == 2);
    }
    // While the guardian serves, a new daemon reports its drain at once and waits.
    Rig rig;
    store_tenure(rig.control().tenure, {1, 3});
    ServerRing later(rig.channel->ring(0), &rig.table);
    CHECK(!later.adopt());
    CHECK(!later.serving());
    CHECK(load_acquire(rig.control().drained.value) == 3);
}

// --- the guardian's side -------------------------------------------------------------------------

void a_guardian_takes_serves_and_hands_back() {
    Rig rig(0xFFFFFFFE);
    RingControl& c = rig.control();
    rig.publish({1, 2});
    rig.publish({3});
    rig.ring->accept(0);
    rig.issue(2);
    ServerRing guardian(rig.channel->ring(0), &rig.table, Owner::guardian);
    CHECK(!guardian.has_news());
    guardian.take();
    CHECK(load_tenure(c.tenure).owner == 1 && load_tenure(c.tenure).epoch == 1);
    CHECK(guardian.ours() && !rig.ring->ours());
    CHECK(guardian.has_news());
    guardian.accept(0);
    ServerRequest& q = *guardian.issuing();
    CHECK(q.sequence == 0xFFFFFFFF && guardian.arena(0) == rig.channel->ring(0).arena_g);
    q.issued = q.limit;
    guardian.advance_issue();
    CHECK(!guardian.hand_back());  // request 0 has not been read
    CHECK(!guardian.has_news());
    rig.publish({4});
    CHECK(!guardian.has_news());  // what is new is for the daemon
    guardian.issuing()->issued = 1;
    guardian.advance_issue();
    guardian.complete();
    CHECK(load_acquire(c.done_g.value) == 0 && rig.done() == 0xFFFFFFFE);
    CHECK(c.status_g.word[7] >> 32 == 0xFFFFFFFF);
    CHECK(guardian.hand_back());
    CHECK(load_tenure(c.tenure).owner == 0 && load_tenure(c.tenure).epoch == 2);
    rig.land(0xFFFFFFFF);  // too late: nothing is answered under the old epoch
    CHECK(rig.done() == 0xFFFFFFFE);
    rig.ring->lose();
    CHECK(rig.ring->adopt());
    rig.ring->accept(0);
    rig.issue_all();
    rig.land(1);
    CHECK(rig.done() == 1);
}

void a_page_is_never_read_into_twice_at_once() {
    Rig rig(0, 40);  // three requests of 13 pages, then the first one's pages come again
    RingControl& c = rig.control();
    const std::vector<std::uint32_t> rows(13, 5);
    rig.publish(rows);
    ServerRing guardian(rig.channel->ring(0), &rig.table, Owner::guardian);
    guardian.take();
    guardian.accept(0);
    ServerRequest& first = *guardian.issuing();
    CHECK(!guardian.blocked());
    first.issued = first.in_flight = guardian.in_flight = 13;
    guardian.advance_issue();
    // The daemon had looked at the tenure just before, and answers the request after all.
    store_release(c.status_d.word[1], status_word(1, Status::ok));
    store_release(c.done_d.value, 1);
    rig.client.retire(1);
    for (int i = 0; i < 2; ++i) rig.publish(rows);
    guardian.accept(0);
    CHECK(!guardian.blocked());  // pages 13 to 25
    guardian.issuing()->issued = 13;
    guardian.advance_issue();
    CHECK(!guardian.blocked());  // pages 26 to 38
    guardian.issuing()->issued = 13;
    guardian.advance_issue();
    rig.publish({7, 7});
    guardian.accept(0);
    CHECK(guardian.blocked());  // pages 39 and 0, and the first request still reads into 0
    first.in_flight = guardian.in_flight = 0;
    CHECK(!guardian.blocked());
}

void a_daemon_that_stands_still_is_suspected() {
    Rig rig;
    RingControl& c = rig.control();
    RingWatch watch;
    watch.restart(0);
    std::uint64_t now = 0;
    const auto look = [&](std::uint64_t later_us) {
        return watch.suspects(c, now += later_us * 1000, 20'000'000);
    };
    for (int i = 0; i < 20; ++i) CHECK(!look(4'000));  // nobody waits
    rig.publish({1});
    for (int i = 0; i < 20; ++i) {  // its loop turns: the device is slow
        store_release(c.beat.value, static_cast<std::uint32_t>(i + 1));
        CHECK(!look(4'000));
    }
    CHECK(!look(1'000'000'000));  // the whole machine stood still
    CHECK(look(10'000));
    watch.restart(now);
    for (int i = 0; i < 4; ++i) CHECK(!look(4'000));
    CHECK(look(4'000));
    store_release(c.done_g.value, 1);
    CHECK(!look(4'000));
    store_release(c.doorbell.value, 500);  // nonsense
    for (int i = 0; i < 20; ++i) CHECK(!look(4'000));
    store_release(c.leaving.value, 1);
    CHECK(look(1));
}

void a_daemon_is_ready_when_drained_and_turning() {
    Rig rig;
    RingControl& c = rig.control();
    RingWatch watch;
    store_release(c.drained.value, 7);
    CHECK(!watch.daemon_is_ready(c, 8));
    store_release(c.drained.value, 8);
    CHECK(!watch.daemon_is_ready(c, 8));
    CHECK(!watch.daemon_is_ready(c, 8));  // drained, but it stands still
    store_release(c.leaving.value, 1);
    store_release(c.beat.value, 5);
    CHECK(!watch.daemon_is_ready(c, 8));
    store_release(c.leaving.value, 0);
    CHECK(!watch.daemon_is_ready(c, 8));
    store_release(c.beat.value, 6);
    CHECK(watch.daemon_is_ready(c, 8));
}

void a_failure_is_seen_once_and_only_if_nobody_could() {
    Rig rig;
    RingControl& c = rig.control();
    RingWatch watch;
    std::uint32_t sequence = 0;
    const auto answer = [&](StatusLine& line, Line32& done, std::uint32_t s, Status status) {
        store_release(c.doorbell.value, s);
        store_release(line.word[s % kRingDepth], status_word(s, status));
        store_release(done.value, s);
    };
    CHECK(watch.failure(c, sequence) == Status::none);
    answer(c.status_d, c.done_d, 1, Status::ok);
    answer(c.status_d, c.done_d, 2, Status::read_error);
    answer(c.status_g, c.done_g, 2, Status::ok);
    CHECK(watch.failure(c, sequence) == Status::none);
    answer(c.status_g, c.done_g, 3, Status::bad_crc);
    CHECK(watch.failure(c, sequence) == Status::bad_crc && sequence == 3);
    CHECK(watch.failure(c, sequence) == Status::none);
}

bool sleeps(long thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string line;
    std::getline(file, line);
    return line.find(") S ") != std::string::npos;
}

void a_sleeping_client_is_woken() {
    Rig rig;
    rig.publish({1});
    rig.ring->accept(0);
    rig.issue_all();
    std::atomic<long> sleeper{0};
    std::thread client([&] {
        sleeper.store(gettid());
        store_release(rig.control().waiter.value, 1);
        std::uint32_t& done = rig.control().done_d.value;
        while (load_acquire(done) == 0)  // without a limit: only a wake-up ends it
            syscall(SYS_futex, &done, FUTEX_WAIT, 0, nullptr, nullptr, 0);
    });
    while (load_acquire(rig.control().waiter.value) == 0 || !sleeps(sleeper.load()))
        std::this_thread::yield();
    rig.land(1);
    client.join();
}

void removal_answers_everything() {
    Rig rig;
    for (std::uint32_t i = 0; i < 5; ++i) rig.publish({i, i});
    rig.ring->accept(0);
    rig.issue(2);  // one whole request and half of the next are under way
    rig.issue(1);
    rig.publish({9});  // never taken in
    rig.ring->close();
    CHECK(rig.ring->issuing() == nullptr);
    CHECK(!rig.ring->has_news());
    rig.land(1);
    rig.land(2);
    rig.ring->cancel_rest();
    CHECK(rig.done() == 6);
    CHECK(rig.status(1) == Status::ok);
    for (std::uint32_t s = 2; s <= 6; ++s) CHECK(rig.status(s) == Status::cancelled);
    CHECK(!rig.ring->adopt());
    // A pump comes round again while it unregisters the arena; nothing may happen twice.
    rig.publish({9});
    rig.ring->close();
    rig.ring->cancel_rest();
    CHECK(rig.done() == 6);
}

void removal_leaves_the_rest_to_a_guardian() {
    Rig rig(0, 128, kRingFlagGuarded);
    for (std::uint32_t i = 0; i < 4; ++i) rig.publish({i, i});
    rig.ring->accept(0);
    rig.issue(2);  // one whole request and half of the next are under way
    rig.issue(1);
    rig.ring->close();
    rig.land(1);
    rig.land(2);
    rig.ring->cancel_rest();
    CHECK(!rig.ring->serving());
    CHECK(rig.done() == 1 && rig.status(1) == Status::ok);
    CHECK(rig.status(2) == Status::none);  // half of it was never read
    CHECK(rig.ring->counters.answered[static_cast<int>(Status::cancelled)] == 0);
}

}  // namespace

int main() {
    RUN(heap_agrees_with_a_scan);
    RUN(extents_agree_with_a_scan);
    RUN(requests_are_answered_in_order);
    RUN(nonsense_is_refused_and_only_that);
    RUN(a_wild_doorbell_heals);
    RUN(a_doorbell_that_goes_back_waits);
    RUN(the_order_is_by_deadline);
    RUN(a_failed_request_stops_reading_and_holds_its_place);
    RUN(a_taken_ring_is_drained_before_it_says_so);
    RUN(a_restarted_daemon_goes_on_behind_either_server);
    RUN(a_guardian_takes_serves_and_hands_back);
    RUN(a_page_is_never_read_into_twice_at_once);
    RUN(a_daemon_that_stands_still_is_suspected);
    RUN(a_daemon_is_ready_when_drained_and_turning);
    RUN(a_failure_is_seen_once_and_only_if_nobody_could);
    RUN(a_sleeping_client_is_woken);
    RUN(removal_answers_everything);
    RUN(removal_leaves_the_rest_to_a_guardian);
    return 0;
}

// Links of a pump's reader as they come and go: which of them hold what memory, and who lets go.
#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <vector>

#include "channel.h"
#include "check.h"
#include "protocol.h"
#include "reader_remote.h"

namespace {

using namespace tierd;

// Takes note of the memory that it holds; reads finish when the test says so.
class NotedLink final : public RemoteLink {
  public:
    NotedLink() { set_up(); }
    const char* transport() const override { return "noted"; }
    bool add_buffer(std::uint32_t buffer, std::uint8_t*, std::uint64_t) override {
        CHECK(held.insert(buffer).second);
        return true;
    }
    void remove_buffer(std::uint32_t buffer) override { held.erase(buffer); }
    void post(const RemotePage*, std::size_t count, std::uint64_t) override {
        flying += static_cast<std::uint32_t>(count);
    }
    void poll(std::vector<ReadDone>&, std::uint64_t) override {}
    std::uint32_t in_flight() const override { return flying; }
    void fail(const std::string& why) override { set_down(why); }

    std::set<std::uint32_t> held;
    std::uint32_t flying = 0;
};

struct Rig {
    Rig() : reader({8, 1, -1}, make_thread_reader({8, 1, -1}, ""), 0) {}

    std::int32_t add(std::uint32_t count) {
        const std::int32_t first = reader.reserve_buffers(count);
        for (std::uint32_t i = 0; i < count; ++i)
            CHECK(reader.register_buffer(first + static_cast<std::int32_t>(i), memory.data(), kPageBytes));
        return first;
    }
    void join(const std::shared_ptr<NotedLink>& link) {
        std::int32_t next = 0;
        while (!reader.join(link, next)) {
        }
    }
    void round() {
        std::array<ReadDone, 8> done;
        reader.reap(done.data(), done.size());
    }

    std::array<std::uint8_t, kPageBytes> memory{};
    RemoteReader reader;
};

using Held = std::set<std::uint32_t>;

void a_link_that_joins_forgets_what_is_released_meanwhile() {
    Rig rig;
    rig.add(3);
    auto link = std::make_shared<NotedLink>();
    std::int32_t next = 0;
    CHECK(!rig.reader.join(link, next));
    CHECK(!rig.reader.join(link, next));
    CHECK((link->held == Held{0, 1}));
    rig.reader.release_buffers(0, 1);  // a channel drains between two rounds of the joining
    CHECK((link->held == Held{1}));
    while (!rig.reader.join(link, next)) {
    }
    CHECK((link->held == Held{1, 2}));
    CHECK(rig.add(1) == 0);  // the next ring's, at the same number: nothing stands there
    CHECK((link->held == Held{0, 1, 2}));
}

void a_link_that_goes_lets_go_of_one_buffer_a_round() {
    Rig rig;
    rig.add(4);
    auto link = std::make_shared<NotedLink>();
    rig.join(link);
    rig.reader.add_remote(5);
    rig.reader.attach(5, *link, {{0, 1, 0, 0}});
    CHECK(rig.reader.ready(5));
    link->flying = 1;
    link->fail("the test says so");
    rig.round();
    CHECK(link->held.size() == 4);  // a read may still write there
    link->flying = 0;
    rig.round();
    CHECK(!rig.reader.ready(5));
    for (std::size_t left = link->held.size(); left != 0;) {
        rig.round();
        CHECK(link->held.size() + 1 >= left);
        left = link->held.size();
        if (left != 2) continue;
        rig.reader.release_buffers(3, 1);  // of which the leaving link is told as well
        CHECK((link->held == Held{2}));
        CHECK(rig.add(1) == 3);
        CHECK((link->held == Held{2}));  // and takes nothing new
        left = 1;
    }
}

void another_thread_holds_a_link_last() {
    Rig rig;
    rig.add(2);
    auto link = std::make_shared<NotedLink>();
    const std::weak_ptr<NotedLink> seen = link;
    rig.join(link);
    CHECK(rig.reader.take_ended().empty());
    link->fail("the test says so");
    link.reset();
    for (int i = 0; i < 5; ++i) rig.round();
    CHECK(!seen.expired());
    CHECK(rig.reader.take_ended().size() == 1);
    CHECK(seen.expired());
}

void a_successor_joins_after_the_last_link_has_let_go() {
    Rig rig;
    rig.add(3);
    auto last = std::make_shared<NotedLink>(), next = std::make_shared<NotedLink>();
    rig.join(last);
    last->fail("the test says so");
    rig.round();
    std::int32_t at = 0;
    for (bool joined = false; !joined;) {
        joined = rig.reader.join(next, at);
        CHECK(last->held.empty() || next->held.empty());
    }
    CHECK(next->held.size() == 3);
    next->fail("the pump stops");
    rig.round();
    rig.reader.end();
    CHECK(next->held.empty());
    CHECK(rig.reader.take_ended().size() == 2);
}

}  // namespace

int main() {
    RUN(a_link_that_joins_forgets_what_is_released_meanwhile);
    RUN(a_link_that_goes_lets_go_of_one_buffer_a_round);
    RUN(another_thread_holds_a_link_last);
    RUN(a_successor_joins_after_the_last_link_has_let_go);
    return 0;
}

// What a link does when its network card is slow, or its memory moves; over a library that is played
// (fake_ibverbs.h). Reads over a real one are in verbs_test.cc and in the lab.
#include <cstdio>

#if TIERD_VERBS
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "channel.h"
#include "check.h"
#include "fake_ibverbs.h"
#include "protocol.h"
#include "verbs_link.h"

namespace {

using namespace tierd;

constexpr std::uint64_t kTimeoutNs = 1'000'000;
constexpr std::uint64_t kLongNs = 1'000'000'000;

struct Rig {
    Rig() {
        fake_verbs = {};
        context = std::make_shared<VerbsContext>("fake0", 1);
        link = std::make_unique<VerbsLink>(context, 1, 8, kTimeoutNs);
    }
    void connect(std::uint32_t gid_index) { link->connect({VerbsPeer{{}, 0, 7, 0, 4096, 16}}, gid_index); }
    // Posts reads and lets their time pass; the link fails within this poll.
    void fail_late() {
        link->add_buffer(0, memory.data(), memory.size());
        std::vector<RemotePage> pages;
        for (std::uint32_t i = 0; i < kReads; ++i) pages.push_back({memory.data(), 0, 0, 0, i});
        const std::uint64_t start = monotonic_ns();
        link->post(pages.data(), pages.size(), start);
        std::uint64_t now = start;
        while (now - start <= kTimeoutNs) now = monotonic_ns();
        link->poll(done, now);
        CHECK(!link->up());
    }

    static constexpr std::uint32_t kReads = 3;
    alignas(kPageBytes) std::array<std::uint8_t, kPageBytes> memory{};
    std::shared_ptr<VerbsContext> context;
    std::unique_ptr<VerbsLink> link;
    std::vector<ReadDone> done;
};

void a_card_has_time_to_give_back_what_is_in_flight() {
    Rig rig;
    rig.connect(0);
    rig.fail_late();
    CHECK(fake_verbs.queue_pairs == 1 && rig.done.empty());
    for (const std::uint64_t id : fake_verbs.posted) {
        ibv_wc flushed{};
        flushed.wr_id = id;
        flushed.status = IBV_WC_WR_FLUSH_ERR;
        fake_verbs.completions.push_back(flushed);
    }
    rig.link->poll(rig.done, monotonic_ns());
    CHECK(rig.done.size() == Rig::kReads && rig.link->in_flight() == 0);
    CHECK(fake_verbs.queue_pairs == 0);
}

void but_no_more_than_that() {
    Rig rig;
    rig.connect(0);
    rig.fail_late();
    rig.link->poll(rig.done, monotonic_ns() + kLongNs);
    CHECK(rig.done.size() == Rig::kReads && rig.link->in_flight() == 0);
    CHECK(fake_verbs.queue_pairs == 0);
    for (const ReadDone& one : rig.done) CHECK(one.result < 0);
}

void memory_that_takes_anothers_place_ends_its_registration() {
    Rig rig;
    std::array<std::uint8_t, 64> other{};
    CHECK(rig.link->add_buffer(3, rig.memory.data(), rig.memory.size()));
    CHECK(rig.link->add_buffer(3, other.data(), other.size()));
    CHECK(fake_verbs.regions == 1);
    rig.link->remove_buffer(3);
    CHECK(fake_verbs.regions == 0);
}

void a_gid_that_cannot_be_named_is_refused() {
    Rig rig;
    std::string said;
    try {
        rig.connect(256);
    } catch (const VerbsError& error) {
        said = error.what();
    }
    CHECK(said.find("the GID at index 256 cannot be used") != std::string::npos);
    CHECK(!rig.link->up());
    rig.connect(255);
    CHECK(rig.link->up());
}

}  // namespace

int main() {
    RUN(a_card_has_time_to_give_back_what_is_in_flight);
    RUN(but_no_more_than_that);
    RUN(memory_that_takes_anothers_place_ends_its_registration);
    RUN(a_gid_that_cannot_be_named_is_refused);
    return 0;
}
#else
int main() {
    std::puts("built without RDMA");
    return 0;
}
#endif

// A pump over a device that lies: reads come back late, out of order, cut short, with an errno, or
// with another page's bytes, once or every time. What a client is told must be the truth.
#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "channel.h"
#include "check.h"
#include "page.h"
#include "pump.h"

using namespace tierd;

namespace {

constexpr std::uint32_t kPages = 400;
constexpr std::uint32_t kRowsMax = 40;
constexpr ImageKey kKey{77, 5};

enum class Fault { none, error, cut, foreign, stale, flipped };
constexpr std::array<Fault, 5> kFaults{Fault::error, Fault::cut, Fault::foreign, Fault::stale,
                                       Fault::flipped};

Status status_of(Fault fault) {
    switch (fault) {
        case Fault::error: return Status::read_error;
        case Fault::cut: return Status::short_read;
        case Fault::flipped: return Status::bad_crc;
        default: return Status::wrong_page;
    }
}

// Which pages fail, and how: a tenth every second time, starting with the first; some always.
Fault fault_of(std::uint32_t page, std::uint32_t attempt) {
    const Fault fault = kFaults[page / 10 % kFaults.size()];
    if (page % 37 == 0) return fault;
    return page % 10 == 3 && attempt % 2 == 0 ? fault : Fault::none;
}
bool always_fails(std::uint32_t page) { return page % 37 == 0; }

std::vector<std::uint8_t> pack(ImageKey key, const Geometry& geometry) {
    std::vector<std::uint8_t> rows(geometry.rows * geometry.row_bytes);
    std::mt19937 random(static_cast<unsigned>(key.image_id));
    for (auto& byte : rows) byte = static_cast<std::uint8_t>(random());
    std::vector<std::uint8_t> pages(std::size_t{kPages} * kPageBytes);
    pack_pages(rows.data(), geometry.rows, 0, geometry, key, pages.data());
    return pages;
}

class LyingReader final : public Reader {
  public:
    LyingReader(unsigned seed, std::uint32_t depth, const std::vector<std::uint8_t>& pages,
                const std::vector<std::uint8_t>& stale)
        : random_(seed), depth_(depth), pages_(pages), stale_(stale), attempts_(kPages, 0) {}

    const char* name() const override { return "lying"; }
    std::string reason() const override { return ""; }
    void begin() override {}
    void end() override { CHECK(waiting_.empty()); }
    void add_device(std::uint32_t, int) override {}
    void remove_device(std::uint32_t) override {}
    std::int32_t reserve_buffers(std::uint32_t) override { return kNoBuffer; }
    bool register_buffer(std::int32_t, std::uint8_t*, std::uint64_t) override { return false; }
    void release_buffers(std::int32_t, std::uint32_t) override {}
    void submit() override {}
    std::uint64_t wakes() const override { return 0; }

    void push(const Read* reads, std::size_t count) override {
        waiting_.insert(waiting_.end(), reads, reads + count);
        CHECK(waiting_.size() <= depth_);
        for (std::size_t i = 0; i < count; ++i) CHECK(targets_.insert(reads[i].target).second);
    }
    std::size_t reap(ReadDone* done, std::size_t room) override {
        if (waiting_.empty()) return 0;
        const std::size_t n = std::min(room, random_() % (waiting_.size() + 1));
        for (std::size_t i = 0; i < n; ++i) {
            std::swap(waiting_[random_() % waiting_.size()], waiting_.back());
            done[i] = finish(waiting_.back());
            targets_.erase(waiting_.back().target);
            waiting_.pop_back();
        }
        return n;
    }
    void wait(std::uint32_t count, std::uint64_t) override {
        CHECK(count >= 1);
        CHECK(waiting_.empty() || count <= waiting_.size());
        const timespec nap{0, 20'000};
        nanosleep(&nap, nullptr);
    }

  private:
    ReadDone finish(const Read& read) {
        const auto page = static_cast<std::uint32_t>(read.offset / kPageBytes);
        const Fault fault = fault_of(page, attempts_[page]++);
        const std::size_t at = fault == Fault::foreign ? (page + 1) % kPages : page;
        const auto& source = fault == Fault::stale ? stale_ : pages_;
        std::memcpy(read.target, source.data() + at * kPageBytes, kPageBytes);
        if (fault == Fault::flipped) read.target[random_() % (kPageBytes - kTrailerBytes)] ^= 4;
        if (fault == Fault::error) return {read.token, -ENODATA};
        if (fault == Fault::cut) return {read.token, static_cast<std::int32_t>(random_() % kPageBytes)};
        return {read.token, static_cast<std::int32_t>(kPageBytes)};
    }

    std::mt19937 random_;
    const std::size_t depth_;
    const std::vector<std::uint8_t>& pages_;
    const std::vector<std::uint8_t>& stale_;
    std::vector<std::uint32_t> attempts_;
    std::vector<Read> waiting_;
    std::set<const std::uint8_t*> targets_;
};

// Distinct pages; a quarter of the requests avoids the ones that always fail.
std::vector<std::uint32_t> choose(std::mt19937& random) {
    std::vector<std::uint32_t> all(kPages);
    for (std::uint32_t i = 0; i < kPages; ++i) all[i] = i;
    std::shuffle(all.begin(), all.end(), random);
    all.resize(1 + random() % kRowsMax);
    if (random() % 4 == 0) std::erase_if(all, always_fails);
    if (all.empty()) all.push_back(1);
    return all;
}

void the_client_is_told_the_truth() {
    const Geometry geometry = make_geometry(264, std::uint64_t{kPages} * rows_per_page(264));
    const auto pages = pack(kKey, geometry);
    const auto stale = pack({kKey.image_id, kKey.generation - 1}, geometry);
    std::uint64_t ok = 0;
    std::uint64_t failed = 0;
    for (unsigned seed = 1; seed <= 30; ++seed) {
        std::mt19937 random(seed);
        PumpOptions options;
        options.spin_us = seed % 2 == 0 ? 0 : 20;
        options.queue_depth = 1 + random() % 20;
        options.crc_sample = 1;
        Pump pump(options, [&](const ReaderOptions& o) {
            return std::make_unique<LyingReader>(seed, o.queue_depth, pages, stale);
        });
        const std::uint32_t device = pump.add_device(0);
        const std::uint32_t table = pump.add_table({kKey.image_id, kKey.generation, 264,
                                                    geometry.rows, 0, {{0, kPages, device, 0}}, {}});
        const auto channel = std::make_shared<Channel>(
            0, 1, Channel::ClientId{}, std::vector<RingSpec>{{kRowsMax, kRowsMax, 0, 0}});
        pump.add_ring(pump.add_channel(channel->fd()), 0, table);
        pump.start();
        RingClient client(channel, 0, pump.wake_fd(), 0);
        for (int i = 0; i < 30; ++i) {
            const auto asked = choose(random);
            const auto count = static_cast<std::uint32_t>(asked.size());
            const std::uint32_t s = client.publish({asked.data(), asked.data(), asked.data(), count},
                                                   Priority::decode);
            const auto status = client.wait(s, 20'000'000'000);
            CHECK(status.has_value());
            std::set<Status> possible;
            for (const std::uint32_t page : asked)
                if (always_fails(page)) possible.insert(status_of(fault_of(page, 0)));
            if (possible.empty()) {
                CHECK(*status == Status::ok);
                for (std::uint32_t k = 0; k < count; ++k)
                    CHECK(std::memcmp(client.page(client.arena(s), s, k),
                                      pages.data() + std::size_t{asked[k]} * kPageBytes,
                                      kPageBytes) == 0);
            } else {
                CHECK(possible.contains(*status));
            }
            ++(possible.empty() ? ok : failed);
            client.retire(s);
        }
        CHECK(pump.stats().retries > 0);
        CHECK(pump.stats().in_flight == 0);
    }
    CHECK(ok > 100 && failed > 100);
}

}  // namespace

int main() {
    RUN(the_client_is_told_the_truth);
    return 0;
}

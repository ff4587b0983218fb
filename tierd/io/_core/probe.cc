#include "probe.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "reader.h"

namespace tierd {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kWaitNs = 100'000'000;
constexpr std::size_t kLatenciesMax = 4'000'000;

std::uint64_t now_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

// splitmix64: any seed gives a good sequence.
std::uint64_t next_random(std::uint64_t& state) {
    std::uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

struct EventFd {
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ~EventFd() {
        if (fd >= 0) close(fd);
    }
};

struct Pages {
    std::uint8_t* base;
    explicit Pages(std::size_t count)
        : base(static_cast<std::uint8_t*>(std::aligned_alloc(kPage, count * kPage))) {
        if (base == nullptr) throw std::bad_alloc();
    }
    ~Pages() { std::free(base); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
};

}  // namespace

ProbeResult probe_reads(const ProbeOptions& options) {
    if (options.pages == 0) throw std::invalid_argument("pages must be at least 1");
    if (options.depth == 0 || options.depth > kQueueDepthMax)
        throw std::invalid_argument("depth must be between 1 and " + std::to_string(kQueueDepthMax));
    const EventFd wake;
    if (wake.fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    const ReaderOptions how{options.depth, std::min(options.depth, kReadThreadsMax), wake.fd};
    ProbeResult result;
    std::unique_ptr<Reader> reader = make_uring_reader(how, result.reason);
    if (reader == nullptr) reader = make_thread_reader(how, result.reason);
    result.transport = reader->name();

    const Pages memory(options.depth);
    std::vector<std::uint64_t> begun(options.depth);
    std::vector<ReadDone> done(options.depth);
    std::uint64_t random = options.seed;
    std::uint32_t in_flight = 0;
    const auto start_read = [&](std::uint32_t slot) {
        const std::uint64_t page = next_random(random) % options.pages;
        const Read read{memory.base + slot * kPage, page * kPage, 0, kNoBuffer, slot};
        begun[slot] = now_ns();
        reader->push(&read, 1);
        ++in_flight;
    };

    reader->begin();
    reader->add_device(0, options.fd);
    const std::uint64_t started = now_ns();
    const std::uint64_t stop = started + options.span_ns;
    for (std::uint32_t slot = 0; slot < options.depth; ++slot) start_read(slot);
    while (in_flight != 0) {
        reader->wait(1, kWaitNs);
        const std::size_t count = reader->reap(done.data(), done.size());
        const std::uint64_t now = now_ns();
        for (std::size_t i = 0; i < count; ++i) {
            --in_flight;
            if (done[i].result == static_cast<std::int32_t>(kPage)) {
                ++result.reads;
                const std::uint64_t took = now - begun[done[i].token];
                constexpr auto kMost = std::numeric_limits<std::uint32_t>::max();
                if (result.latency_ns.size() < kLatenciesMax)
                    result.latency_ns.push_back(
                        static_cast<std::uint32_t>(std::min<std::uint64_t>(took, kMost)));
            } else if (result.errors++ == 0) {
                result.first_error = done[i].result < 0 ? -done[i].result : 0;
            }
            if (now < stop) start_read(done[i].token);
        }
    }
    result.span_ns = now_ns() - started;
    reader->remove_device(0);
    reader->end();
    std::sort(result.latency_ns.begin(), result.latency_ns.end());
    return result;
}

}  // namespace tierd

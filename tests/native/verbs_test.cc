// Remote reads by the core alone, over a port that talks to itself. Without RDMA it says so and ends.
// Its counts of instructions a read are taken by callgrind (bench/remote.py).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "channel.h"
#include "check.h"
#include "protocol.h"
#include "reader_remote.h"
#if TIERD_VERBS
#include "verbs_link.h"
#endif

#if TIERD_VERBS
namespace {

using namespace tierd;

constexpr std::uint32_t kPages = 256;
constexpr std::uint32_t kBatch = 64;
constexpr std::uint64_t kSecond = 1'000'000'000;

std::uint8_t* pages_of(std::uint32_t count) {
    void* memory = nullptr;
    CHECK(posix_memalign(&memory, kPageBytes, std::size_t{count} * kPageBytes) == 0);
    return static_cast<std::uint8_t*>(memory);
}

// The first IPv4 GID of the port.
std::uint32_t gid_of(const VerbsContext& context, std::array<std::uint8_t, 16>& out) {
    for (int index = 0; index < 16; ++index) {
        ibv_gid gid{};
        if (verbs_api().query_gid(context.context(), context.port(), index, &gid) != 0) break;
        if (gid.raw[10] != 0xFF || gid.raw[11] != 0xFF || gid.raw[12] == 0) continue;
        std::memcpy(out.data(), gid.raw, 16);
        return static_cast<std::uint32_t>(index);
    }
    std::memset(out.data(), 0, 16);
    return 0;
}

void run(const std::string& device, int batches) {
    auto context = std::make_shared<VerbsContext>(device, 1);
    std::uint8_t* source = pages_of(kPages);
    for (std::uint32_t i = 0; i < kPages; ++i) std::memset(source + i * kPageBytes, int(i), kPageBytes);
    VerbsExport exported(context, source, std::uint64_t{kPages} * kPageBytes, 64 * kPageBytes);

    const ReaderOptions options{128, 1, -1};
    RemoteReader reader(options, make_thread_reader(options, ""), 0);
    std::uint8_t* target = pages_of(kBatch);
    const std::int32_t buffer = reader.reserve_buffers(1);
    reader.register_buffer(buffer, target, kBatch * kPageBytes);

    auto link = std::make_shared<VerbsLink>(context, 2, 128, 60 * kSecond);
    VerbsResponder responder(context, 2);
    VerbsPeer peer{{}, 0, 0, 0, 4096, 16};
    const std::uint32_t gid_index = gid_of(*context, peer.gid);
    const auto peers = [&](const std::vector<QueuePairName>& names) {
        std::vector<VerbsPeer> out;
        for (const QueuePairName& name : names) {
            out.push_back(peer);
            out.back().queue_pair = name.queue_pair;
            out.back().first_packet = name.first_packet;
        }
        return out;
    };
    responder.connect(peers(link->names()), gid_index);
    link->connect(peers(responder.names()), gid_index);
    std::int32_t next = 0;
    while (!reader.join(link, next)) {
    }
    reader.add_remote(5);
    CHECK(!reader.ready(5));
    reader.attach(5, *link, exported.places());
    CHECK(reader.ready(5));

    std::vector<Read> reads(kBatch);
    std::vector<ReadDone> done(kBatch);
    for (int batch = 0; batch < batches; ++batch) {
        for (std::uint32_t i = 0; i < kBatch; ++i) {
            const std::uint64_t page = (i * 37 + static_cast<std::uint32_t>(batch)) % kPages;
            reads[i] = {target + i * kPageBytes, page * kPageBytes, 5, buffer, i};
        }
        reader.push(reads.data(), reads.size());
        std::size_t came = 0;
        // Asleep rather than looking, so that idle looks do not count as work.
        for (const std::uint64_t start = monotonic_ns(); came < kBatch;) {
            CHECK(monotonic_ns() - start < 60 * kSecond);
            usleep(300'000);
            came += reader.reap(done.data() + came, done.size() - came);
        }
        for (std::uint32_t i = 0; i < kBatch; ++i) {
            CHECK(done[i].result == static_cast<std::int32_t>(kPageBytes));
            const std::uint64_t page = (i * 37 + static_cast<std::uint32_t>(batch)) % kPages;
            CHECK(target[i * kPageBytes + 77] == static_cast<std::uint8_t>(page));
        }
    }
    // A link that ends gives back what is in flight, and its device is away.
    reader.push(reads.data(), reads.size());
    link->fail("the test says so");
    std::size_t came = 0;
    for (const std::uint64_t start = monotonic_ns(); came < kBatch && monotonic_ns() - start < 60 * kSecond;)
        came += reader.reap(done.data(), done.size());
    CHECK(came == kBatch);
    CHECK(!reader.ready(5));
    reader.release_buffers(buffer, 1);
    reader.remove_device(5);
    std::printf("reads %d\n", (batches + 1) * static_cast<int>(kBatch));
    std::free(target);
    link.reset();
    responder.close();
    exported.close();
    std::free(source);
}

}  // namespace

int main(int argc, char** argv) {
    const int batches = argc > 1 ? std::atoi(argv[1]) : 3;
    try {
        const auto devices = list_verbs_devices();
        if (devices.empty()) {
            std::puts("no RDMA device here");
            return 0;
        }
        run(devices[0].name, batches);
    } catch (const VerbsError& error) {
        std::printf("%s\n", error.what());
        return std::strstr(error.what(), "no RDMA") != nullptr ? 0 : 1;
    }
    return 0;
}
#else
int main() {
    std::puts("built without RDMA");
    return 0;
}
#endif

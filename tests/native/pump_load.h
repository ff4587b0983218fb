// An image in a file, and a client that uses a ring and checks every page: what the pump's and the
// guardian's tests share.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "channel.h"
#include "check.h"
#include "page.h"
#include "pump.h"

namespace tierd {

inline constexpr std::uint32_t kPages = 1500;
inline constexpr std::uint32_t kRowsMax = 24;
inline constexpr ImageKey kKey{0xABCDEF, 3};
inline constexpr std::uint64_t kAnswerNs = 20'000'000'000;

using Zeros = std::array<std::uint32_t, kRowsMax>;

// A file that holds one image. Its pages say what they are, so a reader needs no second copy.
class ImageFile {
  public:
    ImageFile() : geometry(make_geometry(264, std::uint64_t{kPages} * rows_per_page(264))) {
        std::string path = "/tmp/tierd_native_test_XXXXXX";
        fd = mkstemp(path.data());
        CHECK(fd >= 0);
        unlink(path.c_str());
        std::vector<std::uint8_t> rows(geometry.rows * geometry.row_bytes);
        std::mt19937 random(3);
        for (auto& byte : rows) byte = static_cast<std::uint8_t>(random());
        std::vector<std::uint8_t> pages(std::size_t{kPages} * kPageBytes);
        pack_pages(rows.data(), geometry.rows, 0, geometry, kKey, pages.data());
        CHECK(write(fd, pages.data(), pages.size()) == static_cast<ssize_t>(pages.size()));
    }
    ~ImageFile() { close(fd); }

    bool right(const std::uint8_t* page, std::uint32_t number) const {
        return check_page(page, number, geometry, kKey, true, true) == PageFault::ok;
    }

    Geometry geometry;
    int fd = -1;
};

inline std::shared_ptr<Channel> make_channel(std::uint32_t rings, std::uint32_t flags = 0) {
    return std::make_shared<Channel>(0, 1, Channel::ClientId{},
                                     std::vector<RingSpec>(rings, {kRowsMax, 64, 0, flags}));
}

inline std::uint32_t serve_image(Pump& pump, const ImageFile& image, std::uint64_t window_ns) {
    const std::uint32_t device = pump.add_device(image.fd);
    return pump.add_table({kKey.image_id, kKey.generation, image.geometry.row_bytes,
                           image.geometry.rows, window_ns, {{0, kPages, device, 0}}, {}});
}

// Publishes random requests with up to four outstanding; checks every page of every answer.
inline void use_ring(RingClient& client, const ImageFile& image, unsigned seed,
              const std::atomic<bool>& stop) {
    std::mt19937 random(seed);
    std::array<std::array<std::uint32_t, kRowsMax>, kRingDepth> asked{};
    const Zeros zeros{};
    std::uint32_t oldest = client.published() + 1;
    const auto finish_oldest = [&] {
        const auto status = client.wait(oldest, kAnswerNs);
        CHECK(status.has_value());
        CHECK(*status == Status::ok);
        const std::uint8_t* arena = client.arena(oldest);
        for (std::uint32_t k = 0; k < client.count(oldest); ++k)
            CHECK(image.right(client.page(arena, oldest, k), asked[oldest % kRingDepth][k]));
        client.retire(oldest++);
    };
    while (!stop.load()) {
        const std::uint32_t count = 1 + random() % kRowsMax;
        while (!client.has_room(count) || client.published() + 1 - oldest >= 4) finish_oldest();
        auto& pages = asked[(client.published() + 1) % kRingDepth];
        for (std::uint32_t k = 0; k < count; ++k) pages[k] = random() % kPages;
        client.publish({pages.data(), zeros.data(), zeros.data(), count},
                       random() % 4 == 0 ? Priority::prefill : Priority::decode);
    }
    while (oldest != client.published() + 1) finish_oldest();
}

}  // namespace tierd

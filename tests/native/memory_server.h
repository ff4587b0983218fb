// A server for the client's tests: one thread that answers rings from images in memory, playing
// the daemon or the guardian from one request to the next, and failing where it is told to.
#pragma once

#include <atomic>
#include <climits>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "page.h"
#include "ring.h"

namespace tierd {

struct MemoryImage {
    MemoryImage(std::uint64_t count, std::uint32_t row_bytes, ImageKey image_key, unsigned seed)
        : key(image_key), geometry(make_geometry(row_bytes, count)), rows(count * row_bytes) {
        std::mt19937 random(seed);
        for (auto& byte : rows) byte = static_cast<std::uint8_t>(random() % 255);
        pages.resize(geometry.pages * kPageBytes);
        pack_pages(rows.data(), count, 0, geometry, key, pages.data());
    }
    const std::uint8_t* row(std::uint64_t number) const {
        return rows.data() + number * geometry.row_bytes;
    }

    ImageKey key;
    Geometry geometry;
    std::vector<std::uint8_t> rows;
    std::vector<std::uint8_t> pages;
};

class MemoryServer {
  public:
    struct Faults {
        unsigned fail_one_in = 0;     // requests answered read_error
        unsigned corrupt_one_in = 0;  // requests with a bit flipped in every row of every page
    };

    MemoryServer() : MemoryServer(Faults()) {}
    explicit MemoryServer(Faults faults) : faults_(faults) {}
    ~MemoryServer() { stop(); }

    void add(const RingView& view, const MemoryImage& image) {
        rings_.push_back({view, &image, load_acquire(view.control->doorbell.value)});
    }
    void start() {
        thread_ = std::thread([this] {
            while (!stop_.load(std::memory_order_acquire)) serve_all();
        });
    }
    void stop() {
        stop_.store(true, std::memory_order_release);
        if (thread_.joinable()) thread_.join();
    }

  private:
    struct Ring {
        RingView view;
        const MemoryImage* image;
        std::uint32_t done;
    };

    void serve_all() {
        bool busy = false;
        for (Ring& ring : rings_)
            while (ring.done != load_acquire(ring.view.control->doorbell.value)) {
                serve(ring, ring.done + 1);
                busy = true;
            }
        if (!busy) std::this_thread::yield();
    }

    void serve(Ring& ring, std::uint32_t sequence) {
        const Descriptor d = ring.view.descriptor(sequence);
        const bool guardian = random_() % 4 == 0;
        const bool corrupt = faults_.corrupt_one_in != 0 && random_() % faults_.corrupt_one_in == 0;
        const bool fail = faults_.fail_one_in != 0 && random_() % faults_.fail_one_in == 0;
        std::uint8_t* arena = guardian ? ring.view.arena_g : ring.view.arena_d;
        for (std::uint32_t k = 0; k < d.header->count; ++k) {
            std::uint8_t* to = arena + static_cast<std::size_t>((d.header->first_page + k) %
                                                                ring.view.arena_pages) * kPageBytes;
            // A failed request's pages hold anything.
            if (fail)
                std::memset(to, 0xEE, kPageBytes);
            else
                std::memcpy(to, ring.image->pages.data() +
                                    static_cast<std::size_t>(d.page[k]) * kPageBytes, kPageBytes);
            if (corrupt)
                for (std::uint32_t r = 0; r < ring.image->geometry.rows_per_page; ++r)
                    to[r * ring.image->geometry.stride + random_() % 256] ^= 4;
        }
        RingControl& c = *ring.view.control;
        const std::uint64_t word = status_word(sequence, fail ? Status::read_error : Status::ok);
        store_release((guardian ? c.status_g : c.status_d).word[sequence % kRingDepth], word);
        store_release((guardian ? c.done_g : c.done_d).value, sequence);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (load_acquire(c.waiter.value) != 0)
            syscall(SYS_futex, &c.done_d.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        ring.done = sequence;
    }

    Faults faults_;
    std::vector<Ring> rings_;
    std::mt19937 random_{7};
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

}  // namespace tierd

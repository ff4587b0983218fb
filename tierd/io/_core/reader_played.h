// Readers that play other devices, for measurements: a memory that is read by copying, and a device
// that answers later than the one that is really read.
#pragma once

#include <cstdint>
#include <memory>

#include "reader.h"

namespace tierd {

// Copies pages out of the devices' mapped files, a few at each reap: the fastest device there is.
std::unique_ptr<Reader> make_memory_reader(const ReaderOptions& options);

// Holds finished reads back as a device would whose burst of n pages takes base + n * page. Pages
// queue up per played device in the order in which they are pushed; a read that really finishes
// later than the played device would is not held. The real devices get no more than a loop device
// has tags for at a time: beyond that the kernel hands reads to helper threads, in any order.
struct PlayedDevice {
    std::uint64_t base_ns;
    std::uint64_t page_ps;  // picoseconds: a page at 100 Gb/s takes 327.68 ns
    std::uint32_t queues;   // device d plays device d % queues; 0: each plays its own
};
std::unique_ptr<Reader> make_played_reader(const ReaderOptions& options, const PlayedDevice& played,
                                           std::unique_ptr<Reader> inner);

}  // namespace tierd

// What a device can do: random 4 KiB reads at a fixed depth for a fixed time, with the pumps' own
// readers, so that the numbers are those that a pump would see.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tierd {

struct ProbeOptions {
    int fd;                   // open for reading; stays the caller's
    std::uint64_t pages;      // reads fall on [0, pages)
    std::uint32_t depth;      // reads in flight, 1..kQueueDepthMax
    std::uint64_t span_ns;    // stop submitting after this time
    std::uint64_t seed;
};

struct ProbeResult {
    std::uint64_t reads = 0;   // that returned 4,096 bytes
    std::uint64_t errors = 0;  // any other result
    int first_error = 0;       // errno of the first, or 0 for a short read
    std::uint64_t span_ns = 0;
    std::vector<std::uint32_t> latency_ns;  // of each good read, sorted
    std::string transport;
    std::string reason;  // why not io_uring
};

// Throws std::invalid_argument for options out of range and std::bad_alloc without memory.
ProbeResult probe_reads(const ProbeOptions& options);

}  // namespace tierd

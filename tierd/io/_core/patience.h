// How long a pump's control path waits for the pump's thread, which must not take its callers along
// if it stands still.
#pragma once

#include <cstdint>

#include "channel.h"
#include "pump.h"

namespace tierd {

// A loop that turns looks at a command within this time, however busy it is.
inline constexpr std::uint64_t kLookNs = 100'000'000;

inline std::uint64_t deadline_of(std::uint64_t timeout_ns) {
    return timeout_ns == kForever ? kForever : monotonic_ns() + timeout_ns;
}

inline std::uint64_t patience_until(std::uint64_t deadline_ns) {
    if (deadline_ns == kForever) return kForever;
    const std::uint64_t now = monotonic_ns();
    return (deadline_ns > now ? deadline_ns - now : 0) + kLookNs;
}

}  // namespace tierd

// Reads from simulated devices, for a pump that is turned by hand: one turn, one reap().
//
// A read completes some turns after it was pushed, in an order drawn from the seed, with whatever
// its device makes of it. Time is counted in turns of one microsecond.
#pragma once

#include <cstdint>
#include <memory>

#include "reader.h"

namespace tierd {

inline constexpr std::uint64_t kSimTurnNs = 1000;

std::unique_ptr<Reader> make_sim_reader(const ReaderOptions& options, std::uint64_t seed);

}  // namespace tierd

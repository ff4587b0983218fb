// Where client and pump share one thread (the simulator), a waiting client turns the pump.
#pragma once

#include <cstdint>

namespace tierd {

class Driver {
  public:
    virtual ~Driver() = default;
    // One round of the pump's loop.
    virtual void turn() = 0;
    // The time that goes with the turns.
    virtual std::uint64_t turn_ns() const = 0;
};

}  // namespace tierd

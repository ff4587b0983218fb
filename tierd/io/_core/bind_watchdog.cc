// Watchdog for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "pump.h"
#include "watchdog.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {

void bind_watchdog(nb::module_& m) {
    nb::class_<Watchdog>(m, "Watchdog",
                         "A native thread that sees whether pumps and the event loop still turn.\n\n"
                         "What stands still for `interval_ms` is stuck; with `ends` the process is\n"
                         "aborted after another interval.")
        .def(nb::init<std::uint32_t, bool>(), nb::kw_only(), "interval_ms"_a, "ends"_a)
        .def("watch", [](Watchdog& dog, const std::string& name, const Pump& pump) {
            dog.watch(name, pump.beat_counter());
        }, "name"_a, "pump"_a, nb::keep_alive<1, 3>(), "Watch a running pump's loop.")
        .def("beat", &Watchdog::beat, "Tell that the event loop turns.")
        .def_prop_ro("stuck", &Watchdog::stuck, "'' or the names of what stands still.")
        .def("stop", &Watchdog::stop, nb::call_guard<nb::gil_scoped_release>(), "Idempotent.");
}

}  // namespace tierd

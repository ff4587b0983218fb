// One function per bind_*.cc; bind.cc calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace tierd {
void bind_protocol(nanobind::module_& m);
void bind_pump(nanobind::module_& m);
void bind_channel(nanobind::module_& m);
void bind_twin(nanobind::module_& m);
void bind_sim(nanobind::module_& m);
void bind_watchdog(nanobind::module_& m);
void bind_verbs(nanobind::module_& m);
void bind_probe(nanobind::module_& m);
}  // namespace tierd

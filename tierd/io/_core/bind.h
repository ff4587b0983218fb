// One function per bind_*.cc; bind.cc calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace tierd {
void bind_protocol(nanobind::module_& m);
}  // namespace tierd

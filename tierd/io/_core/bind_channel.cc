#include "bind.h"

namespace tierd {
void bind_channel(nanobind::module_&) {}
}  // namespace tierd

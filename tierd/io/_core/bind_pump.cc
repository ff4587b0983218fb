#include "bind.h"

namespace tierd {
void bind_pump(nanobind::module_&) {}
}  // namespace tierd

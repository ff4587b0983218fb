#include "bind.h"

namespace tierd {
void bind_twin(nanobind::module_&) {}
}  // namespace tierd

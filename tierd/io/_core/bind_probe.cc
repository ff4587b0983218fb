// The disk probe for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "probe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

double percentile_us(const std::vector<std::uint32_t>& sorted, double share) {
    if (sorted.empty()) return 0.0;
    const auto at = static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1));
    return sorted[at] / 1000.0;
}

nb::dict probe(int fd, std::uint64_t pages, std::uint32_t depth, double seconds,
               std::uint64_t seed) {
    ProbeResult found;
    {
        const nb::gil_scoped_release release;
        found = probe_reads({fd, pages, depth, static_cast<std::uint64_t>(seconds * 1e9), seed});
    }
    nb::dict d;
    d["reads"] = found.reads;
    d["errors"] = found.errors;
    d["first_error"] = found.first_error;
    d["seconds"] = static_cast<double>(found.span_ns) / 1e9;
    d["p50_us"] = percentile_us(found.latency_ns, 0.5);
    d["p99_us"] = percentile_us(found.latency_ns, 0.99);
    d["transport"] = found.transport;
    d["reason"] = found.reason;
    return d;
}

}  // namespace

void bind_probe(nb::module_& m) {
    m.def("probe_reads", &probe, "fd"_a, nb::kw_only(), "pages"_a, "depth"_a, "seconds"_a,
          "seed"_a,
          "Read random pages of [0, pages) with `depth` reads in flight for `seconds`, by the same\n"
          "readers as a pump. Returns reads, errors, first_error (errno; 0 for a short read),\n"
          "seconds, p50_us, p99_us, transport and reason (why not io_uring).");
}

}  // namespace tierd

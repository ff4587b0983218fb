// Pump for Python. The GIL is released around everything that can wait.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <new>
#include <span>

#include "bind.h"
#include "channel.h"
#include "pump.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

using Extents = nb::ndarray<const std::uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

void make_pump(Pump* self, const std::string& transport, std::uint32_t queue_depth,
               std::uint32_t read_threads, std::uint32_t spin_us, std::uint32_t park_us,
               std::uint32_t crc_sample, bool checks, int cpu, std::uint64_t seed,
               double play_base_us, double play_page_us, std::uint32_t play_queues, bool guardian,
               std::uint32_t suspect_ms, bool end_rank, bool remote, std::uint32_t remote_hold_ms) {
    new (self) Pump({transport, queue_depth, read_threads, spin_us, park_us, crc_sample, checks, cpu,
                     seed, play_base_us, play_page_us, play_queues, guardian, suspect_ms, end_rank, remote,
                     remote_hold_ms});
}

std::vector<ExtentRow> extent_rows(const Extents& extents) {
    std::vector<ExtentRow> rows;
    rows.reserve(extents.shape(0));
    for (std::size_t i = 0; i < extents.shape(0); ++i)
        rows.push_back({extents(i, 0), extents(i, 1), extents(i, 2), extents(i, 3)});
    return rows;
}

std::uint32_t add_table(Pump& pump, std::uint64_t image_id, std::uint32_t generation,
                        std::uint32_t row_bytes, std::uint64_t rows, std::uint64_t window_ns,
                        const Extents& extents, const std::vector<Extents>& copies) {
    ServedTableSpec spec{image_id, generation, row_bytes, rows, window_ns, extent_rows(extents), {}};
    for (const Extents& copy : copies) spec.copies.push_back(extent_rows(copy));
    nb::gil_scoped_release release;
    return pump.add_table(spec);
}

bool link_remote(
    Pump& pump, const std::shared_ptr<RemoteLink>& link,
    const std::map<std::uint32_t, std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t,
                                                         std::uint32_t>>>& devices) {
    std::vector<std::pair<std::uint32_t, std::vector<RemotePlace>>> places;
    for (const auto& [device, rows] : devices) {
        places.emplace_back(device, std::vector<RemotePlace>{});
        for (const auto& [first_page, pages, address, key] : rows)
            places.back().second.push_back({first_page, pages, address, key});
    }
    nb::gil_scoped_release release;
    return pump.link_remote(link, places);
}

std::uint64_t timeout_of(std::int64_t timeout_ms) {
    return timeout_ms < 0 ? kForever : static_cast<std::uint64_t>(timeout_ms) * 1'000'000;
}

nb::dict ring_counters(const RingCounters& c) {
    nb::dict failed;
    std::uint64_t requests = 0;
    for (std::uint32_t i = 0; i < kStatusCount; ++i) {
        requests += c.answered[i];
        const auto status = static_cast<Status>(i);
        if (status != Status::none && status != Status::ok) failed[status_name(status)] = c.answered[i];
    }
    nb::dict d;
    d["requests"] = requests;
    d["pages"] = c.pages;
    d["failed"] = failed;
    d["jumps"] = c.jumps;
    d["takeovers"] = c.takeovers;
    d["staged"] = c.staged;
    d["read_ns"] = c.read_ns;
    return d;
}

nb::list counts_of(std::span<const std::uint64_t> counts) {
    nb::list list;
    for (const std::uint64_t count : counts) list.append(count);
    return list;
}

nb::list ring_reports(const PumpStats& s) {
    nb::list rings;
    for (const RingReport& r : s.rings) {
        nb::dict d = ring_counters(r.counters);
        d["channel"] = r.channel;
        d["ring"] = r.ring;
        d["table"] = r.table;
        d["serving"] = r.serving;
        d["in_flight"] = r.in_flight;
        // As bytes: there are thousands of rings, and few readers want them.
        d["read_times"] = nb::bytes(r.counters.read_times.data(), sizeof r.counters.read_times);
        rings.append(d);
    }
    return rings;
}

nb::dict stats(Pump& pump, std::int64_t timeout_ms) {
    std::optional<PumpStats> found;
    {
        nb::gil_scoped_release release;
        found = pump.stats(timeout_of(timeout_ms));
    }
    if (!found) throw TimeoutError("the pump's loop stands still");
    const PumpStats& s = *found;
    nb::dict d = ring_counters(s.totals);
    d["reads"] = s.reads;
    d["retries"] = s.retries;
    d["next_tier"] = s.next_tier;
    d["passed_over"] = s.passed_over;
    d["crc_checked"] = s.crc_checked;
    d["in_flight"] = s.in_flight;
    d["in_flight_max"] = s.in_flight_max;
    d["parks"] = s.parks;
    d["wakes"] = s.wakes;
    d["beats"] = s.beats;
    d["held_back"] = s.held_back;
    d["cpu_user_ns"] = s.cpu_user_ns;
    d["cpu_system_ns"] = s.cpu_system_ns;
    d["latency_us"] = counts_of(s.latency_us);
    d["rings"] = ring_reports(s);
    nb::list devices;
    for (const DeviceReport& device : s.devices) {
        nb::dict one;
        one["device"] = device.device;
        one["reads"] = device.reads;
        one["errors"] = device.errors;
        one["in_flight"] = device.in_flight;
        one["latency_us"] = counts_of(device.latency_us);
        devices.append(one);
    }
    d["devices"] = devices;
    d["transport"] = pump.transport();
    d["transport_reason"] = pump.transport_reason();
    return d;
}

}  // namespace

void bind_pump(nb::module_& m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Pump>(m, "Pump",
                     "One native thread that serves the rings of many channels.\n\n"
                     "Every method may be called from any thread, before and after start().\n"
                     "ValueError names what the caller got wrong; RuntimeError what the system\n"
                     "refused (transport='io_uring' where there is none; 'auto' falls back to\n"
                     "threads and says why in transport_reason) or a pump that is stopped.\n"
                     "crc_sample checks the CRC of one page in so many, 0: of none; always that of a\n"
                     "page that is read once more or comes from a peer.\n"
                     "play_base_us, play_page_us: for measurements, play a device whose burst of n\n"
                     "pages takes base + n * page, each device its own or play_queues of them;\n"
                     "transport='memory' copies from mapped files.\n"
                     "guardian=True makes the engine's side of docs/protocol.md, 'Two servers': it\n"
                     "takes a ring whose daemon stands still for suspect_ms while a request waits,\n"
                     "and gives it back; end_rank ends the process when a GPU ring's request fails.\n"
                     "remote=True allows tables in other nodes' memory; a read of one that lies\n"
                     "nowhere else waits remote_hold_ms for its peer.")
        .def("__init__", &make_pump, nb::kw_only(), "transport"_a = "auto", "queue_depth"_a = 128,
             "read_threads"_a = 16, "spin_us"_a = 50, "park_us"_a = 50, "crc_sample"_a = 16,
             "checks"_a = true, "cpu"_a = -1, "seed"_a = 0, "play_base_us"_a = 0.0,
             "play_page_us"_a = 0.0,
             "play_queues"_a = 0, "guardian"_a = false, "suspect_ms"_a = 20,
             "end_rank"_a = false, "remote"_a = false, "remote_hold_ms"_a = 5000)
        .def_prop_ro("transport", &Pump::transport, "'io_uring', 'threads', 'memory' or 'simulated'.")
        .def_prop_ro("transport_reason", &Pump::transport_reason,
                     "'' or why not io_uring, fixed buffers or fixed files.")
        .def_prop_ro("wake_fd", &Pump::wake_fd, "An eventfd, owned by the pump.")
        .def("add_device", &Pump::add_device, "fd"_a, Release(),
             "Duplicate a descriptor that is open for reading; returns the device's number.")
        .def("remove_device", &Pump::remove_device, "device"_a, Release(),
             "ValueError while a table has an extent on it.")
        .def("add_remote", &Pump::add_remote, Release(),
             "A device that is one image in a peer's memory; away until link_remote().")
        .def("link_remote", &link_remote, "link"_a, "devices"_a,
             "Read {device: [(first page, pages, address, key), ...]} through a link from now on;\n"
             "False if it failed meanwhile. Its own methods are the pump's from here on.")
        .def("drop_link", &Pump::drop_link, "link"_a, "why"_a, Release(),
             "End a link, as if its peer had gone.")
        .def("add_table", &add_table, nb::kw_only(), "image_id"_a, "generation"_a, "row_bytes"_a,
             "rows"_a, "window_ns"_a, "extents"_a, "copies"_a = nb::list(),
             "Serve an image whose pages lie where `extents` (uint64 [n, 4]: first_page, pages,\n"
             "device, device_page; sorted, no holes) says; returns the table's number. `copies` are\n"
             "extents of the same pages on other devices: a page that fails twice is read there.")
        .def("remove_table", &Pump::remove_table, "table"_a, Release(),
             "ValueError while a ring uses it.")
        .def("add_channel", &Pump::add_channel, "fd"_a, Release(),
             "Map a client's sealed memfd; returns the channel's number. ValueError names what is\n"
             "wrong with it.")
        .def("add_ring", &Pump::add_ring, "channel"_a, "ring"_a, "table"_a, Release(),
             "Serve one ring of a channel from a table, going on behind its last answered request.")
        .def("remove_channel", [](Pump& pump, std::uint32_t channel, std::int64_t timeout_ms) {
            return pump.remove_channel(channel, timeout_of(timeout_ms));
        }, "channel"_a, "timeout_ms"_a = -1, Release(),
             "Wait until its reads are reaped, then answer what is outstanding with `cancelled`,\n"
             "unless a guardian will answer it. False if reads are left after `timeout_ms` (-1:\n"
             "never); call again then. It takes nothing new meanwhile.")
        .def("start", &Pump::start, Release())
        .def("stop", [](Pump& pump, std::int64_t timeout_ms) {
            return pump.stop(timeout_of(timeout_ms));
        }, "timeout_ms"_a = -1, Release(),
             "As remove_channel for all, then end. Idempotent. False if reads are left: then the\n"
             "thread goes on, and the process has to end without letting go of the pump.")
        .def_prop_ro("beats", &Pump::beats,
                     "The loop counter; never waits, not even for a loop that stands still.")
        .def("leave", &Pump::leave, Release(), "Ask the guardians of all rings to take over.")
        .def("alarm", &Pump::alarm, "A guardian's: take every ring from the daemon now.")
        .def("turn", &Pump::turn,
             "One round of a simulated pump's loop (transport='simulated': no thread, simulated\n"
             "devices, everything by `seed`).")
        .def("abandon", &Pump::abandon,
             "Leave a simulated pump as a killed process would: nothing more is answered.")
        .def("stats", &stats, "timeout_ms"_a = -1,
             "TimeoutError if the loop stands still for `timeout_ms` (-1: wait for ever).\n"
             "Plain counters: requests, pages (of requests answered ok), failed {status: requests},\n"
             "jumps (nonsense doorbells), takeovers, staged (pages found where a\n"
             "hint left them), read_ns (of all requests,\n"
             "from seeing the doorbell to answering), reads, retries, next_tier (reads\n"
             "of a copy, after the retry), passed_over (pages whose first tier was known to\n"
             "be away), crc_checked, in_flight,\n"
             "in_flight_max, parks, wakes, beats, held_back (looks at a request whose pages were\n"
             "still being read into), cpu_user_ns and cpu_system_ns of the pump's\n"
             "thread, latency_us (reads from submission to reaping; entry i counts those below\n"
             "2^i us; of each device too), rings (each with read_times: 40 uint64 as bytes, requests\n"
             "by the time that read_ns adds up; entry 0 below 8 us, each bound sqrt(2) times the\n"
             "last), devices, transport, transport_reason.");
}

}  // namespace tierd

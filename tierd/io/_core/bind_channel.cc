// Channel and RingClient for Python.
#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "channel.h"
#include "pump.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

using Words = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteView = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
using Spec = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

// A writable view that keeps the channel alive.
ByteView view(nb::handle owner, std::uint8_t* data, std::size_t bytes) {
    return ByteView(data, {bytes}, owner);
}

std::shared_ptr<Channel> make_channel(std::uint32_t rank, std::uint32_t world,
                                      const nb::bytes& client_id, const std::vector<Spec>& rings) {
    Channel::ClientId id{};
    if (client_id.size() != id.size())
        throw std::invalid_argument("client_id must be 16 bytes, got " +
                                    std::to_string(client_id.size()));
    std::memcpy(id.data(), client_id.data(), id.size());
    std::vector<RingSpec> specs;
    for (const auto& [rows_max, arena_pages, table, flags] : rings)
        specs.push_back({rows_max, arena_pages, table, flags});
    return std::make_shared<Channel>(rank, world, id, specs);
}

nb::ndarray<nb::numpy, std::uint8_t> copy_pages(const RingClient& client, std::uint32_t sequence) {
    const std::size_t count = client.count(sequence);
    if (!client.answered(sequence))
        throw std::invalid_argument("request " + std::to_string(sequence) + " is not answered");
    auto* copy = new std::uint8_t[count * kPageBytes];
    nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<std::uint8_t*>(p); });
    const std::uint8_t* arena = client.arena(sequence);
    for (std::size_t k = 0; k < count; ++k)
        std::memcpy(copy + k * kPageBytes,
                    client.page(arena, sequence, static_cast<std::uint32_t>(k)), kPageBytes);
    return nb::ndarray<nb::numpy, std::uint8_t>(copy, {count, std::size_t{kPageBytes}}, owner);
}

// What Python sees of a RingClient. `publish` waits without the GIL, so that another thread can
// retire; `timeout_ns` bounds it.
std::uint32_t publish(RingClient& client, const Words& pages, const Words& rows,
                      const Words& slots, std::uint32_t priority, std::uint64_t timeout_ns) {
    if (rows.size() != pages.size() || slots.size() != pages.size())
        throw std::invalid_argument("pages, rows and slots must be of one length");
    if (priority > static_cast<std::uint32_t>(Priority::prefill))
        throw std::invalid_argument("priority must be 0 (decode) or 1 (prefill)");
    const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(pages.size(), ~0u));
    nb::gil_scoped_release release;
    return client.publish_when_room({pages.data(), rows.data(), slots.data(), count},
                                    static_cast<Priority>(priority), timeout_ns);
}

std::uint32_t wait(RingClient& client, std::uint32_t sequence, std::uint64_t timeout_ns) {
    client.count(sequence);  // refuses what is not outstanding
    nb::gil_scoped_release release;
    const std::optional<Status> status = client.wait(sequence, timeout_ns);
    if (!status) throw TimeoutError("no answer to request " + std::to_string(sequence));
    return static_cast<std::uint32_t>(*status);
}

nb::dict stats(const RingClient& client) {
    const RingStats& s = *client.ring().stats;
    nb::dict d;
    d["ring_full"] = load_relaxed(s.ring_full);
    d["published"] = load_relaxed(s.published);
    return d;
}

}  // namespace

void bind_channel(nb::module_& m) {
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const TimeoutError& e) {
            PyErr_SetString(PyExc_TimeoutError, e.what());
        }
    });
    nb::class_<Channel>(m, "Channel",
                        "A client's shared memory: a sealed memfd with one or more rings.\n\n"
                        "Each ring is (rows_max, arena_pages, table, flags). ValueError for sizes\n"
                        "that the protocol forbids, OSError if the memory is refused.")
        .def(nb::new_(&make_channel), nb::kw_only(), "rank"_a, "world"_a, "client_id"_a, "rings"_a)
        .def_prop_ro("fd", &Channel::fd, "The memfd, owned by the channel.")
        .def_prop_ro("bytes", &Channel::bytes)
        .def_prop_ro("ring_count", &Channel::ring_count)
        .def("control", [](nb::handle self, std::uint32_t ring) {
            auto* control = nb::cast<Channel&>(self).ring(ring).control;
            return view(self, reinterpret_cast<std::uint8_t*>(control), sizeof(RingControl));
        }, "ring"_a, "A writable view (uint8) of the ring's RingControl.")
        .def("buffer", [](nb::handle self) {
            auto& channel = nb::cast<Channel&>(self);
            return view(self, channel.base(), channel.bytes());
        }, "A writable view (uint8) of the whole channel.");
    nb::class_<RingClient>(m, "RingClient",
                           "Raw requests on one ring, no cache: for benches, probes and tests.\n\n"
                           "One thread at a time, or one that publishes and one that waits and\n"
                           "retires. `first_sequence` starts an untouched ring near 2^32.")
        .def(nb::init<std::shared_ptr<Channel>, std::uint32_t, int, std::uint32_t, std::uint32_t>(),
             "channel"_a, "ring"_a, "wake_fd"_a, nb::kw_only(), "spin_us"_a = 50,
             "first_sequence"_a = 0)
        .def("publish", &publish, "pages"_a, "rows"_a, "slots"_a, "priority"_a = 0, nb::kw_only(),
             "timeout_ns"_a = 10'000'000'000ull,
             "Publish one request (uint32 arrays of one length); returns its sequence. Waits for\n"
             "room; TimeoutError if no other thread retires within `timeout_ns`.")
        .def("wait", &wait, "sequence"_a, "timeout_ns"_a,
             "Wait for the answer; returns its Status. TimeoutError.")
        .def("drive", [](RingClient& client, std::shared_ptr<Pump> pump) {
            client.drive(std::move(pump));
        }, "pump"_a,
             "From now on waits turn this simulated pump instead of sleeping.")
        .def("rewake", &RingClient::rewake, "wake_fd"_a,
             "From now on publishing wakes the pump with this eventfd (duplicated).")
        .def("pages", &copy_pages, "sequence"_a,
             "A copy [count, 4096] of the pages of an answered request that is not retired.")
        .def("retire", &RingClient::retire, "sequence"_a,
             "Give the pages of the oldest outstanding request back.")
        .def("replay", [](RingClient& client, const Words& pages, std::uint32_t batch,
                          std::uint32_t depth) {
            nb::gil_scoped_release release;
            return client.replay(pages.data(), pages.size(), batch, depth);
        }, "pages"_a, "batch"_a, "depth"_a,
             "Read every page of the list, `batch` a request, `depth` requests outstanding, and\n"
             "check that each succeeds; returns seconds.")
        .def("stats", &stats, "The counters of RingStats that a raw client keeps, by name.");
}

}  // namespace tierd

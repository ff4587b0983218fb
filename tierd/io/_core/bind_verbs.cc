// Links to other nodes for Python; verbs where this build has them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "bind.h"
#include "channel.h"
#include "protocol.h"
#include "queue_link.h"
#include "remote_link.h"
#if TIERD_VERBS
#include "verbs_link.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Release = nb::call_guard<nb::gil_scoped_release>;

nb::object int_array(std::vector<std::int32_t>&& values) {
    auto* kept = new std::vector<std::int32_t>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept {
        delete static_cast<std::vector<std::int32_t>*>(p);
    });
    return nb::cast(nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

#if TIERD_VERBS
using Names = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

Names pairs_of(const std::vector<QueuePairName>& names) {
    Names out;
    for (const QueuePairName& name : names) out.emplace_back(name.queue_pair, name.first_packet);
    return out;
}

std::vector<VerbsPeer> peers_of(const nb::bytes& gid, std::uint32_t lid, std::uint32_t mtu,
                                std::uint32_t read_depth, const Names& queue_pairs) {
    if (gid.size() != 16) throw std::invalid_argument("a GID has 16 bytes");
    std::vector<VerbsPeer> out;
    for (const auto& [number, first_packet] : queue_pairs) {
        VerbsPeer peer{{}, lid, number, first_packet, mtu, read_depth};
        std::memcpy(peer.gid.data(), gid.c_str(), 16);
        out.push_back(peer);
    }
    return out;
}

nb::list devices() {
    std::vector<VerbsDevice> found;
    {
        nb::gil_scoped_release release;
        found = list_verbs_devices();
    }
    nb::list out;
    for (const VerbsDevice& device : found) {
        nb::list ports;
        for (const VerbsPort& port : device.ports) {
            nb::dict p;
            p["port"] = port.port;
            p["state"] = port.state;
            p["link_layer"] = port.link_layer;
            p["mtu"] = port.mtu;
            p["mtu_max"] = port.mtu_max;
            p["lid"] = port.lid;
            p["gids"] = port.gids;
            ports.append(p);
        }
        nb::dict d;
        d["name"] = device.name;
        d["trouble"] = device.trouble;
        d["region_bytes_max"] = device.region_bytes_max;
        d["queue_pair_depth_max"] = device.queue_pair_depth_max;
        d["read_depth_in"] = device.read_depth_in;
        d["read_depth_out"] = device.read_depth_out;
        d["ports"] = ports;
        out.append(d);
    }
    return out;
}

template <typename Side>
void connect(Side& side, std::uint32_t gid_index, const nb::bytes& gid, std::uint32_t lid,
             std::uint32_t mtu, std::uint32_t read_depth, const Names& queue_pairs) {
    const auto peers = peers_of(gid, lid, mtu, read_depth, queue_pairs);
    nb::gil_scoped_release release;
    side.connect(peers, gid_index);
}

void bind_real_verbs(nb::module_& m) {
    nb::exception<VerbsError>(m, "VerbsError", PyExc_RuntimeError);
    m.def("verbs_devices", &devices,
          "RDMA devices with their ports; VerbsError where the machine has no RDMA at all.");
    nb::class_<VerbsContext>(m, "VerbsContext", "An RDMA device, opened, with a protection domain.")
        .def(nb::init<const std::string&, std::uint32_t>(), "device"_a, "port"_a, Release())
        .def_prop_ro("name", &VerbsContext::name);
    nb::class_<VerbsLink, RemoteLink>(m, "VerbsLink", "Queue pairs to one peer, for a pump.")
        .def(nb::init<std::shared_ptr<VerbsContext>, std::uint32_t, std::uint32_t, std::uint64_t>(),
             "context"_a, "queue_pairs"_a, "depth"_a, "timeout_ns"_a, Release())
        .def_prop_ro("names", [](const VerbsLink& l) { return pairs_of(l.names()); },
                     "(number, first packet) of each queue pair, for the peer.")
        .def("connect", &connect<VerbsLink>, nb::kw_only(), "gid_index"_a, "gid"_a, "lid"_a, "mtu"_a,
             "read_depth"_a, "queue_pairs"_a)
        .def("probe", [](VerbsLink& link, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& pages,
                         const Memory& out) {
            if (out.size() != pages.size() * kPageBytes)
                throw std::invalid_argument("out must have 4,096 bytes a page");
            std::vector<RemotePage> reads;
            for (const auto& [address, key] : pages) reads.push_back({nullptr, address, key, 0, 0});
            nb::gil_scoped_release release;
            return link.probe(reads, out.data());
        }, "pages"_a, "out"_a,
             "Before it joins a pump: read (address, key) pages into `out`; returns ns.");
    nb::class_<VerbsResponder>(m, "VerbsResponder", "The passive side of a link.")
        .def(nb::init<std::shared_ptr<VerbsContext>, std::uint32_t>(), "context"_a, "queue_pairs"_a,
             Release())
        .def_prop_ro("names", [](const VerbsResponder& r) { return pairs_of(r.names()); })
        .def("connect", &connect<VerbsResponder>, nb::kw_only(), "gid_index"_a, "gid"_a, "lid"_a,
             "mtu"_a, "read_depth"_a, "queue_pairs"_a)
        .def("close", &VerbsResponder::close, Release());
    nb::class_<VerbsExport>(m, "VerbsExport", "Memory that peers may read, registered in pieces.")
        .def("__init__", [](VerbsExport* self, std::shared_ptr<VerbsContext> context,
                            const Memory& memory, std::uint64_t piece_bytes) {
            std::uint8_t* base = memory.data();
            const std::uint64_t bytes = memory.size();
            nb::gil_scoped_release release;
            new (self) VerbsExport(std::move(context), base, bytes, piece_bytes);
        }, "context"_a, "memory"_a, "piece_bytes"_a = kRegionBytesMax, nb::keep_alive<1, 3>())
        .def_prop_ro("places", [](const VerbsExport& e) {
            nb::list out;
            for (const RemotePlace& p : e.places())
                out.append(nb::make_tuple(p.first_page, p.pages, p.address, p.key));
            return out;
        }, "(first page, pages, address, key) of each piece.")
        .def("close", &VerbsExport::close, Release());
}
#endif

}  // namespace

void bind_verbs(nb::module_& m) {
    nb::class_<RemoteLink>(m, "RemoteLink",
                           "A connection to a peer. Up until its first failure, then down for ever.")
        .def_prop_ro("transport", &RemoteLink::transport)
        .def_prop_ro("up", &RemoteLink::up)
        .def_prop_ro("failure", &RemoteLink::failure, "'' or why it is down.")
        .def_prop_ro("trouble", &RemoteLink::trouble, "'' or what is amiss although it is up.");
    nb::class_<QueueLink, RemoteLink>(m, "QueueLink",
                                      "A link whose pages an outside transfer engine fetches into\n"
                                      "`memory`; a page's address is its number in the engine's list, times\n"
                                      "4,096.")
        .def(nb::init<std::uint32_t, std::uint64_t>(), "depth"_a, "timeout_ns"_a)
        .def_prop_ro("memory", [](nb::handle self) {
            auto& link = nb::cast<QueueLink&>(self);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(
                link.memory(), {link.depth() * kPageBytes}, self);
        }, "uint8 [depth * 4096]: slot s is its page s.")
        .def_prop_ro("event_fd", &QueueLink::event_fd,
                     "Readable when there is something to take, or the link has failed.")
        .def("open", &QueueLink::open, "The engine is ready.")
        .def("post", [](QueueLink& link, const Ints& pages, const Memory& out) {
            if (out.size() != pages.size() * kPageBytes)
                throw std::invalid_argument("out must have 4,096 bytes a page");
            std::vector<RemotePage> reads;
            for (std::size_t i = 0; i < pages.size(); ++i)
                reads.push_back({out.data() + i * kPageBytes,
                                 static_cast<std::uint64_t>(pages(i)) * kPageBytes, 0, 0,
                                 static_cast<std::uint32_t>(i)});
            link.post(reads.data(), reads.size(), monotonic_ns());
        }, "pages"_a, "out"_a, "Before it joins a pump: want pages; `out` lives until they came.")
        .def("poll", [](QueueLink& link) {
            std::vector<ReadDone> done;
            link.poll(done, monotonic_ns());
            return std::count_if(done.begin(), done.end(), [](const ReadDone& one) {
                return one.result == static_cast<std::int32_t>(kPageBytes);
            });
        }, "Before it joins a pump: how many more have come whole.")
        .def("take", [](QueueLink& link, std::uint32_t most) {
            auto [slots, pages] = link.take(most);
            return nb::make_tuple(int_array(std::move(slots)), int_array(std::move(pages)));
        }, "most"_a, "(slots, page numbers), int32 [n] each.")
        .def("finish", [](QueueLink& link, const Ints& slots, bool whole) {
            nb::gil_scoped_release release;
            link.finish(slots.data(), slots.size(), whole);
        }, "slots"_a, "whole"_a, "These slots hold their pages, or will never.");
#if TIERD_VERBS
    m.attr("VERBS") = true;
    bind_real_verbs(m);
#else
    m.attr("VERBS") = false;
#endif
}

}  // namespace tierd

// The simulated device for Python.
#include <memory>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "sim_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::dict counts(const SimDevice& device) {
    nb::dict all;
    for (std::size_t f = 0; f < kSimFaults; ++f) {
        const auto fault = static_cast<SimFault>(f);
        all[sim_fault_name(fault)] = nb::make_tuple(device.count(fault, SimZone::roots),
                                                    device.count(fault, SimZone::tables),
                                                    device.count(fault, SimZone::data));
    }
    return all;
}

std::uint64_t page_number(const SimDevice& device, std::uint64_t page) {
    if (page >= device.bytes() / kPageBytes) throw std::invalid_argument("past the device");
    return page;
}

}  // namespace

void bind_sim(nb::module_& m) {
    nb::enum_<SimZone>(m, "SimZone", nb::is_arithmetic())
        .value("roots", SimZone::roots)
        .value("tables", SimZone::tables)
        .value("data", SimZone::data);
    nb::enum_<SimLoss>(m, "SimLoss", nb::is_arithmetic(),
                       "What becomes of unflushed writes at a power loss.")
        .value("random", SimLoss::random)
        .value("none", SimLoss::none)
        .value("all", SimLoss::all)
        .value("first", SimLoss::first)
        .value("last", SimLoss::last)
        .value("torn", SimLoss::torn);
    auto fault = nb::enum_<SimFault>(m, "SimFault", nb::is_arithmetic());
    for (std::size_t f = 0; f < kSimFaults; ++f)
        fault.value(sim_fault_name(static_cast<SimFault>(f)), static_cast<SimFault>(f));

    nb::class_<SimRandom>(m, "SimRandom", "The simulator's generator (splitmix64).")
        .def(nb::init<std::uint64_t>(), "seed"_a)
        .def("next", &SimRandom::next)
        .def("below", &SimRandom::below, "limit"_a, "0 .. limit - 1");

    nb::class_<SimPower>(m, "SimPower", "The power of a simulated machine, shared by its devices.")
        .def(nb::new_([] { return std::make_shared<SimPower>(); }))
        .def("cut_after", &SimPower::cut_after, "operations"_a,
             "Cut it right before that write or flush, counted from now.")
        .def("cut_after_flushes", &SimPower::cut_after_flushes, "flushes"_a,
             "Cut it right before that flush, counted from now.")
        .def("cut_never", &SimPower::cut_never)
        .def("restore", &SimPower::restore)
        .def_prop_ro("cut", &SimPower::cut)
        .def_prop_ro("operations", &SimPower::operations, "Writes and flushes so far.");
    nb::class_<SimDevice::Snapshot>(m, "SimSnapshot");
    nb::class_<SimDevice>(m, "SimDevice",
                          "A disk in memory with a volatile cache and seeded faults.\n\n"
                          "read, write, flush and discard return bytes or a negative errno;\n"
                          "-ESHUTDOWN once the power was cut.")
        .def(nb::new_(&make_sim_device), "bytes"_a, nb::kw_only(), "tables_start"_a,
             "data_start"_a, "seed"_a, "power"_a)
        .def_prop_ro("bytes", &SimDevice::bytes)
        .def_prop_ro("fd", &SimDevice::fd, "A memfd of the same size, owned by the device.")
        .def("set_fault", &SimDevice::set_fault, "fault"_a, "zone"_a, "millionths"_a, "limit"_a,
             "How often among a zone's operations, and how many times at most.")
        .def("clear_faults", &SimDevice::clear_faults)
        .def("read", [](SimDevice& device, std::uint64_t offset, MutableBytes& target) {
            return device.read(offset, target.data(), target.size());
        }, "offset"_a, "target"_a)
        .def("write", [](SimDevice& device, std::uint64_t offset, const Bytes& source) {
            return device.write(offset, source.data(), source.size());
        }, "offset"_a, "source"_a)
        .def("flush", &SimDevice::flush)
        .def("discard", &SimDevice::discard, "offset"_a, "size"_a)
        .def("settle", &SimDevice::settle, "loss"_a,
             "After a power cut: decide what became of the unflushed writes.")
        .def_prop_ro("unflushed", &SimDevice::unflushed)
        .def("peek", [](const SimDevice& device, std::uint64_t offset, MutableBytes& target) {
            device.peek(offset, target.data(), target.size());
        }, "offset"_a, "target"_a, "Read without faults.")
        .def("poke", [](SimDevice& device, std::uint64_t offset, const Bytes& source) {
            device.poke(offset, source.data(), source.size());
        }, "offset"_a, "source"_a, "Change bytes at rest.")
        .def("damaged", [](const SimDevice& device, std::uint64_t page) {
            return device.damaged(page_number(device, page));
        }, "page"_a, "Whether a device page is known to differ from what was written, or is dead.")
        .def("rot", [](SimDevice& device, std::uint64_t page) {
            device.rot(page_number(device, page));
        }, "page"_a, "Flip one bit of a device page at rest.")
        .def("condemn", [](SimDevice& device, std::uint64_t page) {
            device.condemn(page_number(device, page));
        }, "page"_a, "Count a device page as damaged from now on, until it is written.")
        .def("dead", [](const SimDevice& device, std::uint64_t page) {
            return device.dead(page_number(device, page));
        }, "page"_a, "Whether reads of the device page fail for ever.")
        .def("faulty_reads", [](const SimDevice& device, std::uint64_t page) {
            return device.faulty_reads(page_number(device, page));
        }, "page"_a, "Times that a read of the device page gave anything but its right bytes.")
        .def("flipped_reads", [](const SimDevice& device, std::uint64_t page) {
            return device.flipped_reads(page_number(device, page));
        }, "page"_a, "Of those, times that a bit of it was flipped on the way.")
        .def("counts", &counts, "Faults reached: name -> (roots, tables, data).")
        .def("scars", &SimDevice::scars, "zone"_a, "Faults that left a mark in the zone.")
        .def("snapshot", &SimDevice::snapshot)
        .def("restore", &SimDevice::restore, "snapshot"_a);
}

}  // namespace tierd

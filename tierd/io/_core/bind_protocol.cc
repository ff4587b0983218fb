// The protocol's constants and offsets, so that Python and Triton never write a number twice.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "protocol.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {

void bind_protocol(nb::module_& m) {
    nb::module_ p = m.def_submodule("protocol", "Constants of docs/protocol.md.");
    p.attr("CHANNEL_MAGIC") = kChannelMagic;
    p.attr("CHANNEL_ABI") = kChannelAbi;
    p.attr("CHANNEL_ABI_OLDEST") = kChannelAbiOldest;
    p.attr("LINE_BYTES") = kLineBytes;
    p.attr("RING_DEPTH") = kRingDepth;
    p.attr("RINGS_MAX") = kRingsMax;
    p.attr("ROWS_MAX_LIMIT") = kRowsMaxLimit;
    p.attr("ARENA_PAGES_LIMIT") = kArenaPagesLimit;
    p.attr("RING_FLAG_GPU") = kRingFlagGpu;
    p.attr("RING_FLAG_GUARDED") = kRingFlagGuarded;
    p.attr("RING_FLAG_HINT") = kRingFlagHint;
    p.attr("SAMPLE_HEADER_BYTES") = sizeof(SampleHeader);
    p.attr("SAMPLE_CAPACITY") = kSampleCapacity;
    p.attr("SAMPLE_THRESHOLD") = kSampleThreshold;
    p.attr("SAMPLE_PREFILL") = kSamplePrefill;
    p.attr("SAMPLE_STAMP_SHIFT") = kSampleStampShift;
    p.attr("HEADER_BYTES") = sizeof(ChannelHeader);
    p.attr("CONTROL_BYTES") = sizeof(RingControl);
    p.attr("STATS_BYTES") = sizeof(RingStats);
    p.attr("RING_ENTRY_BYTES") = sizeof(RingEntry);
    p.attr("OFFSET_RINGS") = offsetof(ChannelHeader, rings);
    p.attr("OFFSET_DOORBELL") = offsetof(RingControl, doorbell);
    p.attr("OFFSET_RETIRED") = offsetof(RingControl, retired);
    p.attr("OFFSET_WAITER") = offsetof(RingControl, waiter);
    p.attr("OFFSET_DONE_D") = offsetof(RingControl, done_d);
    p.attr("OFFSET_STATUS_D") = offsetof(RingControl, status_d);
    p.attr("OFFSET_BEAT") = offsetof(RingControl, beat);
    p.attr("OFFSET_PARKED") = offsetof(RingControl, parked);
    p.attr("OFFSET_DRAINED") = offsetof(RingControl, drained);
    p.attr("OFFSET_DONE_G") = offsetof(RingControl, done_g);
    p.attr("OFFSET_STATUS_G") = offsetof(RingControl, status_g);
    p.attr("OFFSET_TENURE") = offsetof(RingControl, tenure);
    p.attr("OFFSET_LEAVING") = offsetof(RingControl, leaving);
    p.attr("OFFSET_QUOTA") = offsetof(RingControl, quota);
    p.def("descriptor_bytes", &descriptor_bytes, "rows_max"_a);
    p.def("sample_hash", &sample_hash, "row"_a);
    p.def("array_bytes", &array_bytes, "rows_max"_a);
    nb::enum_<Status>(p, "Status", nb::is_arithmetic())
        .value("none", Status::none).value("ok", Status::ok)
        .value("read_error", Status::read_error).value("short_read", Status::short_read)
        .value("wrong_page", Status::wrong_page).value("bad_crc", Status::bad_crc)
        .value("bad_request", Status::bad_request).value("cancelled", Status::cancelled);
    nb::enum_<Owner>(p, "Owner", nb::is_arithmetic())
        .value("daemon", Owner::daemon).value("guardian", Owner::guardian);
    nb::enum_<Priority>(p, "Priority", nb::is_arithmetic())
        .value("decode", Priority::decode).value("prefill", Priority::prefill);
}

}  // namespace tierd

// RowCache, TwinTable and decode_rows for Python.
#include <memory>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "pump.h"
#include "twin.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

using AnyArray = nb::ndarray<nb::device::cpu>;
using ReadOnlyArray = nb::ndarray<nb::ro, nb::device::cpu>;

bool is_int(nb::dlpack::dtype t, int bits) {
    return t.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) && t.bits == bits &&
           t.lanes == 1;
}

Ids ids_of(const ReadOnlyArray& array) {
    const bool wide = is_int(array.dtype(), 64);
    if (!wide && !is_int(array.dtype(), 32)) throw nb::type_error("ids must be int64 or int32");
    Ids ids{array.data(), wide, array.size(), {}, {}};
    for (std::size_t d = 0; d < array.ndim(); ++d) {
        ids.shape.push_back(static_cast<std::int64_t>(array.shape(d)));
        ids.strides.push_back(array.stride(d));
    }
    return ids;
}

// bf16 bits travel as any type of 16 bits, raw rows as bytes.
bool holds_output(nb::dlpack::dtype t, std::uint32_t element_bytes) {
    using Code = nb::dlpack::dtype_code;
    if (t.lanes != 1 || t.bits != 8 * element_bytes) return false;
    return t.code == static_cast<std::uint8_t>(Code::UInt) ||
           t.code == static_cast<std::uint8_t>(Code::Int) ||
           (t.code == static_cast<std::uint8_t>(Code::Bfloat) && element_bytes == 2);
}

void check_out(const AnyArray& out, const ReadOnlyArray& ids, const RowDecoder& decoder) {
    if (!holds_output(out.dtype(), decoder.element_bytes()))
        throw nb::type_error(decoder.element_bytes() == 2
                                 ? "out must be uint16, int16 or bfloat16"
                                 : "out must be uint8 or int8");
    bool fits = out.ndim() == ids.ndim() + 1 && out.shape(ids.ndim()) == decoder.dim();
    for (std::size_t d = 0; fits && d < ids.ndim(); ++d) fits = out.shape(d) == ids.shape(d);
    if (!fits)
        throw std::invalid_argument("out must have the shape of ids and a last dimension of " +
                                    std::to_string(decoder.dim()));
    std::int64_t stride = 1;
    if (out.size() == 0) return;  // strides of an empty array mean nothing
    for (std::size_t d = out.ndim(); d-- > 0; stride *= static_cast<std::int64_t>(out.shape(d)))
        if (out.shape(d) > 1 && out.stride(d) != stride)
            throw std::invalid_argument("out must be contiguous");
}

std::shared_ptr<TwinTable> make_table(std::shared_ptr<RowCache> cache,
                                      std::shared_ptr<Channel> channel, std::uint32_t ring,
                                      int wake_fd, std::uint32_t table, std::uint64_t image_id,
                                      std::uint32_t generation, std::uint64_t rows,
                                      std::uint32_t dim, const std::string& row_format,
                                      std::uint32_t quota, std::uint64_t timeout_ns,
                                      std::uint32_t spin_us, bool canonical_zero) {
    const RowFormat format = parse_row_format(row_format);
    const TwinOptions options{table,          {image_id, generation}, rows,       dim,    format,
                              canonical_zero, quota,                  timeout_ns, spin_us};
    return std::make_shared<TwinTable>(std::move(cache), std::move(channel), ring, wake_fd,
                                       options);
}

nb::dict stats_of(const TwinTable& table) {
    const RingStats& s = table.stats();
    nb::dict d;
    const auto put = [&](const char* name, const std::uint64_t& counter) {
        d[name] = load_relaxed(counter);
    };
    put("lookups", s.lookups);
    put("hits", s.hits);
    put("misses", s.misses);
    put("bypasses", s.bypasses);
    put("demands", s.demands);
    put("steps", s.steps);
    put("late_steps", s.late_steps);
    put("stall_ns", s.stall_ns);
    put("tag_errors", s.tag_errors);
    put("ring_full", s.ring_full);
    put("failed", s.failed);
    put("published", s.published);
    put("quota", s.quota);
    return d;
}

// The result is an array of the rows' leading dimensions and `dim` values.
nb::ndarray<nb::numpy> decode_rows(
    const nb::ndarray<const std::uint8_t, nb::c_contig, nb::device::cpu>& rows, std::uint32_t dim,
    const std::string& row_format, bool canonical_zero, bool portable) {
    const RowDecoder decoder(parse_row_format(row_format), dim, canonical_zero, portable);
    if (rows.ndim() == 0 || rows.shape(rows.ndim() - 1) != decoder.row_bytes())
        throw std::invalid_argument("rows must have a last dimension of " +
                                    std::to_string(decoder.row_bytes()) + " bytes");
    std::vector<std::size_t> shape;
    for (std::size_t d = 0; d + 1 < rows.ndim(); ++d) shape.push_back(rows.shape(d));
    shape.push_back(dim);
    const std::size_t count = rows.size() / decoder.row_bytes();
    // Elements of two bytes even for raw rows: any allocation is aligned for both.
    auto* out = new std::uint16_t[(count * decoder.output_bytes() + 1) / 2];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<std::uint16_t*>(p); });
    {
        nb::gil_scoped_release release;
        auto* to = reinterpret_cast<std::uint8_t*>(out);
        for (std::size_t i = 0; i < count; ++i)
            decoder.decode(rows.data() + i * decoder.row_bytes(), to + i * decoder.output_bytes());
    }
    const nb::dlpack::dtype dtype =
        decoder.element_bytes() == 2 ? nb::dtype<std::uint16_t>() : nb::dtype<std::uint8_t>();
    return nb::ndarray<nb::numpy>(out, shape.size(), shape.data(), owner, nullptr, dtype);
}

}  // namespace

void bind_twin(nb::module_& m) {
    m.def("decode_rows", &decode_rows, "rows"_a, "dim"_a, "row_format"_a, nb::kw_only(),
          "canonical_zero"_a = false, "portable"_a = false,
          "Rows as stored (uint8 [..., row_bytes]) to bf16 bits (uint16 [..., dim]), exactly as\n"
          "the engine's kernel does; raw rows are copied (uint8). `canonical_zero` turns -0 into\n"
          "+0; `portable` keeps to the baseline instruction set.");
    nb::class_<RowCache>(m, "RowCache",
                         "A pool of row slots, 32 ways in each of `sets` sets, shared by tables\n"
                         "of one row size. `first_stamp` lets tests start near a stamp's end.")
        .def(nb::init<std::uint32_t, std::uint32_t, std::uint32_t>(), nb::kw_only(), "sets"_a,
             "row_bytes"_a, "first_stamp"_a = 0)
        .def_prop_ro("sets", &RowCache::sets_in_use, "Sets in use.")
        .def_prop_ro("row_bytes", &RowCache::row_bytes)
        .def_prop_ro("kicks", &RowCache::kicks, "Kicks of all tables, plus first_stamp.")
        .def("resize", &RowCache::resize, "sets"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Sets in use from now on, at most those made. Fewer sets clear the rest's words.")
        .def("held", &RowCache::held, "table"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Slots that hold (or await) rows of a table.");
    nb::class_<TwinTable>(m, "TwinTable",
                          "One table on the CPU twin: kick looks rows up and asks for the missing\n"
                          "ones, gather waits for them and decodes. A call waits for one in\n"
                          "progress. Ids are int64 or int32, any shape, strided or not.")
        .def(nb::new_(&make_table), "cache"_a, "channel"_a, "ring"_a, "wake_fd"_a, nb::kw_only(),
             "table"_a, "image_id"_a, "generation"_a, "rows"_a, "dim"_a, "row_format"_a, "quota"_a,
             "timeout_ns"_a = 10'000'000'000ull, "spin_us"_a = 50, "canonical_zero"_a = false)
        .def("kick", [](TwinTable& table, const ReadOnlyArray& array) {
            const Ids ids = ids_of(array);
            nb::gil_scoped_release release;
            table.kick(ids);
        }, "ids"_a,
             "Look up and claim; publish requests for what is missing. IndexError names an id\n"
             "outside the table (nothing has changed then).")
        .def("gather", [](TwinTable& table, const ReadOnlyArray& array, const AnyArray& out) {
            const Ids ids = ids_of(array);
            check_out(out, array, table.decoder());
            nb::gil_scoped_release release;
            table.gather(ids, out.data());
        }, "ids"_a, "out"_a,
             "Write the rows of `ids` into `out` [*ids.shape, dim], contiguous: bf16 bits\n"
             "(uint16, int16 or bfloat16), or bytes for raw rows. Ids other than the last kicked\n"
             "ones are looked up and demanded now. RuntimeError if a request fails; `out` is\n"
             "undefined then.")
        .def("drive", [](TwinTable& table, std::shared_ptr<Pump> pump) {
            table.drive(std::move(pump));
        }, "pump"_a,
             "From now on waits turn this simulated pump instead of sleeping.")
        .def("rewake", &TwinTable::rewake, "wake_fd"_a,
             "From now on kicks wake the pump with this eventfd (duplicated).")
        .def("set_quota", &TwinTable::set_quota, "ways"_a,
             "Ways per set that the table may hold; nothing is flushed.")
        .def("set_timeout", &TwinTable::set_timeout, "timeout_ns"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "The most that one kick or gather waits for the servers, from the next call on.")
        .def("stats", &stats_of, "The ring's counters (RingStats) by name.");
}

}  // namespace tierd

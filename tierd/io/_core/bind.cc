// The Python extension tierd.io._core._native. Each bind_*.cc adds one idea; pages are here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "page.h"
#include "protocol.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tierd {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Faults = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

void bind_pages(nb::module_& m) {
    m.def("crc32c", [](const Bytes& data, std::uint32_t crc) {
        nb::gil_scoped_release release;
        return crc32c(data.data(), data.size(), crc);
    }, "data"_a, "crc"_a = 0, "CRC32C (Castagnoli) of a contiguous uint8 array, continuing `crc`.");
    m.def("crc32c_portable", [](const Bytes& data, std::uint32_t crc) {
        return crc32c_portable(data.data(), data.size(), crc);
    }, "data"_a, "crc"_a = 0, "The table-driven CRC32C that crc32c() falls back to.");
    m.def("crc32c_engine", &crc32c_engine, "'hardware' or 'portable'.");
    m.def("row_stride", &row_stride, "row_bytes"_a, "Bytes between rows in a page.");
    m.def("rows_per_page", [](std::uint32_t row_bytes) {
        return make_geometry(row_bytes, 0).rows_per_page;
    }, "row_bytes"_a, "Rows that fit a page; ValueError if none does.");
    m.def("tag_key", [](std::uint64_t image_id, std::uint32_t generation) {
        const TagKey k = tag_key({image_id, generation});
        return nb::make_tuple(k.key0, k.key1);
    }, "image_id"_a, "generation"_a, "The two u32 that key the row tags of one image generation.");
    m.def("row_tag", [](const Bytes& row, std::uint64_t number, std::uint64_t image_id,
                        std::uint32_t generation) {
        require(row.size() % 4 == 0, "row must be padded to a multiple of 4 bytes");
        return row_tag(row.data(), static_cast<std::uint32_t>(row.size()), number,
                       tag_key({image_id, generation}));
    }, "row"_a, "number"_a, "image_id"_a, "generation"_a, "Tag of one padded row.");
    m.def("pack_pages", [](const Bytes& rows, std::uint32_t row_bytes, std::uint64_t first_page,
                           std::uint64_t image_id, std::uint32_t generation, MutableBytes& pages) {
        const Geometry g = make_geometry(row_bytes, 0);
        require(rows.size() % row_bytes == 0, "rows must hold whole rows");
        const std::uint64_t count = rows.size() / row_bytes;
        const std::uint64_t need = (count + g.rows_per_page - 1) / g.rows_per_page;
        require(pages.size() == need * kPageBytes, "pages must have exactly the pages of the rows");
        nb::gil_scoped_release release;
        pack_pages(rows.data(), count, first_page, g, {image_id, generation}, pages.data());
    }, "rows"_a, "row_bytes"_a, "first_page"_a, "image_id"_a, "generation"_a, "pages"_a,
       "Pack whole rows (uint8, back to back) into pages, starting at `first_page` of the image.\n"
       "Only the last page of the image may be partial: every call but the last must bring a\n"
       "multiple of rows_per_page rows.");
    m.def("check_pages", [](const Bytes& pages, std::uint32_t row_bytes, std::uint64_t rows,
                            std::uint64_t first_page, std::uint64_t image_id,
                            std::uint32_t generation, bool check_crc, bool check_tags,
                            Faults& faults) {
        const Geometry g = make_geometry(row_bytes, rows);
        require(pages.size() == faults.size() * kPageBytes, "faults must have one byte per page");
        nb::gil_scoped_release release;
        std::size_t bad = 0;
        for (std::size_t i = 0; i < faults.size(); ++i) {
            const PageFault f = check_page(pages.data() + i * kPageBytes, first_page + i, g,
                                           {image_id, generation}, check_crc, check_tags);
            faults.data()[i] = static_cast<std::uint8_t>(f);
            bad += f != PageFault::ok;
        }
        return bad;
    }, "pages"_a, "row_bytes"_a, "rows"_a, "first_page"_a, "image_id"_a, "generation"_a,
       "check_crc"_a, "check_tags"_a, "faults"_a,
       "Check consecutive pages of an image of `rows` rows; writes one PageFault per page into\n"
       "`faults` (uint8) and returns how many are not ok.");
    nb::enum_<PageFault>(m, "PageFault", nb::is_arithmetic())
        .value("ok", PageFault::ok).value("magic", PageFault::magic)
        .value("version", PageFault::version).value("image", PageFault::image)
        .value("generation", PageFault::generation).value("number", PageFault::number)
        .value("rows", PageFault::rows).value("crc", PageFault::crc).value("tag", PageFault::tag);
    m.attr("PAGE_BYTES") = kPageBytes;
    m.attr("PAGE_MAGIC") = kPageMagic;
    m.attr("PAGE_VERSION") = kPageVersion;
    m.attr("TRAILER_BYTES") = kTrailerBytes;
    m.attr("ROW_BYTES_MAX") = kRowBytesMax;
}

}  // namespace
}  // namespace tierd

NB_MODULE(_native, m) {
    m.doc() = "tierd's native core: pages, rings, pumps and the CPU twin.";
    tierd::bind_pages(m);
    tierd::bind_protocol(m);
    tierd::bind_verbs(m);
    tierd::bind_pump(m);
    tierd::bind_channel(m);
    tierd::bind_twin(m);
    tierd::bind_sim(m);
    tierd::bind_watchdog(m);
    tierd::bind_probe(m);
}

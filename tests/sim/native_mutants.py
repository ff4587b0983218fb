"""Bugs planted in the native core: in a copy of its sources, built apart from the one that ships.

Each is a replacement in one file, switched on at run time by its number. A replacement whose text
is no longer there is an error: the mutant has to be written anew.

    python -m tests.sim.native_mutants     builds build/mutants
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
CORE = Path("tierd/io/_core")
HEADER = """#pragma once
namespace tierd {
inline int active_mutant = 0;
inline bool mutant(int number) { return active_mutant == number; }
}  // namespace tierd
"""


@dataclasses.dataclass(frozen=True)
class NativeMutant:
    """One planted bug; MUTANT in ``bug`` becomes the question whether it is on."""

    name: str
    file: str
    text: str
    bug: str


NATIVE_MUTANTS = (
    NativeMutant(
        "no CRC check of pages",
        "page.cc",
        "if (check_crc && crc32c(page, kPageBytes - 4) != t.crc) return PageFault::crc;",
        "if (check_crc && !MUTANT && crc32c(page, kPageBytes - 4) != t.crc) return PageFault::crc;",
    ),
    NativeMutant(
        "page number not checked",
        "page.cc",
        "if (t.page != page_number) return PageFault::number;",
        "if (t.page != page_number && !MUTANT) return PageFault::number;",
    ),
    NativeMutant(
        "image of a page not checked",
        "page.cc",
        "if (t.image_id != key.image_id) return PageFault::image;",
        "if (t.image_id != key.image_id && !MUTANT) return PageFault::image;",
    ),
    NativeMutant(
        "generation of a page not checked",
        "page.cc",
        "if (t.generation != key.generation) return PageFault::generation;",
        "if (t.generation != key.generation && !MUTANT) return PageFault::generation;",
    ),
    NativeMutant(
        "no tag check of rows",
        "twin.cc",
        "return row_tag(to, geometry_.stride, miss.row, tag_key_) == stored;",
        "return MUTANT || row_tag(to, geometry_.stride, miss.row, tag_key_) == stored;",
    ),
    NativeMutant(
        "wrong row in page",
        "page.cc",
        "std::memcpy(row, rows + (done + r) * g.row_bytes, g.row_bytes);",
        "std::memcpy(row, rows + (done + (MUTANT && r == 1 ? 0 : r)) * g.row_bytes, g.row_bytes);",
    ),
    NativeMutant(
        "wrong row of the right page",
        "twin.cc",
        "const std::size_t row = miss.row % geometry_.rows_per_page;",
        "const std::size_t row = (miss.row + (MUTANT ? 1 : 0)) % geometry_.rows_per_page;",
    ),
    NativeMutant(
        "wrong slot gathered",
        "twin.cc",
        "places_[i] = place.slot;",
        "places_[i] = MUTANT && i != 0 ? places_[i - 1] : place.slot;",
    ),
    NativeMutant(
        "short read accepted",
        "pump.cc",
        "if (result != static_cast<std::int32_t>(kPageBytes)) return Status::short_read;",
        """if (result != static_cast<std::int32_t>(kPageBytes))
        return MUTANT ? Status::ok : Status::short_read;""",
    ),
    NativeMutant(
        "result of a retry not checked",
        "pump.cc",
        "if (result < 0) return Status::read_error;",
        "if (MUTANT && slot.attempt != 0) return Status::ok;\n"
        "    if (result < 0) return Status::read_error;",
    ),
    NativeMutant(
        "retry forgotten",
        "pump.cc",
        "retries_.push_back(token);",
        "if (!MUTANT) retries_.push_back(token);",
    ),
    NativeMutant(
        "failed request reported as ok",
        "server_ring.cc",
        "answer(q.sequence, q.status);",
        "answer(q.sequence, MUTANT ? Status::ok : q.status);",
    ),
    NativeMutant(
        "answered before the last page has landed",
        "server_ring.cc",
        "if (q.issued < q.limit || q.in_flight != 0) break;",
        "if (q.issued < q.limit || (q.in_flight != 0 && !MUTANT)) break;",
    ),
    NativeMutant(
        "requests in flight forgotten at a restart",
        "server_ring.cc",
        "const std::uint32_t behind = unanswered(*view_.control);",
        "const std::uint32_t behind = MUTANT ? 0u : unanswered(*view_.control);",
    ),
    NativeMutant(
        "directory not emptied after a failure",
        "twin.cc",
        "if (misses[i].slot != kNoSlot)\n            cache_->empty",
        "if (misses[i].slot != kNoSlot && !MUTANT)\n            cache_->empty",
    ),
    NativeMutant(
        "arena page reused before it is retired",
        "channel.cc",
        "return cursor_ + count - released_.load(std::memory_order_acquire) <= ring_.arena_pages;",
        """if (MUTANT) return true;
    return cursor_ + count - released_.load(std::memory_order_acquire) <= ring_.arena_pages;""",
    ),
    NativeMutant(
        "cache slot taken before it is gathered",
        "row_cache.cc",
        "return stamp_difference(stamp_of(word), retired) <= 0;",
        "return MUTANT || stamp_difference(stamp_of(word), retired) <= 0;",
    ),
    NativeMutant(
        "extents of another image",
        "pump_control.cc",
        "table->map = ExtentMap(spec.extents);",
        "table->map = ExtentMap(MUTANT && !tables_.empty() ? first_extents_ : spec.extents);\n"
        "    if (tables_.empty()) first_extents_ = spec.extents;",
    ),
    NativeMutant(
        "channel of a client that left still mapped",
        "pump_control.cc",
        "if (base != nullptr) munmap(base, map_bytes);",
        "if (base != nullptr && !MUTANT) munmap(base, map_bytes);",
    ),
    NativeMutant(
        "memory of rings not given back",
        "pump_control.cc",
        "    ~ServedChannel() {\n",
        "    ~ServedChannel() {\n        if (MUTANT)\n"
        "            for (auto& ring : rings) (void)ring.release();\n",
    ),
)
# What the mutants above need besides.
SUPPORT = (
    (
        "pump.h",
        "    std::uint32_t next_table_ = 0;\n",
        "    std::uint32_t next_table_ = 0;\n    std::vector<ExtentRow> first_extents_;\n",
    ),
    (
        "bind_sim.cc",
        "void bind_sim(nb::module_& m) {\n",
        """void bind_sim(nb::module_& m) {
    m.def("set_mutant", [](int number) { active_mutant = number; });
""",
    ),
)


def write_sources() -> None:
    """Copy the core's sources and plant every mutant; unchanged files keep their time."""
    target = BUILD / "source"
    target.mkdir(parents=True, exist_ok=True)
    files = {name: (ROOT / CORE / name).read_text() for name in _source_names()}
    for name, text, replacement in SUPPORT:
        files[name] = _planted(name, files[name], text, replacement)
    for number, mutant in enumerate(NATIVE_MUTANTS, 1):
        bug = mutant.bug.replace("MUTANT", f"mutant({number})")
        files[mutant.file] = _planted(mutant.name, files[mutant.file], mutant.text, bug)
    files["mutants.h"] = HEADER
    for name, text in files.items():
        _write_if_new(target / CORE / name, text)
    # Found bugs are the same at -O1, which compiles in half the time.
    cmake = (ROOT / "CMakeLists.txt").read_text().replace("-O3", "-O1")
    _write_if_new(target / "CMakeLists.txt", cmake)


def _source_names() -> list[str]:
    return sorted(p.name for p in (ROOT / CORE).iterdir() if p.suffix in {".cc", ".h"})


def _planted(what: str, source: str, text: str, replacement: str) -> str:
    if source.count(text) != 1:
        raise SystemExit(f"mutant {what!r}: its text is there {source.count(text)} times, not once")
    return source.replace(text, replacement)


def _write_if_new(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def build() -> Path:
    """Build the core with its mutants; returns the extension module."""
    write_sources()
    header = BUILD / "source" / CORE / "mutants.h"
    configure = [
        "cmake", "-S", str(BUILD / "source"), "-B", str(BUILD / "out"), "-G", "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_FLAGS=-include {header}",
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", str(BUILD / "out")]):
        command[0] = _tool("cmake")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return next((BUILD / "out").glob("_native*.so"))


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else (shutil.which(name) or name)


def load(number: int) -> Any:
    """Load the built core in place of the one that ships, with one mutant on.

    Call before anything imports tierd.io._core.
    """
    name = "tierd.io._core._native"
    assert name not in sys.modules, "the core is loaded already"
    spec = importlib.util.spec_from_file_location(name, next((BUILD / "out").glob("_native*.so")))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    module.set_mutant(number)
    return module


if __name__ == "__main__":
    print(build())

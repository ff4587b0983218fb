"""The tree's own rules: import direction, sizes, dead files, words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierd.cli import groups

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "tierd").rglob("*.py"))
NATIVE = [p for p in sorted((ROOT / "tierd/io/_core").iterdir()) if p.suffix in {".h", ".cc"}]
SOURCES = MODULES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "bench").rglob("*.py"))

# room -> the rooms it may import (besides itself). tierd/x.py is the room "x".
ALLOWED = {
    "types": set(),
    "errors": set(),
    "io": {"types", "errors"},
    "gpu": {"io", "types", "errors"},
    "kv": {"io", "types", "errors"},
    "hook": {"gpu", "kv", "io", "types", "errors"},
    # Pure: numpy beside plain data, because a decision weighs hundreds of splits in a millisecond.
    "controller": {"types"},
    "config": {"types", "errors"},
    "log": {"config", "errors"},
    "catalog": {"types", "errors"},
    "daemon": {"controller", "io", "config", "catalog", "log", "types", "errors"},
    "api": {"daemon", "controller", "io", "config", "catalog", "types", "errors"},
    "tools": {"daemon", "controller", "config", "gpu", "hook", "io", "types", "errors"},
    "cli": {
        *{"api", "daemon", "tools", "catalog", "config", "log"},
        *{"io", "gpu", "controller", "types", "errors"},
    },
}
# What may be imported from outside by the rooms that run inside an engine.
IN_ENGINE = {"io", "gpu", "hook", "kv"}
ENGINE_PACKAGES = {"numpy", "torch", "triton", "transformers", "tierd"}
# An adapter of several modules may import its engine, and what the engine always brings.
ADAPTER_PACKAGES = {"hook/sglang": {"sglang"}, "hook/vllm": {"vllm"}, "hook": {"huggingface_hub"}}


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "tierd").with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_room_is_known() -> None:
    rooms = {room_of(p) for p in MODULES} - {"__init__"}
    assert rooms <= set(ALLOWED), "name the new room and what it may import"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    ours = {n.split(".")[1] for n in imports_of(path) if n.startswith("tierd.")}
    ours -= {"__version__"}
    assert ours - ALLOWED[room] - {room} == set()


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if room_of(p) in IN_ENGINE],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_engine_side_needs_nothing_else(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    own = ADAPTER_PACKAGES.get(path.parent.relative_to(ROOT / "tierd").as_posix(), set())
    assert tops - set(sys.stdlib_module_names) - ENGINE_PACKAGES - own - {"__future__"} == set()


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if room_of(p) == "controller"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_controller_has_no_clock_and_no_files(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert tops <= {
        "__future__",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "typing",
        "collections",
        "numpy",
        "tierd",
    }


def functions_of(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600
    assert [f for f in functions_of(path) if f[1] > 60] == []


def test_native_sizes() -> None:
    long_files = [p.name for p in NATIVE if len(p.read_text().splitlines()) > 600]
    wide_lines = [
        f"{p.name}:{number}"
        for p in NATIVE
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if len(line) > 110
    ]
    assert long_files == []
    assert wide_lines == []


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_word_of_the_workshop_in_the_tree() -> None:
    banned = re.compile(r"\.\./shared|/work/|TODO|FIXME|XXX:|noqa: ALL")
    bad = []
    for path in tracked():
        if path == Path(__file__).resolve() or path.suffix in {".json", ".safetensors", ".png"}:
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if banned.search(line):
                bad.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert bad == []


def test_every_module_is_used() -> None:
    """A module that nothing imports, and that is no entry point, is dead."""
    entry_points = {
        *("tierd.cli.__main__", "tierd.hook.site.sitecustomize", "tierd.tools.demo_generate"),
        *(f"tierd.cli.{module}" for module, _ in groups.COMMANDS.values()),
    }
    everything = "\n".join(
        p.read_text(errors="ignore") for p in tracked() if p.suffix in {".py", ".toml", ""}
    )
    dead = []
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        package, _, leaf = name.rpartition(".")
        used = name in entry_points or re.search(
            rf"{re.escape(name)}\b|from {re.escape(package)} import [^)]*?\b{leaf}\b", everything
        )
        if not used:
            dead.append(name)
    assert dead == []

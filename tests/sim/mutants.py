"""Planted bugs, and how many seeds the simulator needs to find each.

    python -m tests.sim.mutants                  all of them, each in a process of its own
    python -m tests.sim.mutants --run NAME       one, and print what found it

Those of the storage code are planted by replacing a function; those of the core are in a build of
their own (native_mutants.py). None of them is in what ships.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.sim.native_mutants import NATIVE_MUTANTS, ROOT, build, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEEDS_MAX = 200
TIMEOUT_S = 600


# --- storage code, imported late: the core must not be loaded before a native mutant is ----------


@contextlib.contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    from tests.sim.seams import replaced

    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(replaced(owner, name, value))
        yield


def no_flush_at_all() -> Any:
    from tierd.io.simulated import SimulatedDevice

    return _patched((SimulatedDevice, "flush", lambda _: None))


def no_flush_before_the_root() -> Any:
    from tierd.io import superblock

    def store(device: Any, root: Any, data: bytes) -> None:
        device.write(root.table_offset, _padded(data))
        device.write(superblock.ROOT_OFFSETS[root.slot], root.pack())
        device.flush()

    return _patched((superblock, "store", store))


def root_before_table() -> Any:
    from tierd.io import superblock

    def store(device: Any, root: Any, data: bytes) -> None:
        for offset, part in (
            (superblock.ROOT_OFFSETS[root.slot], root.pack()),
            (root.table_offset, _padded(data)),
        ):
            device.write(offset, part)
            device.flush()

    return _patched((superblock, "store", store))


def both_roots_at_once() -> Any:
    from tierd.io import superblock

    def store(device: Any, root: Any, data: bytes) -> None:
        device.write(root.table_offset, _padded(data))
        device.flush()
        for slot in (0, 1):
            both = dataclasses.replace(root, slot=slot)
            device.write(superblock.ROOT_OFFSETS[slot], both.pack())
        device.flush()

    return _patched((superblock, "store", store))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4096)


def oldest_root_chosen() -> Any:
    from tierd.io import superblock

    def backwards(items: Any, key: Any = None) -> list[Any]:
        found = sorted(items, key=key)
        return found[::-1] if found and isinstance(found[0], superblock.Root) else found

    superblock.sorted = sorted  # type: ignore[attr-defined]
    return _patched((superblock, "sorted", backwards))


def one_root_slot() -> Any:
    from tierd.io import store

    change = store.dataclasses.replace

    def replace(item: Any, **changes: Any) -> Any:
        if "slot" in changes:
            changes["slot"] = item.slot
        return change(item, **changes)

    import types

    shim = types.SimpleNamespace(**vars(store.dataclasses))
    shim.replace = replace
    return _patched((store, "dataclasses", shim))


def table_crc_unchecked() -> Any:
    from tierd.io import superblock

    unpack = superblock.Root.unpack.__func__  # type: ignore[attr-defined]

    class Anything(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    def trusting(cls: Any, data: bytes, slot: int) -> Any:
        found = unpack(cls, data, slot)
        if isinstance(found, str):
            return found
        return dataclasses.replace(found, table_crc=Anything(found.table_crc))

    return _patched((superblock.Root, "unpack", classmethod(trusting)))


def roots_looked_at_once() -> Any:
    from tierd.io import superblock

    return _patched((superblock, "_READS", 1), (superblock, "_LOOKS", 1))


def commit_not_read_back() -> Any:
    from tierd.io import superblock

    def write(device: Any, offset: int, data: Any) -> None:
        device.write(offset, data)
        device.flush()

    return _patched((superblock, "_write_surely", write))


def no_flush_at_open() -> Any:
    from tierd.io.store import Store

    original = Store._open.__func__  # type: ignore[attr-defined]

    def opened(cls: Any, device: Any) -> Any:
        device.flush = lambda: None
        try:
            return original(cls, device)
        finally:
            del device.flush

    return _patched((Store, "_open", classmethod(opened)))


def commit_before_the_data() -> Any:
    from tierd.io import staging
    from tierd.io.store import Store

    late: list[tuple[int, bytes]] = []
    write_pages, commit = staging._Stager._write, Store.commit_image

    def put_off(self: Any, *arguments: Any) -> str:
        device = self._store.device
        device.write = lambda offset, data: late.append((offset, bytes(data)))
        try:
            return write_pages(self, *arguments)
        finally:
            del device.write

    def commit_first(self: Any, *arguments: Any) -> Any:
        image = commit(self, *arguments)
        for offset, data in late:
            self.device.write(offset, data)
        late.clear()
        self.device.flush()
        return image

    return _patched(
        (staging._Stager, "_write", put_off),
        (staging._Stager, "_read_back", lambda *_: None),
        (Store, "commit_image", commit_first),
    )


def generation_not_bumped() -> Any:
    from tierd.io.store import Store

    original = Store._next_identity

    def same(self: Any, name: str) -> Any:
        return self._table.identities.get(name) or original(self, name)

    return _patched((Store, "_next_identity", same))


def extents_dropped_before_the_commit() -> Any:
    from tierd.io.store import Store

    original = Store.delete_image

    def delete(self: Any, name: str, **options: Any) -> None:
        image = self.image(name)
        if not self._is_leased(image.extents):
            self._discard(image.extents)
        original(self, name, **options)

    return _patched((Store, "delete_image", delete))


def leases_ignored() -> Any:
    from tierd.io.simulated import SimulatedDevice

    return _patched((SimulatedDevice, "leased_ranges", lambda *_: []))


def pages_reused_early() -> Any:
    from tierd.io import layout, store

    def free(areas: Any, used: Any) -> Any:
        used = sorted(used)  # the last extent is taken for free
        return layout.free_ranges(areas, used[:-1])

    return _patched((store, "free_ranges", free))


def extents_never_released() -> Any:
    from tierd.io.store import Store

    return _patched((Store, "release", lambda *_: None))


def second_writer_let_in() -> Any:
    import os

    from tierd.io import simulated

    def open_shared(path: str, *_: Any) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    return _patched((simulated, "open_exclusive", open_shared))


def verification_without_crc() -> Any:
    import types

    from tierd.io import _core, walker

    def check(*arguments: Any) -> int:
        *head, _, tags, found = arguments
        return int(_core.check_pages(*head, False, tags, found))

    shim = types.SimpleNamespace(**{n: getattr(_core, n) for n in dir(_core)})
    shim.check_pages = check
    return _patched((walker, "_core", shim))


PYTHON_MUTANTS: tuple[Callable[[], Any], ...] = (
    no_flush_at_all,
    no_flush_before_the_root,
    root_before_table,
    both_roots_at_once,
    oldest_root_chosen,
    one_root_slot,
    table_crc_unchecked,
    roots_looked_at_once,
    commit_not_read_back,
    no_flush_at_open,
    commit_before_the_data,
    generation_not_bumped,
    extents_dropped_before_the_commit,
    leases_ignored,
    pages_reused_early,
    extents_never_released,
    second_writer_let_in,
    verification_without_crc,
)


def names() -> list[str]:
    """Every mutant."""
    python = [mutant.__name__.replace("_", " ") for mutant in PYTHON_MUTANTS]
    return python + [mutant.name for mutant in NATIVE_MUTANTS]


def run_one(name: str, seeds: int) -> dict[str, Any]:
    """Plant one bug in this process and run seeds until one fails."""
    planted: Any = contextlib.nullcontext()
    native = [mutant.name for mutant in NATIVE_MUTANTS]
    if name in native:
        load(native.index(name) + 1)
    else:
        by_name = {mutant.__name__.replace("_", " "): mutant for mutant in PYTHON_MUTANTS}
        planted = by_name[name]()
    from tests.sim.runner import run_seed

    with planted:
        for seed in range(seeds):
            outcome = run_seed(seed)
            if outcome.kind:
                return {"name": name, "seeds": seed + 1, "text": outcome.text[-300:]}
    return {"name": name, "seeds": None, "text": "not found"}


def run_all(chosen: Sequence[str], *, seeds: int = SEEDS_MAX, jobs: int = 2) -> Iterator[Any]:
    """Run each mutant in a process of its own; yields what :func:`run_one` returned, in order."""
    build()

    def run(name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.sim.mutants", "--run", name, "--seeds", str(seeds)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "seeds": None, "text": f"no answer in {TIMEOUT_S} s"}
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            return {"name": name, "seeds": None, "text": done.stderr[-300:]}
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run, chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; the exit status is 1 if a mutant lives."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants")
    parser.add_argument("--run", metavar="NAME", help="this one, in this process; prints JSON")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="at most so many for each")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    if options.run:
        print(json.dumps(run_one(options.run, options.seeds)))
        return 0
    started = time.monotonic()
    alive = 0
    for answer in run_all(names(), seeds=options.seeds, jobs=options.jobs):
        found = answer["seeds"]
        alive += found is None
        what = answer["text"].strip().splitlines()[-1][:70] if answer["text"].strip() else ""
        print(f"{answer['name']:<44}{found or 'LIVES':>6}  {what}", flush=True)
    print(f"{len(names())} mutants, {alive} live, {time.monotonic() - started:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())

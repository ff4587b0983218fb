"""Staging: what is on the device afterwards, and what is not when it was stopped on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tierd.errors import (
    CheckpointError,
    DeviceBusyError,
    DeviceError,
    DeviceTooSmallError,
    ImageError,
    PayloadError,
    VerifyError,
)
from tierd.io import pipeline, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.formatting import write_empty
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from tests.checkpoints import TinyCheckpoint
from tests.memory_device import MemoryDevice, after_power_cut

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path):
    with Store.format(tmp_path / "device", size=64 * MIB) as made:
        yield made


@pytest.fixture
def memory_path(tmp_path: Path):
    """A directory in memory where there is one: a killed process needs no slow disk."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def run(store: Store, made: TinyCheckpoint, *, tensors=(), model: str = "m", **options):
    with Checkpoint.open(made.path) as checkpoint:
        specs = find_tables(checkpoint, tensors=tensors)
        return stage(store, checkpoint, specs, model=model, **options)


def stored_rows(store: Store, name: str) -> np.ndarray:
    """An image's rows, taken out of its pages by the format's description, not by the core."""
    image = store.image(name)
    row_bytes = image.info.table.row_bytes
    stride = (row_bytes + 3) // 4 * 4
    per_page = (4096 - 32) // (stride + 4)
    assert per_page == image.info.rows_per_page
    rows = []
    for extent in image.extents:
        for index in range(extent.pages):
            page = store.device.read((extent.device_page + index) * 4096, 4096)
            number = extent.first_page + index
            magic, version, count, image_id, page_number, generation, _ = struct.unpack(
                "<IHHQQII", page[-32:]
            )
            assert (magic, version, page_number) == (0x50445254, 1, number)
            assert (image_id, generation) == (image.info.image_id, image.info.generation)
            last = number == image.info.pages - 1
            assert count == (image.info.table.rows - number * per_page if last else per_page)
            flat = np.frombuffer(page[: count * stride], np.uint8).reshape(count, stride)
            rows.append(flat[:, :row_bytes])
    return np.concatenate(rows)


def require_stored(store: Store, made: TinyCheckpoint, model: str = "m") -> None:
    for table, rows in made.tables.items():
        assert np.array_equal(stored_rows(store, f"{model}/{table}"), rows), table


# --- what is there afterwards ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (checkpoints.engram, {}),
        (checkpoints.engram, {"rows": 15 * 1024 * 2 + 7, "layers": (1,), "shards": 1}),
        (checkpoints.engram, {"rows": 1}),
        (checkpoints.ple, {"shards": 1}),
        (checkpoints.ple, {"scale": 0.5}),
        (checkpoints.per_layer, {}),
    ],
)
def test_every_row_is_on_the_device(store: Store, tmp_path: Path, write, options) -> None:
    made = write(tmp_path / "checkpoint", **options)
    results = run(store, made)
    assert [result.info.name for result in results] == [f"m/{name}" for name in made.tables]
    assert all(r.written_bytes == r.info.pages * PAGE_BYTES for r in results)
    require_stored(store, made)
    store.close()
    with Store.open(tmp_path / "device") as again:
        assert [image.info for image in again.images] == sorted(
            (result.info for result in results), key=lambda info: info.name
        )
        require_stored(again, made)


@pytest.mark.parametrize("row_bytes", [1, 3, 5, 64, 2048, 4060])
def test_rows_of_any_size(store: Store, tmp_path: Path, row_bytes: int) -> None:
    made = checkpoints.plain(tmp_path / "c", dtype="U8", item_bytes=1, row_bytes=row_bytes)
    run(store, made, tensors=["model.layers.3.lookup.weight"])
    require_stored(store, made)


def test_a_fragmented_device(store: Store, tmp_path: Path) -> None:
    small = checkpoints.plain(tmp_path / "small")
    names = ["model.layers.3.lookup.weight"]
    for index in range(store.free_pages // 512):
        run(store, small, tensors=names, model=f"m{index}", sample=0)
    for image in sorted(store.images, key=lambda image: image.extents[0].device_page)[::2]:
        store.delete_image(image.name)
    made = checkpoints.engram(tmp_path / "large", layers=(1,), rows=15 * 512 * 5 + 100)
    run(store, made)
    assert len(store.image("m/layers.1.engram").extents) == 6
    require_stored(store, made)


def test_the_manifest(store: Store, tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c", layers=(1,), rows=15 * 1024 + 5)
    (result,) = run(store, made, model="deepseek-ai/DeepSeek-V4.1")
    info = result.info
    assert info.name == "deepseek-ai/DeepSeek-V4.1/layers.1.engram"
    assert (info.rows_per_page, info.pages, info.generation) == (15, 1025, 1)
    assert info.table.rows == 15 * 1024 + 5
    # The digest is of the rows alone, by whole blocks of 1,024 pages.
    rows = made.tables["layers.1.engram"].tobytes()
    cut = 15 * 1024 * 264
    blocks = [hashlib.sha256(rows[:cut]).digest(), hashlib.sha256(rows[cut:]).digest()]
    assert info.digest == hashlib.sha256(b"".join(blocks)).hexdigest()
    assert info.digest_kind == "sha256 of sha256 of 1024-page blocks"


def test_progress_counts_bytes_over_all_tables(store: Store, tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c", rows=15 * 1024 * 2)
    calls: list[tuple[int, int]] = []
    run(store, made, progress=lambda done, total: calls.append((done, total)))
    total = 4 * 1024 * PAGE_BYTES
    assert calls == [(total * step // 4, total) for step in (1, 2, 3, 4)]


# --- the same again, and another ------------------------------------------------------------------


def test_the_same_again_writes_nothing(store: Store, tmp_path: Path, monkeypatch) -> None:
    made = checkpoints.engram(tmp_path / "c")
    first = run(store, made)
    sequence, images = store.sequence, store.images

    def refuse(*_: object) -> None:
        raise AssertionError("written to")

    monkeypatch.setattr(Device, "write", refuse)
    other_files = checkpoints.engram(tmp_path / "other", shards=1)
    for again in (run(store, made), run(store, other_files)):
        assert [result.written_bytes for result in again] == [0, 0]
        assert [result.info for result in again] == [result.info for result in first]
    assert (store.sequence, store.images) == (sequence, images)


def test_only_the_missing_table_is_written(store: Store, tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c")
    run(store, made)
    store.delete_image("m/layers.14.engram")
    results = run(store, made)
    assert [result.written_bytes > 0 for result in results] == [False, True]
    assert [result.info.generation for result in results] == [1, 3]
    require_stored(store, made)


def test_another_checkpoint_replaces_the_image(store: Store, tmp_path: Path) -> None:
    old = run(store, checkpoints.engram(tmp_path / "old", seed=1))
    free = store.free_pages
    made = checkpoints.engram(tmp_path / "new", seed=2)
    new = run(store, made)
    assert [r.info.image_id for r in new] == [r.info.image_id for r in old]
    assert [r.info.generation for r in new] == [2, 2]
    assert store.free_pages == free
    require_stored(store, made)
    other_name = run(store, made, model="n")
    assert all(result.written_bytes for result in other_name)
    assert len(store.images) == 4


def test_a_reader_of_the_old_generation_keeps_its_pages(store: Store, tmp_path: Path) -> None:
    old = checkpoints.engram(tmp_path / "old", seed=1, layers=(1,))
    run(store, old)
    image = store.image("m/layers.1.engram")
    fd = store.reader_fd([image])
    before = store.device.read(image.extents[0].device_page * 4096, image.info.pages * 4096)
    run(store, checkpoints.engram(tmp_path / "new", seed=2, layers=(1,)))
    run(store, checkpoints.engram(tmp_path / "newer", seed=3, layers=(1,)))
    after = store.device.read(image.extents[0].device_page * 4096, image.info.pages * 4096)
    assert before == after
    os.close(fd)


# --- what is refused ------------------------------------------------------------------------------


def test_too_small_a_device_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c", rows=15 * 700)
    with Store.format(tmp_path / "device", size=5 * MIB) as store:
        before = (tmp_path / "device").read_bytes()
        words = rf"has {2 * MIB} bytes free, the tables need {8 * MIB} \({6 * MIB} more\)"
        with pytest.raises(DeviceTooSmallError, match=words):
            run(store, made)
        assert (tmp_path / "device").read_bytes() == before
        assert store.free_pages == 512


def test_the_room_that_is_missing_is_that_of_all_tables(tmp_path: Path) -> None:
    made = checkpoints.per_layer(tmp_path / "c", layers=6)
    with Store.format(tmp_path / "device", size=8 * MIB) as store:  # three units of 2 MiB
        words = rf"has {6 * MIB} bytes free, the tables need {12 * MIB} \({6 * MIB} more\)"
        with pytest.raises(DeviceTooSmallError, match=words):
            run(store, made)


def test_replacing_needs_room_for_one_table_at_a_time(tmp_path: Path) -> None:
    with Store.format(tmp_path / "device", size=8 * MIB) as store:  # three units of 2 MiB
        run(store, checkpoints.engram(tmp_path / "old", seed=1))
        made = checkpoints.engram(tmp_path / "new", seed=2)
        fd = store.reader_fd([store.image("m/layers.1.engram")])
        with pytest.raises(DeviceTooSmallError):  # what is attached frees nothing
            run(store, made)
        os.close(fd)
        run(store, made)
        require_stored(store, made)


def test_a_forbidden_value_leaves_nothing_behind(store: Store, tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c", rows=15 * 1024 * 3)
    name = "layers.14.engram.embed.weight"
    dtype, shape, data = made.tensors[name]
    bad = bytearray(data)
    bad[-1] = 0xFF
    checkpoints.write_checkpoint(made.path, made.tensors | {name: (dtype, shape, bytes(bad))})
    free = store.free_pages
    with pytest.raises(
        PayloadError, match=f"{name} holds the NaN payload 0xff in row 46079, byte 255"
    ):
        run(store, made)
    assert [image.name for image in store.images] == ["m/layers.1.engram"]
    assert store.free_pages == free - 3 * 1024
    checkpoints.write_checkpoint(made.path, made.tensors)
    assert [r.written_bytes > 0 for r in run(store, made)] == [False, True]
    require_stored(store, made)


@pytest.mark.parametrize("model", ["", "/", "a//b", "../x", "a b", "x" * 201, "é", "a/"])
def test_model_names(store: Store, tmp_path: Path, model: str) -> None:
    made = checkpoints.plain(tmp_path / "c")
    with pytest.raises(ImageError, match="cannot be used"):
        run(store, made, tensors=["model.layers.3.lookup.weight"], model=model)


def test_a_checkpoint_that_changes_meanwhile(store: Store, tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c", layers=(1,), shards=1)
    shard = made.shards[0]

    def touch(done: int, total: int) -> None:
        os.utime(shard, ns=(1, 1))

    with pytest.raises(CheckpointError, match="was changed while it was read"):
        run(store, made, progress=touch)
    assert store.images == []
    assert store.free_pages == store.capacity_pages


def test_a_lost_write_is_noticed_before_the_commit(
    store: Store, tmp_path: Path, monkeypatch
) -> None:
    made = checkpoints.engram(tmp_path / "c", layers=(1,))
    write = Device.write

    def lose_data(self, offset: int, data) -> None:
        if offset < 2 * MIB:
            write(self, offset, data)

    monkeypatch.setattr(Device, "write", lose_data)
    with pytest.raises(VerifyError, match="no page of tierd's there"):
        run(store, made)
    assert store.images == []


@pytest.mark.parametrize("where", ["write", "flush", "commit"])
def test_a_device_that_fails(store: Store, tmp_path: Path, monkeypatch, where: str) -> None:
    made = checkpoints.engram(tmp_path / "c", layers=(1,), rows=15 * 1024 * 4)
    write, flush = Device.write, Device.flush
    roots = []

    def failing_write(self, offset: int, data) -> None:
        roots.append(offset in (0, 64 << 10))
        if (where == "write" and offset == 2 * MIB + 8 * MIB) or (
            where == "commit" and sum(roots) == 2 and roots[-1]
        ):
            raise DeviceError("device: write failed")
        write(self, offset, data)

    def failing_flush(self) -> None:
        if where == "flush" and any(not root for root in roots[2:]):
            raise DeviceError("device: flush failed")
        flush(self)

    monkeypatch.setattr(Device, "write", failing_write)
    monkeypatch.setattr(Device, "flush", failing_flush)
    with pytest.raises(DeviceError, match="failed"):
        run(store, made)
    monkeypatch.undo()
    assert store.images == []
    store.close()
    with Store.open(tmp_path / "device") as again:
        assert again.images == []
        assert again.free_pages == again.capacity_pages
        run(again, made)
        require_stored(again, made)


def test_an_interrupt_in_the_callers_progress(store: Store, tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "c", layers=(1,), rows=15 * 1024 * 6)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, made, progress=stop)
    assert store.images == []
    assert store.free_pages == store.capacity_pages
    run(store, made)
    require_stored(store, made)


# --- threads --------------------------------------------------------------------------------------


def test_results_come_in_order_and_a_state_serves_one_call_at_a_time() -> None:
    class State:
        busy = False

        def work(self, item: int) -> int:
            assert not self.busy
            self.busy = True
            total = sum(range(random.Random(item).randrange(20000)))
            self.busy = False
            return item if total >= 0 else -1

    states = [State() for _ in range(4)]
    assert list(pipeline.in_order(State.work, states, range(200))) == list(range(200))


def test_an_error_comes_where_its_result_would_and_stops_the_rest() -> None:
    done = []

    def work(state: None, item: int) -> int:
        if item == 5:
            raise ValueError("five")
        done.append(item)
        return item

    results = pipeline.in_order(work, [None, None], range(1000))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)
    assert max(done) < 20


# --- killed ---------------------------------------------------------------------------------------

# Stages once per line of input ("CALL NUMBER"): a fork counts its calls of that kind and kills
# itself right before the one of that number. Answers with how the fork ended.
KILLED_AT = """
import os, signal, sys
from tierd.io.checkpoint import Checkpoint
from tierd.io.device import Device
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

device, checkpoint = sys.argv[1:]
for line in sys.stdin:
    name, number = line.split()
    child = os.fork()
    if child == 0:
        original, calls = getattr(Device, name), []
        def counted(self, *arguments):
            calls.append(1)
            if len(calls) == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments)
        setattr(Device, name, counted)
        with Checkpoint.open(checkpoint) as source, Store.open(device) as store:
            stage(store, source, find_tables(source), model="m", sample=2)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def require_absent_or_complete(device: Path, made: TinyCheckpoint, others: int = 0) -> int:
    """Open after a death: what is there is whole; return how many of the tables are."""
    with Store.open(device) as store:
        assert store.note == ""
        present = [image for image in store.images if image.name.startswith("m/")]
        for image in present:
            assert walker.verify(store, image, full=True).ok
            assert np.array_equal(
                stored_rows(store, image.name), made.tables[image.info.table.name]
            )
        used = sum(-(-image.info.pages // 512) * 512 for image in store.images)
        assert store.free_pages == store.capacity_pages - used, "no half image holds room"
        return len(present)


def test_killed_before_any_write_or_flush_then_again(memory_path: Path) -> None:
    made = checkpoints.engram(memory_path / "c", rows=15 * 1100)
    device = memory_path / "device"
    command = [sys.executable, "-c", KILLED_AT, str(device), str(made.path)]
    generations = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        for name in ("write", "flush"):
            complete = []
            for number in range(1, 100):
                Store.format(device, size=20 * MIB, force=str(device)).close()
                process.stdin.write(f"{name} {number}\n")
                process.stdin.flush()
                ended = int(process.stdout.readline())
                complete.append(require_absent_or_complete(device, made))
                if ended == 0:
                    break
                assert ended == -signal.SIGKILL
                with Store.open(device) as store:  # then again
                    results = run(store, made, sample=2)
                    generations.append(results[-1].info.generation)
                    require_stored(store, made)
            assert complete[0] == 0
            assert complete[-1] == 2
            assert sorted(complete) == complete
        process.stdin.close()
    # Per table: an identity (table, root), two blocks, a commit (table, root); flushes likewise.
    assert set(generations) == {1, 2}, "an attempt that died has used its generation up"


def test_a_power_cut_anywhere_leaves_each_image_absent_or_complete(tmp_path: Path) -> None:
    device = MemoryDevice(bytes(12 * MIB))
    write_empty(device)
    store = Store._open(device)
    old = checkpoints.engram(tmp_path / "old", layers=(1,), rows=15 * 200, seed=1)
    made = checkpoints.engram(tmp_path / "new", layers=(1, 14), rows=15 * 300, seed=2)
    run(store, old, sample=0)
    start = bytes(device.medium)
    device.log.clear()
    run(store, made, sample=0)
    rng = random.Random(3)
    seen = set()
    for stop in range(len(device.log) + 1):
        for _ in range(3):
            found = Store._open(MemoryDevice(after_power_cut(start, device.log, stop, rng)))
            for image in found.images:
                assert walker.verify(found, image, full=True, sample=0).ok
                rows = (made, old)[image.info.generation == 1 and image.info.table.layer == 1]
                assert np.array_equal(
                    stored_rows(found, image.name), rows.tables[image.info.table.name]
                )
            seen.add(tuple((image.name, image.info.generation) for image in found.images))
    one, two = "m/layers.1.engram", "m/layers.14.engram"
    assert seen == {((one, 1),), ((one, 2),), ((one, 2), (two, 1))}


def test_killed_at_random_from_outside_then_again(memory_path: Path) -> None:
    made = checkpoints.engram(memory_path / "c", rows=15 * 1024 * 3)
    old = checkpoints.engram(memory_path / "old", rows=600, seed=5)
    device = memory_path / "device"
    with Store.format(device, size=40 * MIB) as store:
        run(store, old, model="keep")
    script = (
        "import sys\n"
        "from tierd.io.checkpoint import Checkpoint\n"
        "from tierd.io.staging import stage\n"
        "from tierd.io.store import Store\n"
        "from tierd.io.tables import find_tables\n"
        "with Checkpoint.open(sys.argv[2]) as c, Store.open(sys.argv[1]) as s:\n"
        "    stage(s, c, find_tables(c), model='m', progress=lambda *a: print(a, flush=True))\n"
    )
    rng = random.Random(11)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(device), str(made.path)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        ) as process:
            for _ in range(rng.randrange(1, 7)):  # six blocks in all
                process.stdout.readline()
            process.kill()
        require_absent_or_complete(device, made)
        with Store.open(device) as store:
            require_stored(store, old, model="keep")
            for image in store.images:
                if image.name.startswith("m/"):
                    store.delete_image(image.name)
    with Store.open(device) as store:
        run(store, made)
        require_stored(store, made)


def test_a_second_stager_is_told_who_is_first(store: Store, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tierd.io.device.LOCK_RETRY_S", 0.0)
    made = checkpoints.plain(tmp_path / "c")

    def second(*_: object) -> None:
        with pytest.raises(DeviceBusyError, match=f"process {os.getpid()} "):
            Store.open(tmp_path / "device")

    assert run(store, made, tensors=["model.layers.3.lookup.weight"], progress=second)


def test_results_are_json_ready(store: Store, tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path / "c", scale=0.5)
    (result,) = run(store, made)
    again = type(result.info).from_json(json.loads(json.dumps(result.info.to_json())))
    assert again == result.info

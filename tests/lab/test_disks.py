"""Real block devices, whole and broken: staging, serving by a real daemon, scrub, refusals.

Every row that a client gets is compared with the oracle. Loop devices over tmpfs have sectors of
512 and of 4,096 bytes; those over :mod:`tests.lab.faultfs` fail where they are told to.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import checkpoints
from tests.daemons import Node, refused_start, running, tierd
from tests.lab import disks
from tests.oracle import EngramOracle, Shards
from tierd.errors import (
    DeviceDamagedError,
    DeviceDuplicateError,
    DeviceFailedError,
    DeviceForeignError,
    DeviceReadOnlyError,
    DeviceShrunkError,
    RowError,
    VerifyError,
)
from tierd.gpu.client import Client, list_images
from tierd.io import find_devices, walker
from tierd.io.checkpoint import Checkpoint
from tierd.io.layout import ROOT_OFFSETS
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.store_set import StoreSet
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WHY_NOT = disks.why_not()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

MIB = 1 << 20
SIZE = 12 * MIB
ROWS = 15 * 40
NAME = "v41/layers.1.engram"
WAIT_S = 20.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.TinyCheckpoint:
    return checkpoints.engram(tmp_path_factory.mktemp("lab") / "c", layers=(1,), rows=ROWS)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in tmpfs; tmp_path may lie on a disk."""
    folder = disks.MEMORY / f"tierd-lab-{tmp_path.name}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


@contextlib.contextmanager
def good_disk(memory: Path, *, name: str = "good", **options: Any) -> Iterator[str]:
    path = memory / name
    with path.open("xb") as file:
        file.truncate(SIZE)
    with disks.loop(path, **options) as device:
        yield device


def put(paths: Sequence[str], made: checkpoints.TinyCheckpoint) -> list[list[int]]:
    """Format and stage; return for each share the device pages it lies on, in order."""
    for path in paths:
        Store.format(path).close()
    with StoreSet.open(paths) as stores, Checkpoint.open(made.path) as source:
        stage(stores, source, find_tables(source), model="v41")
        return [
            [e.device_page + page for e in share.extents for page in range(e.pages)]
            for share in stores.image(NAME).shares
        ]


@contextlib.contextmanager
def serving(folder: Path, paths: Sequence[str], **environ: str) -> Iterator[Node]:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    node = Node(run, Path(paths[0]), {})
    words = [word for path in paths[1:] for word in ("--device", path)]
    given = {"TIERD__IO__CRC_SAMPLE": "1", "TIERD__IO__SCRUB": "false", **environ}
    with running(node, *words, environ=given) as daemon:
        yield node
        assert daemon.stop() == 0


@contextlib.contextmanager
def attached(node: Node) -> Iterator[Client]:
    images = list_images(node.engine_socket)
    with Client.attach(
        node.engine_socket, images, engine="lab", cache_rows=64, rows_max=1024
    ) as client:
        yield client


def gather(client: Client, ids: np.ndarray) -> np.ndarray:
    out = np.zeros((ids.size, 256), np.uint16)
    client.table(NAME).gather(ids, out)
    return out


def rows_are_right(client: Client, made: checkpoints.TinyCheckpoint, ids: np.ndarray) -> bool:
    oracle = EngramOracle(Shards(made.path), 1)
    return np.array_equal(gather(client, ids), oracle.bf16(ids))


def status(node: Node) -> dict[str, Any]:
    shown = tierd("status", "--json", "--api-socket", node.api_socket)
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


EVERY = np.arange(ROWS)


# --- sectors, names, UUIDs ------------------------------------------------------------------------


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("kind", ["tmpfs", "fault file system"])
def test_stage_verify_and_serve(memory: Path, made, sector: int, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "tmpfs":
            path = stack.enter_context(good_disk(memory, sector=sector))
        else:
            path = stack.enter_context(disks.bad_disk(memory, SIZE, sector=sector)).path
        put([path], made)
        with Store.open(path, write=False) as store:
            assert store.device.block_size == sector
            assert store.device.is_block
            assert walker.verify(store, NAME, full=True).ok
        with serving(memory, [path]) as node, attached(node) as client:
            assert rows_are_right(client, made, EVERY)
            assert status(node)["devices"][0]["path"] == path


def test_devices_by_uuid_whatever_their_names(memory: Path, made) -> None:
    with good_disk(memory, name="one") as one, good_disk(memory, name="two") as two:
        put([one, two], made)
        named = [f"UUID={find_devices.uuid_of(path)}" for path in (one, two)]
        with serving(memory, named) as node, attached(node) as client:
            assert rows_are_right(client, made, EVERY)
        listed = json.loads(tierd("devices", "list", "--json").stdout)["devices"]
        assert {one, two} <= {line["path"] for line in listed}
    # The same disks under each other's names.
    with (
        disks.loop(memory / "two") as first,
        disks.loop(memory / "one") as second,
    ):
        assert [f"UUID={find_devices.uuid_of(path)}" for path in (second, first)] == named
        with serving(memory, named) as node, attached(node) as client:
            assert rows_are_right(client, made, EVERY)


def test_a_copied_disk_is_no_second_device(memory: Path, made) -> None:
    with good_disk(memory, name="one") as one:
        put([one], made)
        (memory / "copy").write_bytes((memory / "one").read_bytes())
        with disks.loop(memory / "copy") as copy:
            with pytest.raises(DeviceDuplicateError, match="one is a copy of the other"):
                find_devices.resolve(f"UUID={find_devices.uuid_of(one)}")
            with pytest.raises(DeviceDuplicateError, match=f"{one} and {copy}"):
                StoreSet.open([one, copy])


def test_a_uuid_that_no_disk_has_lists_those_there_are(memory: Path) -> None:
    with good_disk(memory) as path:
        Store.format(path).close()
        name = "UUID=00000000-1111-2222-3333-444444444444"
        text = refused_start(Node(memory, Path(path), {}), **{"devices.paths": [name]})
        assert f"{path} is {find_devices.uuid_of(path)}" in text


# --- what is refused ------------------------------------------------------------------------------


def test_a_foreign_file_system_and_a_mounted_one(memory: Path) -> None:
    with good_disk(memory) as path:
        subprocess.run(["mkfs.ext4", "-q", path], check=True)
        with pytest.raises(DeviceForeignError, match="an ext2/3/4 file system"):
            Store.format(path)
        with pytest.raises(DeviceForeignError, match="an ext2/3/4 file system"):
            Store.open(path)
        mount = memory / "mnt"
        mount.mkdir()
        subprocess.run(["mount", path, mount], check=True)
        try:
            refused = tierd("format", path, "--force", path, exit_code=1)
            assert f"it is mounted at {mount}" in refused.output
        finally:
            subprocess.run(["umount", mount], check=True)


@pytest.mark.parametrize(("mark", "offset", "name"), [
    (b"\x55\xaa", 510, "an MBR partition table"),
    (b"EFI PART", 512, "a GPT partition table"),
])  # fmt: skip
def test_a_foreign_partition_table(memory: Path, mark: bytes, offset: int, name: str) -> None:
    with (memory / "good").open("xb") as file:
        file.truncate(SIZE)
        file.seek(offset)
        file.write(mark)
    with disks.loop(memory / "good") as path, pytest.raises(DeviceForeignError, match=name):
        Store.format(path)


def test_a_read_only_disk(memory: Path, made) -> None:
    with good_disk(memory) as path:
        put([path], made)
    with disks.loop(memory / "good", options=("--read-only",)) as path:
        with pytest.raises(DeviceReadOnlyError, match="it is read-only; run: lsblk"):
            Store.open(path)
        with pytest.raises(DeviceReadOnlyError):
            Store.format(path, force=path)
        assert "read-only" in refused_start(Node(memory, Path(path), {}))
        with Store.open(path, write=False) as store:
            assert walker.verify(store, NAME, full=True).ok, "reading is not refused"


def test_a_disk_that_shrank(memory: Path, made) -> None:
    with good_disk(memory) as path:
        put([path], made)
    with (memory / "good").open("r+b") as file:
        file.truncate(SIZE - 4 * MIB)
    with disks.loop(memory / "good") as path:
        with pytest.raises(DeviceShrunkError, match=f"has {8 * MIB} bytes, but had {SIZE}"):
            Store.open(path)
        assert json.loads(tierd("devices", "inspect", path, "--json").stdout)["state"] == "shrunk"


def test_both_roots_on_bad_sectors(memory: Path, made) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        put([bad.path], made)
        bad.fail(eio={str(offset // 4096): -1 for offset in ROOT_OFFSETS})
        with pytest.raises(DeviceDamagedError, match="neither root can be used"):
            Store.open(bad.path)
        shown = json.loads(tierd("devices", "inspect", bad.path, "--json").stdout)
        assert shown["state"] == "damaged"
        assert shown["salvaged"]["images_named"] == [NAME]
        bad.fail()
        Store.open(bad.path).close()


# --- serving from a bad disk ----------------------------------------------------------------------


def test_an_error_once_costs_a_retry(memory: Path, made) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        (pages,) = put([bad.path], made)
        with serving(memory, [bad.path]) as node, attached(node) as client:
            bad.fail(eio={str(page): 1 for page in pages[3:8]})
            assert rows_are_right(client, made, EVERY)
            assert bad.fail()["eio"] >= 5
            assert not client.table(NAME).stats()["failed"]


@pytest.mark.parametrize("fault", ["eio", "corrupt"])
def test_a_page_that_stays_bad_fails_its_request_and_no_other(
    memory: Path, made, fault: str
) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        (pages,) = put([bad.path], made)
        with serving(memory, [bad.path]) as node, attached(node) as client:
            bad.fail(**{fault: {str(pages[7]): -1} if fault == "eio" else [pages[7]]})
            # Inverted, even the trailer is another page's.
            reason = "read_error" if fault == "eio" else "(wrong_page|bad_crc)"
            with pytest.raises(RowError, match=f"request failed: {reason}"):
                gather(client, np.arange(7 * 15, 8 * 15))
            others = EVERY[EVERY // 15 != 7]
            assert rows_are_right(client, made, others)
            assert bad.fail()[fault] >= 2
            assert rows_are_right(client, made, EVERY), "and it is tried again when it is mended"


def test_rot_that_the_sampled_crc_misses_is_caught_by_the_tags(memory: Path, made) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        (pages,) = put([bad.path], made)
        with bad.backing.open("r+b") as file:
            file.seek(pages[7] * 4096 + 5 * 264 + 11)
            file.write(b"\x3a\x5c")
        with (
            serving(memory, [bad.path], TIERD__IO__CRC_SAMPLE="0") as node,
            attached(node) as client,
        ):
            with pytest.raises(RowError):
                gather(client, np.arange(7 * 15, 8 * 15))
            assert rows_are_right(client, made, EVERY[EVERY // 15 != 7])


@pytest.mark.parametrize("fault", ["eio", "corrupt"])
def test_a_copy_on_another_disk_takes_over(memory: Path, made, fault: str) -> None:
    with disks.bad_disk(memory, SIZE) as bad, good_disk(memory) as good:
        (pages,) = put([bad.path], made)
        Store.format(good).close()
        tierd("images", "copy", NAME, "--device", bad.path, "--to", good)
        with serving(memory, [bad.path, good]) as node, attached(node) as client:
            bad.fail(**{fault: {str(p): -1 for p in pages} if fault == "eio" else pages})
            assert rows_are_right(client, made, EVERY)


def test_slow_pages_are_waited_for(memory: Path, made) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        (pages,) = put([bad.path], made)
        with serving(memory, [bad.path]) as node, attached(node) as client:
            bad.fail(slow={str(page): 300 for page in pages[::9]})
            assert rows_are_right(client, made, EVERY)
            assert bad.fail()["slow"] > 0


# --- staging and scrubbing a bad disk -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [("lose", VerifyError), ("corrupt", VerifyError), ("eio", VerifyError)],
)
def test_staging_on_a_bad_disk_leaves_no_image(memory: Path, made, fault: str, error) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        Store.format(bad.path).close()
        # The seventh page of the data area, where the image will lie.
        page = 2 * MIB // 4096 + 7
        bad.fail(**{fault: {str(page): -1} if fault == "eio" else [page]})
        with Checkpoint.open(made.path) as source, Store.open(bad.path) as store:
            with pytest.raises(error, match="page 7"):
                stage(store, source, find_tables(source), model="v41")
            assert store.images == []
            assert store.free_pages == store.capacity_pages
            bad.fail()
            stage(store, source, find_tables(source), model="v41")
            assert walker.verify(store, NAME, full=True).ok


def test_a_commit_that_the_disk_loses_is_an_error(memory: Path, made) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        put([bad.path], made)
        with Store.open(bad.path) as store:
            bad.fail(lose=[offset // 4096 for offset in ROOT_OFFSETS])
            with pytest.raises(DeviceFailedError, match="does not read back"):
                store.delete_image(NAME)
        bad.fail()
        with Store.open(bad.path) as store:
            assert walker.verify(store, NAME, full=True).ok


@pytest.mark.parametrize("fault", ["eio", "corrupt"])
def test_the_scrub_of_a_daemon_finds_it(memory: Path, made, fault: str) -> None:
    with disks.bad_disk(memory, SIZE) as bad:
        (pages,) = put([bad.path], made)
        bad.fail(**{fault: {str(pages[9]): -1} if fault == "eio" else [pages[9]]})
        with serving(memory, [bad.path], TIERD__IO__SCRUB="true") as node:
            found = _wait_for(node, lambda found: found["scrub"]["passes"])
            (damage,) = found["scrub"]["damaged"][NAME]
            assert damage.startswith("page 9: ")
            assert bad.path in damage
            shown = tierd("status", "--api-socket", node.api_socket).stdout
            assert f"damaged: {NAME}: page 9" in shown
        events = map(json.loads, node.log.read_text().splitlines())
        (event,) = [event for event in events if event["event"] == "damage found"]
        assert (event["image"], event["page"], event["device"]) == (NAME, 9, bad.path)


def _wait_for(node: Node, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Look at the status until it is so; bounded, and no measurement."""
    deadline = time.monotonic() + WAIT_S
    while not condition(found := status(node)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


# --- history --------------------------------------------------------------------------------------


def test_no_room_under_the_catalog(memory: Path, made, monkeypatch: pytest.MonkeyPatch) -> None:
    state = memory / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", state], check=True)
    # Sockets in one place and state in another: --dir would put both in one.
    monkeypatch.setattr("tests.daemons.serve_command", _serve_without_dir)
    try:
        with contextlib.suppress(OSError), (state / "fill").open("wb", buffering=0) as file:
            for _ in range(100):
                file.write(bytes(4096))
        with good_disk(memory) as path:
            put([path], made)
            given = {
                "TIERD__IO__SCRUB": "true",
                "TIERD__DAEMON__STATE_DIR": str(state),
                "TIERD__DAEMON__RUNTIME_DIR": str(memory / "run"),
            }
            with serving(memory, [path], **given) as node, attached(node) as client:
                assert rows_are_right(client, made, EVERY)
                found = _wait_for(
                    node,
                    lambda found: found["scrub"]["save_error"] and found["history"]["degraded"],
                )
                assert "No space left" in found["scrub"]["save_error"]
                assert "full" in found["history"]["degraded"]
    finally:
        subprocess.run(["umount", state], check=True)


def _serve_without_dir(node: Node, *options: object) -> list[str]:
    words = ["serve", "--json", "--device", node.device, *options]
    return [sys.executable, "-m", "tierd.cli", *map(str, words)]

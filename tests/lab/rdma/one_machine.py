"""Run by test_rdma.py inside one lab machine, whose rxe0 talks to itself."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.lab.rdma.objects import objects
from tests.unit.pump_rig import PAGE, Client, Image, Served
from tierd.errors import RdmaMissingError, RdmaPortError
from tierd.io import _core, verbs

Status = _core.protocol.Status


class Wire:
    """An export and links to it, in this process."""

    def __init__(self, image: Image) -> None:
        self.port = verbs.find_port()
        self.way = verbs.agree(self.port, self.port)
        self.context = verbs.open_context(self.port)
        self.memory = image.data.reshape(-1).copy()
        self.export = verbs.register(self.context, self.memory, piece_bytes=1 << 20)

    def link(self, queue_pairs: int = 2, timeout_s: float = 1.0):
        link = _core.VerbsLink(self.context, queue_pairs, 128, int(timeout_s * 1e9))
        responder = _core.VerbsResponder(self.context, queue_pairs)
        responder.connect(queue_pairs=link.names, **self.way.for_core())
        link.connect(queue_pairs=responder.names, **self.way.for_core())
        return link, responder


class Tiered:
    """A pump whose table lies at a peer first, and in a file."""

    def __init__(self, path: Path, *, disk: bool = True, hold_ms: int = 20_000) -> None:
        self.image = Image.make(700)
        self.served = Served(path, self.image, remote=True, remote_hold_ms=hold_ms)
        self.pump = self.served.pump
        self.device = self.pump.add_remote()
        whole = [[np.array([[0, self.image.pages, d, 0]], np.uint64)] for d in (self.device, 0)]
        self.table = self.pump.add_table(
            image_id=self.image.image_id,
            generation=1,
            row_bytes=264,
            rows=self.image.pages * 15,
            window_ns=1_000_000,
            extents=whole[0][0],
            copies=whole[1] if disk else [],
        )
        self.client = Client(self.served, 256, 1024, table=self.table)

    def reads(self) -> dict[int, tuple[int, int]]:
        """Device -> (reads, errors)."""
        found = self.pump.stats()["devices"]
        return {one["device"]: (one["reads"], one["errors"]) for one in found}


@pytest.fixture
def tiered(tmp_path: Path):
    made = Tiered(tmp_path / "image")
    yield made
    made.pump.stop()


EVERY = list(range(0, 700, 3))


def test_pages_come_by_rdma_and_nothing_else(tiered: Tiered) -> None:
    wire = Wire(tiered.image)
    link, _responder = wire.link(queue_pairs=3)
    out = np.zeros(16 * PAGE, np.uint8)
    places = wire.export.places
    assert len(places) == 3  # in pieces
    where = [(places[1][2] + n * PAGE, places[1][3]) for n in range(16)]
    assert link.probe(where, out) > 0
    assert np.array_equal(out.reshape(16, PAGE), tiered.image.data[256:272])
    tiered.client.read(EVERY)
    assert tiered.reads() == {0: (len(EVERY), 0)}  # away: from the disk, and no error
    assert tiered.pump.link_remote(link, {tiered.device: places})
    for _ in range(5):
        tiered.client.read(EVERY)
    assert tiered.reads()[0] == (len(EVERY), 0)
    assert tiered.reads()[tiered.device] == (5 * len(EVERY), 0)


def test_a_peer_that_goes_costs_one_deadline_and_comes_back(tiered: Tiered) -> None:
    wire = Wire(tiered.image)
    link, responder = wire.link(timeout_s=0.5)
    tiered.pump.link_remote(link, {tiered.device: wire.export.places})
    tiered.client.read(EVERY)
    responder.close()
    tiered.client.read(EVERY)  # compared: from the disk
    assert not link.up
    assert "remote.timeout_us" in link.failure or "gone" in link.failure
    assert tiered.pump.stats()["next_tier"] > 0
    again, _responder = wire.link()
    assert tiered.pump.link_remote(again, {tiered.device: wire.export.places})
    errors = tiered.reads()[tiered.device][1]
    before = tiered.reads()[0]
    tiered.client.read(EVERY)
    assert tiered.reads()[0] == before
    assert tiered.reads()[tiered.device][1] == errors


def test_a_stale_key_is_an_error_and_the_next_tier(tiered: Tiered) -> None:
    wire = Wire(tiered.image)
    link, _responder = wire.link()
    tiered.pump.link_remote(link, {tiered.device: wire.export.places})
    wire.export.close()
    tiered.client.read(EVERY)
    assert "does not offer this memory" in link.failure


def test_pages_of_another_generation_are_not_taken(tiered: Tiered) -> None:
    other = Image.make(700, generation=2)
    wire = Wire(other)
    link, _responder = wire.link()
    tiered.pump.link_remote(link, {tiered.device: wire.export.places})
    tiered.client.read(EVERY)  # compared with generation 1
    assert tiered.reads()[tiered.device][1] >= len(EVERY)
    assert link.up


def test_without_another_tier_reads_wait_for_the_peer(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "image", disk=False)
    wire = Wire(tiered.image)
    sequence = tiered.client.publish(EVERY)
    link, _responder = wire.link()
    tiered.pump.link_remote(link, {tiered.device: wire.export.places})
    tiered.client.finish(sequence, EVERY)
    tiered.pump.stop()


def test_without_another_tier_and_peer_they_fail_in_the_end(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "image", disk=False, hold_ms=50)
    assert tiered.client.fails(EVERY) == Status.read_error
    tiered.pump.stop()


def test_a_link_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    before = objects()
    tiered = Tiered(tmp_path / "image")
    wire = Wire(tiered.image)
    for _ in range(3):
        link, responder = wire.link()
        tiered.pump.link_remote(link, {tiered.device: wire.export.places})
        tiered.client.read(EVERY)
        tiered.pump.drop_link(link, "the test says so")
        tiered.client.read(EVERY)
        responder.close()
    tiered.pump.stop()
    wire.export.close()
    del link, responder, wire, tiered
    assert objects() == before


# --- what the machine refuses ---------------------------------------------------------------------


def without_rights(body: str, memlock_kib: int = 1 << 20) -> str:
    """Run Python as a root that has to keep to limits and permissions; return what it printed.

    Another user could not even start Python where it lies in root's home.
    """
    drop = "--bounding-set=-ipc_lock,-dac_override,-dac_read_search --inh-caps=-all"
    command = f"ulimit -l {memlock_kib}; exec setpriv {drop} python -c '{body}'"
    return os.popen(f"{command} 2>&1").read()


def test_too_little_locked_memory_names_the_limit() -> None:
    body = (
        "import numpy as np\n"
        "from tierd.io import verbs\n"
        "memory = np.zeros(1 << 22, np.uint8)\n"
        "try: verbs.register(verbs.open_context(verbs.find_port()), memory)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    said = without_rights(body, memlock_kib=64)
    assert "RdmaMemoryError" in said
    assert "RLIMIT_MEMLOCK is 64 KiB" in said
    assert "LimitMEMLOCK=" in said


def test_an_arena_that_cannot_be_registered_is_said_of_the_link() -> None:
    body = (
        "import pathlib, tempfile\n"
        "from tests.lab.rdma.one_machine import Image, Tiered, Wire\n"
        "wire = Wire(Image.make(700))\n"
        'tiered = Tiered(pathlib.Path(tempfile.mkdtemp()) / "image")\n'
        "link, _responder = wire.link()\n"
        "tiered.pump.link_remote(link, {tiered.device: wire.export.places})\n"
        "print(link.up, link.trouble)\n"
        "tiered.pump.stop()\n"
    )
    said = without_rights(body, memlock_kib=4096)  # the arena alone has 4 MiB, the image 2.8
    assert "True rxe0: registering 4096 KiB of memory refused" in said
    assert "RLIMIT_MEMLOCK is 4096 KiB" in said


def test_no_permission_names_the_device() -> None:
    paths = list(Path("/dev/infiniband").glob("uverbs*"))
    body = (
        "from tierd.io import verbs\n"
        "try: verbs.find_port()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for path in paths:
        os.chown(path, 65534, 65534)
        path.chmod(0o600)
    try:
        said = without_rights(body)
    finally:
        for path in paths:
            path.chmod(0o666)
    assert "RdmaPermissionError" in said
    assert "/dev/infiniband/uverbs" in said


def test_a_gid_behind_what_a_queue_pair_can_name_is_refused() -> None:
    wire = Wire(Image.make(1))
    link = _core.VerbsLink(wire.context, 1, 128, 1_000_000_000)
    responder = _core.VerbsResponder(wire.context, 1)
    way = {**wire.way.for_core(), "gid_index": 256}
    for side, names in ((link, responder.names), (responder, link.names)):
        with pytest.raises(_core.VerbsError, match="the GID at index 256 cannot be used"):
            side.connect(queue_pairs=names, **way)
    assert not link.up


def test_a_device_or_gid_that_is_not_there() -> None:
    with pytest.raises(RdmaMissingError, match="there is no RDMA device mlx5_9; there are: rxe0"):
        verbs.find_port("mlx5_9")
    with pytest.raises(RdmaPortError, match=r"no GID at index 77; there are: .*10\.9\.0\.1"):
        verbs.find_port(gid_index=77)
    with pytest.raises(RdmaPortError, match="no RDMA port is active: no such port"):
        verbs.find_port(port=7)
    assert verbs.find_port().gids[0].scope == "ipv4"  # although link-local stands first

"""Remote tables without RDMA hardware: choosing a way, configuration, who may ask, and what a node
does while its peers are away. Real verbs are tested in tests/lab/rdma."""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import checkpoints
from tests.daemons import make_node
from tests.rest import serving
from tests.unit.pump_rig import Client, Image, Served
from tests.unit.remote_rig import exporting, secret
from tierd.config import load
from tierd.daemon.plane import DataPlane
from tierd.daemon.remote_tiers import difference
from tierd.errors import ConfigError, ImageError, RdmaMissingError, RdmaPeerError, RdmaPortError
from tierd.io import _core, exports, verbs
from tierd.io.store import Store
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemons import Node

Status = _core.protocol.Status
V4, V6, LOCAL = "00000000000000000000ffff0a0900%02x", "fd00%026x%02x", "fe80%026x%02x"


def gid(index: int, scope: str, kind: str = "RoCE v2", host: int = 1) -> verbs.Gid:
    text = {"ipv4": V4 % host, "ipv6": V6 % (0, host), "link-local": LOCAL % (0, host)}[scope]
    return verbs.Gid(index, bytes.fromhex(text), kind)


def port(*gids: verbs.Gid, **changes: Any) -> verbs.Port:
    made = verbs.Port("rxe0", 1, "Ethernet", 4096, 0, 16, tuple(verbs.rank(gids)))
    return dataclasses.replace(made, **changes)


# --- GIDs, MTU, link layers -----------------------------------------------------------------------


def test_gids_are_ranked_by_how_far_they_reach() -> None:
    gids = [
        gid(0, "link-local", "IB/RoCE v1"),
        gid(1, "link-local"),
        gid(2, "ipv6", "IB/RoCE v1"),
        gid(3, "ipv6"),
        gid(4, "ipv4", "IB/RoCE v1"),
        gid(5, "ipv4"),
    ]
    assert [one.index for one in verbs.rank(gids)] == [5, 3, 4, 2, 1, 0]


def test_two_ports_take_what_both_have() -> None:
    mine = port(gid(0, "link-local"), gid(1, "ipv4"), gid(2, "ipv6"), mtu=4096)
    theirs = port(gid(0, "link-local", host=2), gid(3, "ipv6", host=2), mtu=1024, read_depth=4)
    way = verbs.agree(mine, theirs)
    assert (way.mine, way.theirs) == (mine.gids[1], theirs.gids[0])
    assert (way.mtu, way.read_depth) == (1024, 4)
    assert verbs.agree(theirs, mine).mtu == 1024


def test_an_error_names_both_sides() -> None:
    mine, theirs = port(gid(1, "ipv4")), port(gid(2, "ipv6", host=7))
    with pytest.raises(RdmaPeerError, match=r"10\.9\.0\.1 \(RoCE v2.*of the peer fd00::7"):
        verbs.agree(mine, theirs)
    with pytest.raises(RdmaPeerError, match=r"Ethernet, MTU 4096.*InfiniBand, MTU 2048"):
        verbs.agree(mine, port(link_layer="InfiniBand", mtu=2048))


def test_infiniband_needs_no_gid() -> None:
    mine = port(link_layer="InfiniBand", lid=3)
    way = verbs.agree(mine, port(link_layer="InfiniBand", lid=9, mtu=2048))
    assert way.for_core() == {
        "gid_index": 0, "gid": bytes(16), "lid": 9, "mtu": 2048, "read_depth": 16,
    }  # fmt: skip


def test_what_a_port_says_of_itself_comes_back() -> None:
    made = port(gid(1, "ipv4"), gid(2, "ipv6"), lid=7)
    assert verbs.Port.from_json(made.to_json()) == made


def test_the_gid_table_is_read_from_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "mlx5_0/ports/1"
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs/types").mkdir(parents=True)
    (folder / "gid_attrs/ndevs").mkdir(parents=True)
    entries = {0: LOCAL % (0, 1), 1: "0" * 32, 2: V4 % 1}
    for index, value in entries.items():
        text = ":".join(value[at : at + 4] for at in range(0, 32, 4))
        (folder / f"gids/{index}").write_text(text + "\n")
        if index != 1:  # an unused entry has no kind
            (folder / f"gid_attrs/types/{index}").write_text("RoCE v2\n")
            (folder / f"gid_attrs/ndevs/{index}").write_text("eth7\n")
    found = verbs.read_gids("mlx5_0", 1, sys_=tmp_path)
    assert [(one.index, one.scope, one.netdev) for one in found] == [
        (0, "link-local", "eth7"), (2, "ipv4", "eth7"),
    ]  # fmt: skip


@pytest.mark.skipif(os.path.exists("/sys/class/infiniband"), reason="this machine has RDMA")
def test_a_machine_without_rdma_says_so() -> None:
    with pytest.raises(RdmaMissingError, match="no RDMA"):
        verbs.find_port()


def test_the_first_port_that_can_be_used_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one without a GID, not iWARP, and no GID that a queue pair cannot name."""

    def device(name: str, *gids: int, node: str = "1: CA") -> dict[str, Any]:
        folder = tmp_path / name / "ports/1"
        (folder / "gids").mkdir(parents=True)
        (folder / "gid_attrs/types").mkdir(parents=True)
        (tmp_path / name / "node_type").write_text(node + "\n")
        for index in gids:
            text = ":".join((V4 % 1)[at : at + 4] for at in range(0, 32, 4))
            (folder / f"gids/{index}").write_text(text + "\n")
            (folder / f"gid_attrs/types/{index}").write_text("RoCE v2\n")
        each = {"port": 1, "state": "active", "link_layer": "Ethernet", "mtu": 4096, "lid": 0}
        depth = {"read_depth_in": 16, "read_depth_out": 16}
        return {"name": name, "trouble": "", "ports": [each], **depth}

    found = [device("siw0", 1, node="4: RNIC"), device("bare"), device("far", 900)]
    monkeypatch.setattr(verbs, "CLASS", tmp_path)
    monkeypatch.setattr(verbs, "devices", lambda: found)
    read = verbs.read_gids
    monkeypatch.setattr(verbs, "read_gids", lambda name, one: read(name, one, sys_=tmp_path))
    with pytest.raises(RdmaPortError, match="siw0 is iWARP"):
        verbs.find_port()
    with pytest.raises(RdmaPortError, match="far port 1 has no GID"):
        verbs.find_port("far")
    found.append(device("good", 3, 900))
    good = verbs.find_port()
    assert (good.device, [one.index for one in good.gids]) == ("good", [3])


def test_a_peer_is_told_as_many_gids_as_it_takes() -> None:
    many = port(*(gid(index, "ipv6", host=index % 200) for index in range(256)), gid(256, "ipv4"))
    assert len(many.to_json()["gids"]) == verbs.GIDS_MAX


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"exports.images": ["*"]}, "exports.images needs api.listen"),
        ({"remote.peers": ["https://a:1"]}, "remote.peers needs remote.token_file"),
        ({"remote.peers": ["node2"], "remote.token_file": "/t"}, "is not an address such as"),
        ({"remote.peers": ["https://a"], "remote.token_file": "/t"}, "is not an address such as"),
        ({"remote.peers": ["http://a:1"], "remote.token_file": "/t"}, "in the clear; use https"),
        ({"remote.peers": ["https://a:1"] * 2, "remote.token_file": "/t"}, "twice"),
        ({"remote.queue_pairs": 0}, "remote.queue_pairs"),
        ({"remote.gid_index": 256}, "remote.gid_index"),
    ],
)
def test_configurations_that_cannot_work(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(environ={}, overrides=given)


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Node:
    directory = tmp_path_factory.mktemp("remote")
    return make_node(directory, {"v41": checkpoints.engram(directory / "v41", rows=3000)})


@pytest.fixture
def device(staged: Node, tmp_path: Path) -> Path:
    return shutil.copy(staged.device, tmp_path / "device.img")


def test_an_image_is_loaded_whole(device: Path) -> None:
    with StoreSet.open([device], write=False) as stores:
        image = stores.images[0]
        memory = exports.ImageMemory(image.info.pages)
        assert "pages" in memory.page_kind
        assert memory.pages.ctypes.data % 4096 == 0
        seen = []
        exports.load(image, memory.pages, lambda done, total: seen.append((done, total)) is None)
        assert seen[-1] == (image.info.pages, image.info.pages)
        faults = np.zeros(image.info.pages, np.uint8)
        table = image.info.table
        assert not _core.check_pages(
            memory.pages, table.row_bytes, table.rows, 0, image.info.image_id,
            image.info.generation, True, True, faults,
        )  # fmt: skip
        assert not difference(image.info, image.info)
        newer = dataclasses.replace(image.info, generation=image.info.generation + 1)
        assert "generation" in difference(image.info, newer)
        assert "other rows" in difference(image.info, dataclasses.replace(image.info, digest="0"))


def test_places_survive_json() -> None:
    places = [(0, 16, (1 << 63) + 4096, 7), (16, 3, 8192, 9)]
    assert exports.places_from(exports.places_json(places)) == places


# --- a pump whose peers are away ------------------------------------------------------------------


def whole(image: Image, number: int) -> Any:
    return np.array([[0, image.pages, number, 0]], np.uint64)


def test_a_peer_that_is_away_costs_nothing(tmp_path: Path) -> None:
    image = Image.make(64)
    served = Served(tmp_path / "image", image, remote=True)
    away = served.pump.add_remote()
    table = served.pump.add_table(
        image_id=image.image_id, generation=1, row_bytes=264, rows=64 * 15, window_ns=1000,
        extents=whole(image, away), copies=[whole(image, served.device)],
    )  # fmt: skip
    client = Client(served, 32, 256, table=table)
    client.read(list(range(30)))
    stats = served.pump.stats()
    assert (stats["passed_over"], stats["next_tier"], stats["retries"]) == (30, 0, 0)
    with pytest.raises(ValueError, match="still holds extents"):
        served.pump.remove_device(away)
    served.pump.remove_channel(client.number)
    served.pump.remove_table(table)
    served.pump.remove_device(away)
    served.pump.stop()


def test_a_table_that_lies_nowhere_else_waits_and_then_fails(tmp_path: Path) -> None:
    image = Image.make(64)
    served = Served(tmp_path / "image", image, remote=True, remote_hold_ms=20)
    away = served.pump.add_remote()
    table = served.pump.add_table(
        image_id=image.image_id, generation=1, row_bytes=264, rows=64 * 15, window_ns=1000,
        extents=whole(image, away),
    )  # fmt: skip
    client = Client(served, 32, 256, table=table)
    assert client.fails(list(range(30))) == Status.read_error
    stats = served.pump.stats()
    assert (stats["reads"], stats["retries"]) == (30, 0)  # held once, not once more
    served.pump.stop()


class Peers:
    """A pump with a table of 64 pages that lies at two peers and nowhere else."""

    def __init__(self, tmp_path: Path, *, disk: bool = False, **options: Any) -> None:
        self.image = Image.make(64)
        self.served = Served(tmp_path / "image", self.image, remote=True, **options)
        self.pump = self.served.pump
        self.devices = [self.pump.add_remote() for _ in range(2)]
        tiers = [whole(self.image, d) for d in [*self.devices, *[self.served.device] * disk]]
        table = self.pump.add_table(
            image_id=self.image.image_id, generation=1, row_bytes=264, rows=64 * 15,
            window_ns=1000, extents=tiers[0], copies=tiers[1:],
        )  # fmt: skip
        self.client = Client(self.served, 32, 256, table=table)

    def link(self, peer: int) -> Any:
        """Link a peer that answers when :meth:`answer` says so."""
        link = _core.QueueLink(128, 10_000_000_000)
        link.open()
        places = [(0, self.image.pages, 0, 0)]
        assert self.pump.link_remote(link, {self.devices[peer]: places})
        return link

    def answer(self, link: Any, count: int, data: Any = None) -> None:
        """Play the peer until it has been asked for `count` pages."""
        data = self.image.data if data is None else data
        while count:
            select.select([link.event_fd], [], [], 5)
            slots, pages = link.take(128)
            assert len(slots), "the peer is not asked"
            link.memory.reshape(-1, 4096)[slots] = data[pages]
            link.finish(slots, True)
            count -= len(slots)


PAGES = list(range(30))


def test_when_no_peer_comes_back_reads_wait_once(tmp_path: Path) -> None:
    peers = Peers(tmp_path, remote_hold_ms=20)
    assert peers.client.fails(PAGES) == Status.read_error
    stats = peers.pump.stats()
    assert (stats["reads"], stats["retries"], stats["next_tier"]) == (30, 0, 0)
    peers.pump.stop()


@pytest.mark.parametrize("back", [0, 1])
def test_reads_that_wait_are_read_from_whichever_peer_comes_back(tmp_path: Path, back: int) -> None:
    peers = Peers(tmp_path, remote_hold_ms=20_000)
    sequence = peers.client.publish(PAGES)
    peers.answer(peers.link(back), 30)
    peers.client.finish(sequence, PAGES)
    peers.pump.stop()


@pytest.mark.parametrize("back", [0, 1])
def test_so_are_those_that_were_in_flight_when_the_last_peer_went(
    tmp_path: Path, back: int
) -> None:
    peers = Peers(tmp_path, remote_hold_ms=20_000)
    link = peers.link(0)
    sequence = peers.client.publish(PAGES)
    select.select([link.event_fd], [], [], 5)
    assert len(link.take(128)[0])
    peers.pump.drop_link(link, "the test says so")
    assert not link.up
    peers.answer(peers.link(back), 30)
    peers.client.finish(sequence, PAGES)
    peers.pump.stop()


@pytest.mark.parametrize("crc_sample", [0, 16])
def test_the_checksum_of_every_page_of_a_peer_is_looked_at(tmp_path: Path, crc_sample: int) -> None:
    peers = Peers(tmp_path, disk=True, crc_sample=crc_sample)
    flipped = peers.image.data.copy()
    flipped[7, 100] ^= 0x10
    link = peers.link(0)
    sequence = peers.client.publish(PAGES)
    peers.answer(link, 31, flipped)  # page 7 twice
    peers.client.finish(sequence, PAGES)
    stats = peers.pump.stats()
    assert (stats["retries"], stats["next_tier"], stats["crc_checked"]) == (1, 1, 32)
    peers.pump.stop()


def test_a_pump_without_remote_tables_has_no_remote_devices(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", Image.make(8))
    with pytest.raises(ValueError, match="without remote tables"):
        served.pump.add_remote()
    served.pump.stop()


# --- REST -----------------------------------------------------------------------------------------


PEER = {"Authorization": "Bearer " + "p" * 32}
SESSION = {
    "version": 1,
    "transport": "verbs",
    "port": port(gid(1, "ipv4")).to_json(),
    "links": [[[17, 1]]],
}


async def test_the_token_of_peers_opens_exports_and_nothing_else(
    device: Path, tmp_path: Path
) -> None:
    async with serving(device, tmp_path, **exporting(tmp_path)) as rest:
        base = f"http://{rest.api.addresses['api.listen']}"

        async def status(method: str, path: str, token: str, body: Any = None) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            async with rest.tcp.request(method, base + path, headers=headers, json=body) as answer:
                return answer.status

        assert await status("GET", "/v1/exports", "p" * 32) == 200
        assert await status("GET", "/v1/exports", "a" * 32) == 200
        assert await status("GET", "/v1/exports", "x" * 32) == 401
        assert await status("GET", "/v1/status", "p" * 32) == 403
        assert await status("POST", "/v1/controller/thaw", "p" * 32) == 403
        assert await status("POST", "/v1/exports/sessions", "x" * 32, SESSION) == 401
        assert await status("PUT", "/v1/exports/sessions/" + "0" * 32, "p" * 32, {}) == 404


async def test_what_cannot_be_opened_is_refused_with_the_reason(
    device: Path, tmp_path: Path
) -> None:
    async with serving(device, tmp_path, **exporting(tmp_path)) as rest:
        sessions = "/v1/exports/sessions"
        body = await rest.problem("POST", sessions, 409, json=SESSION)
        assert "nothing is exported here" in body["detail"]
        body = await rest.problem("POST", sessions, 409, json={**SESSION, "version": 99})
        assert "version 99" in body["detail"]
        assert "version 1" in body["detail"]
        await rest.problem("POST", sessions, 422, json={**SESSION, "links": [[]]})
        await rest.problem("POST", sessions, 422, json={**SESSION, "links": [[[1, -1]]]})
        listed = await rest.get("/v1/exports")
        assert listed["exports"] == []


async def test_a_table_of_a_node_with_peers_shows_its_tiers(device: Path, tmp_path: Path) -> None:
    given = {
        "remote.peers": ["https://node2:9468"],
        "remote.token_file": secret(tmp_path / "token", "p" * 32),
    }
    async with serving(device, tmp_path, **given) as rest:
        (first, *_) = (await rest.get("/v1/placements"))["placements"]
        remote, disk = first["tiers"]
        assert (remote["tier"], remote["devices"]) == ("remote", ["https://node2:9468"])
        assert (remote["linked"], remote["why"]) == (
            False,
            "away: the peer has not been reached yet",
        )
        assert disk["tier"] == "disk"
        tables = (await rest.get("/v1/tables"))["tables"]
        assert {table["tier"] for table in tables} == {"disk"}


def test_what_only_peers_hold_is_served_and_cannot_be_changed_here(
    device: Path, tmp_path: Path
) -> None:
    with StoreSet.open([device], write=False) as stores:
        offered = stores.images[0].info
    empty = tmp_path / "empty.img"
    Store.format(empty, size=16 << 20).close()
    given = {
        "devices.paths": [str(empty)],
        "remote.peers": ["https://node2:9468"],
        "remote.token_file": "/t",
    }
    plane = DataPlane.open(load(environ={}, overrides=given).settings)
    try:
        found = plane.remote_tiers("https://node2:9468", [offered])
        assert list(found) == [offered.image_id]
        image = plane.find(offered.image_id, offered.generation)
        assert (image.local, image.place) == (False, "https://node2:9468")
        plane.refresh()
        assert plane.images[offered.image_id] is image
        with pytest.raises(ImageError, match="lies on no device here"):
            plane.delete(offered.name)
        with pytest.raises(ImageError, match="lies on no device here"):
            plane.place({offered.name: 5.0})
        newer = dataclasses.replace(offered, generation=offered.generation + 1)
        ((tier,),) = plane.remote_tiers("https://node2:9468", [newer]).values()
        assert plane.find(newer.image_id, newer.generation).remotes == {tier.peer: tier}
        other = dataclasses.replace(newer, image_id=5)
        assert plane.remote_tiers("https://node2:9468", [other]) == {}
    finally:
        plane.close()

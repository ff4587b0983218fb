"""Run by test_rdma.py inside one lab machine: daemons that read from each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.lab.rdma import rig
from tests.lab.rdma.objects import objects
from tierd.io import _core

DEVICE = Path("/lab/device.img")
Status = _core.protocol.Status
EVERY = list(range(0, 700, 3))


def test_two_daemons(tmp_path: Path) -> None:
    """One exports; one reads tables that it has as well, and one that has nothing itself."""
    images = rig.oracle(DEVICE)
    name, (info, pages) = next(iter(images.items()))
    rng = np.random.default_rng(5)
    there = rig.node_at(tmp_path / "there", DEVICE)
    here = rig.node_at(tmp_path / "here", DEVICE)
    bare = rig.node_at(tmp_path / "bare", None)
    before = objects()
    with rig.shown_on_failure(there, here, bare):
        exporting = rig.serve_exports(there)
        reading = rig.serve_remote(here)
        alone = rig.serve_remote(bare, TIERD__REMOTE__HOLD_MS="60000")
        try:
            for daemon in (exporting, reading, alone):
                daemon.wait_ready()
            rig.until(lambda: all(e["state"] == "ready" for e in exports(there)["exports"]))
            rig.until(lambda: rig.all_linked(here) and rig.all_linked(bare))
            one, other = rig.Client(here, info, pages), rig.Client(bare, info, pages)
            assert one.right(rng)
            assert other.right(rng)
            (placement,) = (p for p in placements(here) if p["image"] == name)
            remote, disk = placement["tiers"]
            assert (remote["tier"], remote["linked"], disk["tier"]) == ("remote", True, "disk")
            assert remote["read_us"] > 0
            assert remote["mtu"] == 4096
            assert [tier["tier"] for tier in placements(bare)[0]["tiers"]] == ["remote"]
            assert len(exports(there)["sessions"]) == 2

            exporting.kill()
            assert one.right(rng)  # from the disk
            rig.until(lambda: not rig.peer_up(bare))
            sequence = publish(other, EVERY[:60])  # waits for the peer
            assert one.right(rng)
            exporting = rig.serve_exports(there)
            exporting.wait_ready()
            assert int(other.ring.wait(sequence, 200 * rig.SECOND)) == Status.ok
            assert (other.ring.pages(sequence) == pages[EVERY[:60]]).all()
            other.ring.retire(sequence)
            rig.until(lambda: rig.all_linked(here) and rig.all_linked(bare))
            assert one.right(rng)
            assert other.right(rng)
            for client in (one, other):
                client.close()
        finally:
            codes = [daemon.stop() for daemon in (reading, alone, exporting)]
    assert codes == [0, 0, 0]
    assert objects() == before


def test_what_a_peer_refuses_is_said_here(tmp_path: Path) -> None:
    there, here = rig.node_at(tmp_path / "there", DEVICE), rig.node_at(tmp_path / "here", DEVICE)
    with rig.shown_on_failure(there, here):
        exporting, reading = rig.serve_exports(there), rig.serve_remote(here, token="x" * 32)
        try:
            reading.wait_ready()
            rig.until(lambda: "refuses (401)" in reason(here))
            info, pages = next(iter(rig.oracle(DEVICE).values()))
            client = rig.Client(here, info, pages)
            assert client.right(np.random.default_rng(1))
            client.close()
        finally:
            codes = [reading.stop(), exporting.stop()]
    assert codes == [0, 0]


def exports(node: rig.Node) -> dict:
    return rig.rest(node, "/v1/exports")


def placements(node: rig.Node) -> list[dict]:
    return rig.rest(node, "/v1/placements")["placements"]


def reason(node: rig.Node) -> str:
    return rig.rest(node, "/v1/status")["peers"][0]["reason"]


def publish(client: rig.Client, pages: list[int]) -> int:
    numbers = np.asarray(pages, np.uint32)
    zeros = np.zeros_like(numbers)
    return int(client.ring.publish(numbers, zeros, zeros, 0))

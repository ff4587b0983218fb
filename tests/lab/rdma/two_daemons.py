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
    """One exports; one reads tables that it has too, one has nothing itself, one a wrong token."""
    images = rig.oracle(DEVICE)
    name, (info, pages) = next(iter(images.items()))
    rng = np.random.default_rng(5)
    there = rig.node_at(tmp_path / "there", DEVICE)
    here = rig.node_at(tmp_path / "here", DEVICE)
    bare = rig.node_at(tmp_path / "bare", None)
    other_token = rig.node_at(tmp_path / "other_token", DEVICE)
    before = objects()
    stranger = None
    with rig.shown_on_failure(there, here, bare, other_token):
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
            exporting = rig.serve_exports(there)
            stranger = rig.serve_remote(other_token, token="x" * 32)
            exporting.wait_ready()
            # Exports are loaded after REST answers; this waits for the peer, at most a minute.
            sequence = publish(other, EVERY[:60])
            assert one.right(rng)
            assert int(other.ring.wait(sequence, 200 * rig.SECOND)) == Status.ok
            assert (other.ring.pages(sequence) == pages[EVERY[:60]]).all()
            other.ring.retire(sequence)
            rig.until(lambda: rig.all_linked(here) and rig.all_linked(bare))
            assert one.right(rng)
            assert other.right(rng)

            stranger.wait_ready()
            rig.until(lambda: "refuses (401)" in reason(other_token))
            third = rig.Client(other_token, info, pages)
            assert third.right(rng)  # from the disk
            for client in (one, other, third):
                client.close()
        finally:
            started = (reading, alone, stranger, exporting)
            codes = [daemon.stop() for daemon in started if daemon is not None]
    assert codes == [0, 0, 0, 0]
    assert objects() == before


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

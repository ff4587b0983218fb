"""Two daemons, one of which reads the other's memory over NIXL; and what happens when it goes."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.daemons import engram_node
from tests.lab.rdma import rig
from tierd.api import rest_client
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.node import Node

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu12") is None,
        reason="NIXL is not installed; run: pip install --no-deps nixl-cu12",
    ),
    pytest.mark.timeout(600),
]
Status = _core.protocol.Status
NIXL = {"TIERD__EXPORTS__TRANSPORT": "nixl", "TIERD__REMOTE__TRANSPORT": "nixl"}


def test_rows_come_over_nixl_and_the_disk_takes_over(tmp_path: Path) -> None:
    device = engram_node(tmp_path, rows=11_000).device
    name, (info, pages) = next(iter(rig.oracle(device).items()))
    there, here = rig.node_at(tmp_path / "there", device), rig.node_at(tmp_path / "here", device)
    bare = rig.node_at(tmp_path / "bare", None)
    rng, stopped = np.random.default_rng(3), -1
    with rig.shown_on_failure(there, here, bare):
        exporting = rig.serve_exports(there, listen="127.0.0.1:19468", **NIXL)
        peer = "http://127.0.0.1:19468"
        reading = rig.serve_remote(here, peer, **NIXL)
        alone = rig.serve_remote(bare, peer, **NIXL)
        try:
            for daemon in (exporting, reading, alone):
                daemon.wait_ready()
            rig.until(lambda: rig.all_linked(here) and rig.all_linked(bare))
            one, other = rig.Client(here, info, pages), rig.Client(bare, info, pages)
            assert one.right(rng)
            assert other.right(rng)
            placements = rig.rest(here, "/v1/placements")["placements"]
            (tiers,) = (p["tiers"] for p in placements if p["image"] == name)
            assert [(t["tier"], t["linked"]) for t in tiers] == [("remote", True), ("disk", None)]
            assert tiers[0]["transport"] == "nixl"
            exporting.kill()
            assert one.right(rng)
            rig.until(lambda: not rig.peer_up(bare))
            exporting = rig.serve_exports(there, listen="127.0.0.1:19468", **NIXL)
            exporting.wait_ready()
            rig.until(lambda: rig.all_linked(here) and rig.all_linked(bare))
            assert other.right(rng)
            assert one.right(rng)
            # Withdrawn while it is read: NIXL's engine answers from memory that is there still.
            with reading_on(one, rng) as statuses:
                rest_client.change(there.api_socket, "DELETE", f"/v1/images/{name}")
                rig.until(lambda: len(rig.rest(there, "/v1/exports")["exports"]) == 1)
                rig.until(lambda: not linked(here, name))
                assert exporting.process.poll() is None
                stopped = exporting.stop()
            assert set(statuses) == {True}  # from the disk
            one.close()
            other.close()
        finally:
            codes = [daemon.stop() for daemon in (reading, alone)]
            exporting.kill()  # if it has not been stopped
    assert [*codes, stopped] == [0, 0, 0]


@contextlib.contextmanager
def reading_on(client: rig.Client, rng: np.random.Generator) -> Iterator[list[bool]]:
    """Read all the time, and note whether all was right."""
    over, seen = threading.Event(), []

    def read() -> None:
        while not over.is_set():
            seen.append(client.right(rng))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def linked(node: Node, name: str) -> bool:
    placements = rig.rest(node, "/v1/placements")["placements"]
    (tiers,) = (p["tiers"] for p in placements if p["image"] == name)
    return any(tier["linked"] for tier in tiers)

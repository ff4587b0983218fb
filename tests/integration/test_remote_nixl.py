"""Two daemons, one of which reads the other's memory over NIXL; and what happens when it goes."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.daemons import engram_node
from tests.lab.rdma import rig
from tierd.io import _core

if TYPE_CHECKING:
    from pathlib import Path

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
    rng = np.random.default_rng(3)
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
            one.close()
            other.close()
        finally:
            codes = [daemon.stop() for daemon in (reading, alone, exporting)]
    assert codes == [0, 0, 0]

"""The dram tier: images in the node's memory, which GPUs read there (here Triton's interpreter)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.daemons import Node, engram_node, running, tierd
from tests.unit import gpu_rig  # noqa: F401 - the interpreter, before any kernel is defined
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images
from tierd.gpu.tables import TableOptions
from tierd.io import _core
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE_S = 20.0
FIRST, SECOND = "layers.1.engram", "layers.14.engram"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return engram_node(tmp_path, rows=600)


def configured(directory: Path, *images: str) -> tuple[str, str]:
    path = directory / "tierd.toml"
    path.write_text(f"[dram]\nimages = {list(images)!r}\n".replace("'", '"'))
    return "--config", str(path)


def awaited(node: Node, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state = rest_client.get(node.api_socket, "/v1/status")
        if good(state):
            return state
        assert time.monotonic() < deadline, state["dram"]
        time.sleep(0.02)


def tiers_and_rows(node: Node, device: str | None) -> dict[str, str]:
    """Which tier serves each table; every row of both is compared on the way."""
    images = list_images(str(node.engine_socket), wait_s=10)
    found = {}
    with Client.attach(
        node.engine_socket, images, engine="t", cache_rows=64, rows_max=64,
        options=TableOptions(device=device),
    ) as client:  # fmt: skip
        for name in (FIRST, SECOND):
            table = client.table(name)
            found[name] = getattr(table, "tier", "server")
            ids = torch.arange(0, 600, 13)
            out = torch.zeros((len(ids), table.info.table.dim), dtype=torch.bfloat16)
            table.kick(ids)
            table.gather(ids, out)
            rows = np.ascontiguousarray(node.checkpoints["v41"].tables[name][ids.numpy()])
            np.testing.assert_array_equal(
                out.view(torch.int16).numpy().view(np.uint16),
                _core.decode_rows(rows, table.info.table.dim, table.info.table.row_format.value),
            )
    return found


def test_a_table_in_memory_is_read_there_and_the_other_from_its_device(
    node: Node, tmp_path: Path
) -> None:
    with running(node, *configured(tmp_path, "v41/*.1.engram")) as daemon:
        state = awaited(node, lambda s: s["dram"] and s["dram"][0]["state"] == "ready")
        (held,) = state["dram"]
        assert held["image"] == f"v41/{FIRST}"
        assert held["loaded_pages"] == held["pages"]
        assert held["size_bytes"] >= held["pages"] * 4096
        assert held["memory"]
        assert tiers_and_rows(node, "cpu") == {FIRST: "dram", SECOND: "server"}
        # The CPU twin has a cache that a copy of whole pages would only go round.
        assert tiers_and_rows(node, None) == {FIRST: "server", SECOND: "server"}
        shown = tierd("status", "--api-socket", node.api_socket).stdout
        assert f"v41/{FIRST}: in memory, " in shown
        placed = rest_client.get(node.api_socket, "/v1/placements")["placements"]
        assert [one["tiers"][0]["tier"] for one in placed] == ["dram", "disk"]
        assert daemon.stop() == 0


def test_an_image_that_cannot_be_loaded_is_served_from_its_device(
    node: Node, tmp_path: Path
) -> None:
    page = node_page(node, FIRST)
    with node.device.open("r+b") as file:
        file.seek(page + 2000)
        file.write(b"\xff\x00\xff")
    with running(node, *configured(tmp_path, "v41/*", "nobody/*")) as daemon:
        state = awaited(node, lambda s: {one["state"] for one in s["dram"]} == {"ready", "failed"})
        failed, ready = state["dram"]
        assert (failed["image"], ready["image"]) == (f"v41/{FIRST}", f"v41/{SECOND}")
        assert "cannot be loaded: page 0" in failed["reason"]
        assert failed["reason"].endswith(f"run: tierd verify v41/{FIRST} --full")
        placed = rest_client.get(node.api_socket, "/v1/placements")["placements"]
        assert placed[0]["tiers"][0]["why"].startswith("away: image v41/layers.1.engram")
        assert any(e.get("pattern") == "nobody/*" for e in daemon.events())
        assert daemon.stop() == 0


def node_page(node: Node, name: str) -> int:
    with Store.open(node.device, write=False) as store:
        image = next(one for one in store.images if one.info.table.name == name)
        return int(image.extents[0].device_page) * 4096

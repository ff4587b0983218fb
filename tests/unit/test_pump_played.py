"""Readers that play other devices: right pages, and never before the played device has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.pump_rig import Image, Served
from tierd.io import _core

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = Image.make(pages=400)
BASE_US, PAGE_US = 400.0, 20.0


def test_memory_is_read_by_copying(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", IMAGE, transport="memory", crc_sample=1)
    client = served.client()
    rng = np.random.default_rng(1)
    for _ in range(20):
        client.read(rng.integers(0, IMAGE.pages, rng.integers(1, 33)))
    client.read([0, IMAGE.pages - 1])
    assert served.pump.transport == "memory"
    served.pump.stop()


@pytest.mark.parametrize("spin_us", [0, 10_000])
@pytest.mark.parametrize("transport", ["memory", "auto", "threads"])
def test_a_burst_takes_as_long_as_the_played_device_would(
    tmp_path: Path, transport: str, spin_us: int
) -> None:
    served = Served(
        tmp_path / "image", IMAGE, transport=transport, spin_us=spin_us, queue_depth=128,
        play_base_us=BASE_US, play_page_us=PAGE_US,
    )  # fmt: skip
    assert served.pump.transport.startswith("played ")
    client = served.client(rows_max=64, arena_pages=200)
    for count in (1, 3, 50):
        before = served.pump.stats()["read_ns"]
        client.read(np.arange(count))
        assert served.pump.stats()["read_ns"] - before >= 1e3 * (BASE_US + PAGE_US * count)
    # A second burst queues up behind the first.
    first, second = client.publish(np.arange(50)), client.publish(np.arange(50, 100))
    before = served.pump.stats()["read_ns"]
    client.finish(first, np.arange(50))
    client.finish(second, np.arange(50, 100))
    assert served.pump.stats()["read_ns"] - before >= 1e3 * (BASE_US + PAGE_US * 50)
    served.pump.stop()


def test_more_than_a_real_device_takes_at_once(tmp_path: Path) -> None:
    """Two devices that play one; the real ones get their reads in parts."""
    served = Served(
        tmp_path / "image", IMAGE, queue_depth=512, play_base_us=1.0, play_page_us=1.0,
        play_queues=1,
    )  # fmt: skip
    client = served.client(rows_max=400, arena_pages=1200)
    rng = np.random.default_rng(3)
    out = []
    for count in (400, 1, 400):
        pages = rng.integers(0, IMAGE.pages, count)
        out.append((client.publish(pages), pages))
    for sequence, pages in out:
        client.finish(sequence, pages)
    served.pump.stop()


def test_what_cannot_be_played() -> None:
    with pytest.raises(ValueError, match="play_base_us and play_page_us"):
        _core.Pump(play_page_us=-1.0)

"""The daemon's look at a channel: whatever the client's memory holds, it is checked or refused."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.config import ChannelSection
from tierd.daemon.rings import STAT_NAMES, ChannelView
from tierd.errors import AttachError
from tierd.io import _core
from tierd.io._core import protocol

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = ChannelSection(rows_max=64, arena_pages_max=128)


def make_channel(*rings: tuple[int, int, int, int]) -> Any:
    return _core.Channel(rank=1, world=4, client_id=bytes(range(16)), rings=list(rings))


def test_what_the_header_says() -> None:
    channel = make_channel((64, 96, 0, 0), (16, 32, 5, 1))
    view = ChannelView(channel.fd, LIMITS)
    assert (view.rank, view.world, view.client_id) == (1, 4, bytes(range(16)))
    assert view.bytes == channel.bytes
    assert [(r.rows_max, r.arena_pages, r.table, r.flags) for r in view.rings] == [
        (64, 96, 0, 0),
        (16, 32, 5, 1),
    ]
    view.close()


def test_statistics_are_those_of_the_ring() -> None:
    channel = make_channel((8, 16, 0, 0), (8, 16, 1, 0))
    view = ChannelView(channel.fd, LIMITS)
    buffer = channel.buffer()
    for ring in range(2):
        at = view.rings[ring].stats
        values = np.arange(len(STAT_NAMES), dtype=np.uint64) + 100 * ring
        buffer[at : at + values.nbytes] = values.view(np.uint8)
    assert view.stats(0) == {name: value for value, name in enumerate(STAT_NAMES)}
    assert view.stats(1)["late_steps"] == 106
    view.close()
    # An engine that outlived a daemon: the next one counts from here.
    again = ChannelView(channel.fd, LIMITS)
    assert set(again.stats(1).values()) == {0}
    at = again.rings[1].stats
    buffer[at : at + 8] = np.array([130], np.uint64).view(np.uint8)
    assert again.stats(1)["lookups"] == 30
    again.close()


@pytest.mark.parametrize(
    ("doorbell", "done", "outstanding"),
    [(0, 0, 0), (5, 3, 2), (3, 5, 0), (2, 0xFFFFFFFE, 4), (8, 0, 8), (9, 0, 0), (1 << 31, 0, 0)],
)
def test_outstanding_requests(doorbell: int, done: int, outstanding: int) -> None:
    channel = make_channel((8, 16, 0, 0))
    view = ChannelView(channel.fd, LIMITS)
    words = channel.control(0).view(np.uint32)
    words[protocol.OFFSET_DOORBELL // 4] = doorbell
    words[protocol.OFFSET_DONE_D // 4] = done  # the daemon answered, and the guardian
    words[protocol.OFFSET_DONE_G // 4] = done  # before it, no further
    assert view.outstanding(0) == outstanding
    view.close()


def test_bounds_name_the_key_to_raise() -> None:
    long, wide = make_channel((65, 128, 0, 0)), make_channel((64, 64, 0, 0), (64, 65, 1, 0))
    with pytest.raises(AttachError, match=r"of 65 rows; channel\.rows_max of the daemon is 64"):
        ChannelView(long.fd, LIMITS)
    with pytest.raises(AttachError, match=r"129 pages together; channel\.arena_pages_max .* 128"):
        ChannelView(wide.fd, LIMITS)


def test_descriptors_that_are_no_channel(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file, pytest.raises(AttachError, match="not a memfd"):
        ChannelView(file.fileno(), LIMITS)
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(AttachError, match="not sealed"):
        ChannelView(fd, LIMITS)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    with pytest.raises(AttachError, match="not one of ours"):
        ChannelView(fd, LIMITS)
    os.close(fd)
    small = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(small, 100)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    with pytest.raises(AttachError, match="smaller than its header"):
        ChannelView(small, LIMITS)
    os.close(small)


@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, protocol.OFFSET_RINGS // 4 + 2 * protocol.RING_ENTRY_BYTES // 4),
            st.one_of(st.integers(0, 0xFFFFFFFF), st.sampled_from([0, 1, 64, 1 << 20, 1 << 31])),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_header_is_read_safely(changes: list[tuple[int, int]]) -> None:
    channel = make_channel((8, 16, 0, 0))
    for word, value in changes:
        struct.pack_into("<I", channel.buffer(), 4 * word, value)
    try:
        view = ChannelView(channel.fd, LIMITS)
    except AttachError:
        return
    for ring in range(len(view.rings)):
        view.stats(ring)
        assert 0 <= view.outstanding(ring) <= protocol.RING_DEPTH
    view.close()


def test_a_channel_far_larger_than_its_parts_is_refused() -> None:
    """A sparse file costs its client nothing, and the daemon's address space twice its size."""
    channel = make_channel((64, 96, 0, 0))
    size = 1 << 40
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, os.pread(channel.fd, channel.bytes, 0), 0)
        os.pwrite(fd, struct.pack("<Q", size), 8)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        with pytest.raises(AttachError, match=f"channel of {size} bytes; its rings and arenas"):
            ChannelView(fd, LIMITS)
    finally:
        os.close(fd)

"""The host pool: layout, leases, what an owner leaves behind."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch

from tierd.errors import KvPoolError, KvPoolFullError
from tierd.io.pool import ALIGN, COUNTERS, HostPool, PoolLayout, PoolView
from tierd.kv.pool import KvPool
from tierd.kv.shape import KvShape

SHAPE = KvShape(layers=3, kv_heads=2, group=2, head_dim=16, dtype=torch.float16)


def test_a_layout_holds_what_was_asked_and_no_byte_overlaps() -> None:
    for pages in (1, 7, 300):
        size = PoolLayout.bytes_for(pages, 3, SHAPE.block_bytes)
        layout = PoolLayout.fit(size, 3, SHAPE.block_bytes)
        assert layout.pages == pages
        spans = [(layout.headers_at(n), pages * 16) for n in range(3)]
        spans += [(layout.layer_at(n), pages * SHAPE.block_bytes) for n in range(3)]
        for (at, length), (after, _) in itertools.pairwise(spans):
            assert at + length <= after
        assert spans[-1][0] + spans[-1][1] <= size
        assert layout.pages_at % 4096 == 0
    with pytest.raises(KvPoolError, match="holds no block of 3 layers"):
        PoolLayout.fit(4096, 3, SHAPE.block_bytes)


def test_layers_of_a_pool_are_apart() -> None:
    view = PoolView.private(5, layers=3, block_bytes=SHAPE.block_bytes)
    pool = KvPool(view, SHAPE, "cpu")
    for layer in range(3):
        pool.host(layer).fill_(layer + 1)
        pool.headers(layer).fill_(10 * layer + 7)
    for layer in range(3):
        assert (pool.host(layer) == layer + 1).all()
        assert (pool.headers(layer) == 10 * layer + 7).all()
    assert view.memory[:4].view("<u4")[0] == 0x564B4454


def test_leases_are_apart_and_come_back_as_zeroes() -> None:
    pool = HostPool(5 * ALIGN)
    try:
        first, second = pool.lease(ALIGN + 1, "a"), pool.lease(ALIGN, "b")
        assert (first.offset, second.offset) == (0, 2 * ALIGN)
        assert pool.free_bytes == 2 * ALIGN
        view = PoolView(pool.fd, second.offset, second.bytes, layers=1, block_bytes=1024)
        view.memory[view.layout.pages_at :] = 0xAB
        view.count(steps=3, bytes=2048)
        view.set(requests=2)
        assert pool.counters(second.number)["steps"] == 3
        assert pool.counters(second.number)["requests"] == 2
        assert set(pool.counters(first.number)) == set(COUNTERS)
        assert not any(pool.counters(first.number).values())  # its owner wrote nothing yet
        pool.release(second.number)
        third = pool.lease(ALIGN, "c")
        assert third.offset == 2 * ALIGN
        assert not any(os.pread(pool.fd, ALIGN, third.offset))
        assert not any(pool.counters(third.number).values())
    finally:
        pool.close()


def test_a_part_is_nobody_s_until_its_memory_went_back() -> None:
    """Punching takes seconds and runs on a thread: who asks meanwhile must not get the part."""
    pool = HostPool(3 * ALIGN)
    try:
        first, second = pool.lease(2 * ALIGN, "a"), pool.lease(ALIGN, "b")
        os.pwrite(pool.fd, b"KV of a", first.offset)
        with pytest.raises(AssertionError, match="may still use it"):
            pool.punch(first)
        pool.withdraw(first.number)
        assert list(pool.leases) == [second.number]
        assert pool.free_bytes == 0
        with pytest.raises(KvPoolFullError):
            pool.lease(ALIGN, "c")
        pool.punch(first)
        with pytest.raises(KvPoolFullError):
            pool.lease(ALIGN, "c")
        pool.free(first)
        assert pool.lease(2 * ALIGN, "c").offset == first.offset
        assert not any(os.pread(pool.fd, 16, first.offset))
    finally:
        pool.close()


def test_a_pool_refuses_in_words() -> None:
    pool = HostPool(4 * ALIGN)
    try:
        with pytest.raises(KvPoolError, match=r"the pool \(kv\.pool_bytes\) has"):
            pool.lease(5 * ALIGN, "a")
        held = [pool.lease(ALIGN, str(n)) for n in range(4)]
        pool.release(held[0].number)
        pool.release(held[2].number)
        with pytest.raises(KvPoolFullError, match="not all in one piece"):
            pool.lease(2 * ALIGN, "b")
        with pytest.raises(OSError, match="not permitted"):  # sealed
            os.ftruncate(pool.fd, ALIGN)
    finally:
        pool.close()


def test_counters_are_where_the_daemon_looks() -> None:
    view = PoolView.private(1, layers=1, block_bytes=1024)
    view.count(**{name: n + 1 for n, name in enumerate(COUNTERS)})
    found = np.frombuffer(view.memory[256:].tobytes(), "<u8", len(COUNTERS))
    assert found.tolist() == [n + 1 for n in range(len(COUNTERS))]

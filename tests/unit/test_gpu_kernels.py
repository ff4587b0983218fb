"""The GPU path's kernels in Triton's interpreter, against numpy and torch, over a real pump."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import gpu_rig  # first: it decides that kernels are interpreted
import numpy as np
import pytest
import torch
from gpu_rig import GpuEngine
from twin_rig import Rig, expected, pack

from tierd.errors import HookError, RowError
from tierd.gpu import state
from tierd.gpu.dram import DramTable
from tierd.io import _core, seen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPES = [
    (400, 64, "e4m3_e8m0"),
    (300, 64, "e4m3_e8m0"),
    (200, 160, "e4m3"),
    (200, 33, "raw"),
    (200, 40, "bf16"),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path: Path = tmp_path_factory.mktemp("gpu") / "device"
    made = Rig(path, SHAPES, crc_sample=1)
    yield made
    made.close()


@pytest.mark.parametrize("table", range(1, 5))
def test_rows_of_every_format(rig: Rig, table: int) -> None:
    image = rig.images[table]
    with GpuEngine(rig, [image], quota=4) as engine:
        rng = np.random.default_rng(table)
        for _ in range(2):
            engine.step(0, rng.integers(0, image.rows, (2, 3)))
        stats = engine.tables[0].stats()
    assert stats["lookups"] == 12
    assert stats["hits"] + stats["misses"] + stats["bypasses"] == 12
    assert stats["steps"] == 2


def test_every_pair_of_payload_and_scale(tmp_path: Path) -> None:
    """All 65,025 pairs that may be staged, subnormals and both zeroes among them."""
    dim = 3840
    payloads = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    pairs = np.array([(p, s) for s in range(255) for p in np.resize(payloads, 256)], np.uint8)
    rows = -(-len(pairs) // dim)
    pairs = np.resize(pairs, (rows * dim, 2)).reshape(rows, dim // 32, 32, 2)
    stored = np.concatenate([pairs[..., 0].reshape(rows, dim), pairs[:, :, 0, 1]], axis=1)
    made = Rig(tmp_path / "pairs", [(rows, dim, "e4m3_e8m0")])
    image = made.images[0]
    pages = pack(stored, image.image_id, image.generation)
    (tmp_path / "pairs").write_bytes(pages.tobytes())
    image.stored, image.decoded = stored, expected(stored, dim, "e4m3_e8m0")
    ids = np.arange(rows)
    try:
        with GpuEngine(made, [image], quota=8, rows_max=32) as engine:
            engine.step(0, ids)
        with GpuEngine(made, [image], quota=8, rows_max=32, canonical_zero=True) as engine:
            got = engine.gather(0, ids)
    finally:
        made.close()
    assert (image.decoded == 0x8000).any()
    want = np.where(image.decoded == 0x8000, 0, image.decoded)
    np.testing.assert_array_equal(got, want)
    assert set(map(tuple, pairs.reshape(-1, 2))) == {(p, s) for p in payloads for s in range(255)}


def test_strided_and_narrow_ids_are_read_in_place(rig: Rig) -> None:
    image = rig.images[0]
    wide = torch.randint(0, image.rows, (3, 2, 4), generator=torch.Generator().manual_seed(1))
    view = wide[:, 1, :]  # as an engine passes one layer's columns
    assert not view.is_contiguous()
    with GpuEngine(rig, [image]) as engine:
        engine.tables[0].kick(view)
        np.testing.assert_array_equal(engine.gather(0, view), image.decoded[view.numpy()])
        narrow = wide[:, 0, ::2].int()
        np.testing.assert_array_equal(engine.gather(0, narrow), image.decoded[narrow.numpy()])
        repeated = wide[0, 0, :1].expand(5)
        np.testing.assert_array_equal(engine.gather(0, repeated), image.decoded[repeated.numpy()])


def test_full_sets_bypass_and_are_right(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image], sets=1, quota=2) as engine:
        engine.step(0, np.arange(6))
        engine.step(0, np.array([1, 5, 0, 5, 5, 3]))
        stats = engine.tables[0].stats()
        assert engine.held(0) == 2
    assert stats["bypasses"] >= 6


def test_a_quota_of_nothing_claims_nothing(rig: Rig) -> None:
    with GpuEngine(rig, [rig.images[0]], quota=0) as engine:
        engine.step(0, np.array([4, 4, 9]))
        assert engine.held(0) == 0
        assert engine.tables[0].stats()["bypasses"] == 3


def test_quotas_move_without_flushing(rig: Rig) -> None:
    with GpuEngine(rig, rig.images[:2], sets=1, quota=4) as engine:
        engine.cache.set_quotas({0: 2, 1: 30})
        for step in range(3):
            engine.step(1, np.arange(step * 10, step * 10 + 10))
        assert engine.held(1) == 30
        engine.cache.set_quotas({0: 6, 1: 26})
        assert engine.held(1) == 30
        engine.step(0, np.arange(6))
        assert (engine.held(0), engine.held(1)) == (6, 26)


def test_the_daemons_wish_moves_a_quota_and_nonsense_does_not(rig: Rig) -> None:
    """A ring looks at its wish at one kick in LOOK_EVERY, whichever table's turn it is."""

    def looks(kick: int) -> bool:
        x = (kick ^ (kick >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        return (x ^ (x >> 16)) % state.LOOK_EVERY.value == 0

    spans = (range(n, 2000, 2) for n in (2, 3))
    assert all(4 <= sum(map(looks, span)) <= 40 for span in spans)
    first = next(kick for kick in range(2, 2000) if looks(kick)) - 2
    with GpuEngine(rig, rig.images[:2], sets=1, quota=16, first_kick=first) as engine:
        at = int(_core.protocol.OFFSET_QUOTA)
        wish = engine.channel.control(0)[at : at + 4].view(np.uint32)
        wish[0] = 1 + 3
        engine.step(0, np.arange(4))  # does not look
        assert engine.tables[0].quota == 16
        engine.step(0, np.arange(4))
        assert (engine.tables[0].quota, engine.tables[1].quota) == (3, 16)
        engine.step(0, np.arange(4))
        assert engine.tables[0].stats()["quota"] == 1 + 3
    for nonsense in (34, 2**31, 2**32 - 1):
        with GpuEngine(rig, rig.images[:1], sets=1, quota=16, first_kick=first + 1) as engine:
            engine.channel.control(0)[at : at + 4].view(np.uint32)[0] = nonsense
            engine.step(0, np.arange(4))
            assert engine.tables[0].quota == 16


def test_rows_that_no_trace_saw_are_zero_and_not_read(rig: Rig) -> None:
    image = rig.images[0]
    bits = seen.empty(image.rows)
    seen.mark(bits, np.arange(0, image.rows, 3))
    with GpuEngine(rig, [image], sets=1, quota=4) as engine:
        engine.tables[0].skip_unseen(bits)
        rng = np.random.default_rng(5)
        for _ in range(4):
            ids = rng.integers(0, image.rows, 16)
            tensor = torch.from_numpy(ids)
            engine.tables[0].kick(tensor)
            got = engine.gather(0, tensor)
            known = ids % 3 == 0
            np.testing.assert_array_equal(got[known], image.decoded[ids[known]])
            assert not got[~known].any()
            assert (~known).any()
            assert known.any()
        stats = engine.tables[0].stats()
        assert stats["lookups"] == stats["hits"] + stats["misses"] + stats["bypasses"] < 64
        with pytest.raises(RowError, match=str(image.rows)):
            engine.step(0, np.array([image.rows]))


def test_a_seen_set_that_was_replaced_is_kept(rig: Rig) -> None:
    """A graph that was captured with it reads its memory whenever it is replayed."""
    image = rig.images[0]
    with GpuEngine(rig, [image]) as engine:
        table = engine.tables[0]
        table.skip_unseen(seen.empty(image.rows))
        first = weakref.ref(table._seen)
        table.skip_unseen(seen.empty(image.rows))
        assert first() is not None


def test_ids_that_were_not_kicked_are_demanded(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image]) as engine:
        engine.tables[0].kick(torch.arange(8))
        got = engine.gather(0, np.array([3, 20, 5, 21]))
        np.testing.assert_array_equal(got, image.decoded[[3, 20, 5, 21]])
        assert engine.tables[0].stats()["demands"] == 2
        engine.step(0, np.arange(8))
        stats = engine.tables[0].stats()
    assert stats["demands"] == 2
    assert stats["misses"] == 10


def test_two_kicks_before_one_gather(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image]) as engine:
        first, second = torch.arange(0, 6), torch.arange(4, 10)
        engine.tables[0].kick(first)
        engine.tables[0].kick(second)
        np.testing.assert_array_equal(engine.gather(0, second), image.decoded[4:10])
        # What the first kick claimed was filled too: claimed is not filled, and nobody forgot it.
        engine.step(0, np.arange(0, 6))
        assert engine.tables[0].stats()["misses"] == 10


def test_kicks_without_a_gather_never_block_the_ring(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image], rows_max=4, arena_pages=4) as engine:
        for kick in range(11):
            engine.tables[0].kick(torch.arange(kick * 3, kick * 3 + 3))
        engine.step(0, np.arange(30, 34))
        stats = engine.tables[0].stats()
    assert stats["ring_full"] >= 9
    assert stats["published"] == 12


def test_counters_that_wrap(rig: Rig) -> None:
    """Stamps pass 2^24 and sequences 2^32; rows stay right and stay cached."""
    image = rig.images[0]
    with GpuEngine(
        rig, [image], sets=1, quota=8, first_kick=(1 << 24) - 4, first_sequence=(1 << 32) - 3
    ) as engine:
        for step in range(7):
            engine.step(0, np.array([1, 2, step + 10]))
        stats = engine.tables[0].stats()
    assert stats["hits"] == 12
    assert stats["published"] == (1 << 32) + 4


def test_the_sweep_keeps_old_words_old(rig: Rig) -> None:
    """A word last touched 2^24 kicks ago must not look young."""
    with GpuEngine(rig, [rig.images[0]], sets=1, quota=4) as engine:
        engine.step(0, np.array([7]))
        words, cache = engine.cache.words, engine.cache.state
        for _ in range(4):
            cache[state.C_KICK.value] += (1 << 22) - 8
            while int(cache[state.C_KICK.value]) % state.SWEEP_EVERY.value:
                cache[state.C_KICK.value] += 1
            engine.step(0, np.array([8]))
        kick = int(cache[state.C_KICK.value]) - 1
        old = int(words[(words >> 24) & ((1 << 34) - 1) == 8][0])
        assert (kick - old) & state.STAMP_MASK.value == state.AGE_MAX.value
        # The oldest goes first: row 7, not row 8.
        for row in (20, 21, 22):
            engine.step(0, np.array([row]))
        hits = engine.tables[0].stats()["hits"]
        engine.step(0, np.array([8]))
        assert engine.tables[0].stats()["hits"] == hits + 1


def test_fewer_sets_give_up_their_words(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image], sets=4, quota=16) as engine:
        engine.step(0, np.arange(16))
        engine.step(0, np.arange(16, 20))
        held = engine.held(0)
        engine.cache.resize(1)
        # The last step's rows may be in flight for all that the cache knows; others are gone.
        assert 4 <= engine.held(0) < held
        for step in range(3):
            engine.step(0, np.arange(step, step + 16))
        assert int((engine.cache.words[32:] != 0).sum()) <= 4
        engine.cache.resize(4)
        engine.step(0, np.arange(16))


def test_rows_of_another_rank_are_zero_and_never_read(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image], row_lo=100, row_hi=200) as engine:
        ids = np.array([5, 150, 399, 100, 200])
        got = engine.gather(0, ids)
        assert engine.tables[0].stats()["lookups"] == 2
    np.testing.assert_array_equal(got[[1, 3]], image.decoded[[150, 100]])
    assert not got[[0, 2, 4]].any()


def test_steps_larger_than_a_request_go_in_parts(rig: Rig) -> None:
    image = rig.images[0]
    with GpuEngine(rig, [image], rows_max=8) as engine:
        ids = np.random.default_rng(3).integers(0, image.rows, (5, 4))
        engine.tables[0].kick(torch.from_numpy(ids))
        np.testing.assert_array_equal(engine.gather(0, ids), image.decoded[ids])
        wide = torch.from_numpy(np.stack([ids, ids], axis=1))[:, 0]  # strided
        np.testing.assert_array_equal(engine.gather(0, wide), image.decoded[ids])
        engine.step(0, ids[:2, :])
        assert engine.tables[0].stats()["published"] >= 3


def test_a_large_kick_starts_what_the_arena_has_room_for(rig: Rig) -> None:
    """Its sub-batches are gathered, or filled and given back if other rows are wanted after all."""
    image = rig.images[0]
    with GpuEngine(rig, [image], sets=1, rows_max=4, arena_pages=12) as engine:
        table = engine.tables[0]
        large, other = torch.arange(14), torch.arange(20, 23)
        for _ in range(2):
            table.kick(large)
            np.testing.assert_array_equal(engine.gather(0, large), image.decoded[:14])
        table.kick(large + 30)
        np.testing.assert_array_equal(engine.gather(0, other), image.decoded[20:23])
        table.kick(large + 60)
        table.kick(other + 50)
        np.testing.assert_array_equal(engine.gather(0, other + 50), image.decoded[70:73])
        np.testing.assert_array_equal(engine.gather(0, large + 30), image.decoded[30:44])
        table.kick(large)
        with pytest.raises(HookError, match="between a kick and its gather"):
            table.warm(other)
        stats = table.stats()
        assert stats["published"] >= 3
        assert stats["failed"] == 0


def test_a_kick_never_starts_what_has_to_wait_for_a_gather(rig: Rig) -> None:
    """On a GPU the gather's stream waits for the kick; one part is then as much as may start."""
    image = rig.images[0]
    with GpuEngine(rig, [image], rows_max=8, arena_pages=12) as engine:
        table = engine.tables[0]
        table._ahead = 2  # as on a GPU
        ids = torch.arange(20)
        table.kick(ids)
        assert table._parts is not None
        assert len(table._parts.events) == 1
        table._ahead = 1  # the interpreter runs one thing at a time
        np.testing.assert_array_equal(engine.gather(0, ids), image.decoded[:20])


def test_warm_rows_are_hits(rig: Rig) -> None:
    with GpuEngine(rig, [rig.images[0]], rows_max=8) as engine:
        engine.tables[0].warm(torch.arange(12))
        engine.step(0, np.arange(4, 12))
        stats = engine.tables[0].stats()
    assert (stats["hits"], stats["misses"]) == (8, 12)


@pytest.mark.parametrize("table", [0, 2, 3, 4])
def test_the_dram_image_is_read_in_place(rig: Rig, table: int) -> None:
    image = rig.images[table]
    pages = pack(image.stored, image.image_id, image.generation).reshape(-1)
    dram = DramTable(pages, gpu_rig.view_of(image, 0, row_hi=image.rows - 1), device="cpu")
    ids = torch.tensor([[0, 7, image.rows - 1], [image.rows - 2, 7, 19]])
    raw = image.row_format == "raw"
    out = torch.full((2, 3, image.dim), 1, dtype=torch.uint8 if raw else torch.int16)
    dram.gather(ids, out)
    want = image.decoded[ids.numpy()].copy()
    want[0, 2] = 0  # another rank's
    np.testing.assert_array_equal(out.numpy().view(want.dtype), want)
    fit = int(_core.rows_per_page(image.row_bytes))
    pages[19 // fit * 4096 + 19 % fit * int(_core.row_stride(image.row_bytes)) + 1] ^= 1
    with pytest.raises(RowError, match=r"row 19 .*does not carry its tag"):
        dram.gather(ids, out)

"""The CPU twin over a real pump: rows bit for bit, whatever the calls, quotas and sizes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.twin_rig import Engine, Image, Rig, pack
from tierd.io import _core
from tierd.io._core import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

ROWS_MAX = 16
SHAPES = [
    (1500, 256, "e4m3_e8m0"),
    (333, 256, "e4m3_e8m0"),
    (700, 160, "e4m3"),
    (500, 160, "bf16"),
    (200, 263, "raw"),
]
FORMATS = ["e4m3_e8m0", "e4m3_e8m0", "e4m3", "bf16", "raw"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("twin") / "images", SHAPES, crc_sample=0)
    yield rig
    rig.close()


def test_the_packing_here_is_the_cores(rig: Rig) -> None:
    for image in rig.images:
        ours = pack(image.stored, image.image_id, image.generation)
        core = np.zeros_like(ours)
        _core.pack_pages(
            image.stored.ravel(), image.row_bytes, 0, image.image_id, image.generation,
            core.reshape(-1),
        )  # fmt: skip
        np.testing.assert_array_equal(ours, core)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=FORMATS)
def test_kick_then_gather(rig: Rig, number: int) -> None:
    rng = np.random.default_rng(number)
    image = rig.images[number]
    with Engine(rig, [image], sets=8, quota=32) as engine:
        for _ in range(30):
            ids = rng.integers(0, image.rows, (rng.integers(0, 8), 3))
            engine.tables[0].kick(ids)
            engine.check(0, ids)
        every = np.arange(image.rows)
        engine.check(0, every)


# --- sequences of calls --------------------------------------------------------------------------

TABLES = st.integers(0, 1)
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.one_of(st.integers(0, 3), st.integers(0, 3 * ROWS_MAX))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), TABLES, SIZES, SEEDS),
        st.tuples(st.just("kick"), TABLES, SIZES, SEEDS),
        st.tuples(st.just("gather"), TABLES, SIZES, SEEDS),
        st.tuples(st.just("kicked"), TABLES, st.just(0), st.just(0)),
        st.tuples(st.just("part"), TABLES, st.just(0), SEEDS),
        st.tuples(st.just("quota"), TABLES, st.integers(0, 32), st.just(0)),
        st.tuples(st.just("wish"), TABLES, st.integers(0, 40), st.just(0)),  # the daemon's
        st.tuples(st.just("wish"), TABLES, SEEDS, st.just(0)),
        st.tuples(st.just("resize"), st.just(0), st.integers(1, 4), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)


def draw_ids(image: Image, size: int, seed: int) -> NDArray[np.int64]:
    """Few hot rows, some cold ones, and duplicates."""
    rng = np.random.default_rng(seed)
    hot = rng.integers(0, 60, size)
    return np.where(rng.random(size) < 0.7, hot, rng.integers(0, image.rows, size))


class Run:
    """Two tables in one cache, driven by operations, each gather checked against the oracle."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kicked = [np.zeros(0, np.int64)] * 2
        self.gathered = [0, 0]
        self.sets = engine.cache.sets

    def do(self, operation: str, table: int, size: int, seed: int) -> None:
        engine = self.engine
        if operation == "quota":
            engine.tables[table].set_quota(size)
        elif operation == "wish":
            engine.wish(table, size)
        elif operation == "resize":
            engine.cache.resize(min(size, self.sets))
        elif operation == "kicked":
            self.check(table, self.kicked[table])
        elif operation == "part":
            rng = np.random.default_rng(seed)
            kicked = self.kicked[table]
            self.check(table, kicked[rng.random(len(kicked)) < 0.5])
        else:
            ids = draw_ids(engine.images[table], size, seed)
            if operation in ("step", "kick"):
                engine.tables[table].kick(ids)
                self.kicked[table] = ids
            if operation in ("step", "gather"):
                self.check(table, ids)

    def check(self, table: int, ids: NDArray[np.int64]) -> None:
        self.engine.check(table, ids)
        self.gathered[table] += 1

    def finish(self) -> None:
        for table in (0, 1):
            self.check(table, self.kicked[table])
            stats = self.engine.tables[table].stats()
            assert stats["lookups"] == stats["hits"] + stats["misses"] + stats["bypasses"]
            assert stats["steps"] == self.gathered[table]
            assert stats["tag_errors"] == stats["failed"] == 0
            doorbell = self.engine.control_word(table, p.OFFSET_DOORBELL)
            assert self.engine.control_word(table, p.OFFSET_RETIRED) == doorbell
            assert self.engine.cache.held(table) <= 32 * self.engine.cache.sets


@settings(
    max_examples=150, deadline=None, derandomize=True, print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    operations=OPERATIONS,
    sets=st.integers(1, 4),
    quota=st.sampled_from([2, 16, 32]),
    first_stamp=st.sampled_from([0, 2**24 - 100, 2**24 - 3]),
    first_sequence=st.sampled_from([0, 2**32 - 10]),
    arena_pages=st.sampled_from([ROWS_MAX, 40, 8 * ROWS_MAX]),
)
def test_any_sequence_of_calls(
    rig: Rig, *, operations: list[tuple[str, int, int, int]], **shape: int
) -> None:
    with Engine(rig, rig.images[:2], rows_max=ROWS_MAX, **shape) as engine:
        run = Run(engine)
        for operation in operations:
            run.do(*operation)
        run.finish()


# --- what the counters and the directory say -----------------------------------------------------


def test_hits_misses_and_bypasses_are_counted(rig: Rig) -> None:
    with Engine(rig, rig.images[:1], sets=1, quota=32) as engine:
        table = engine.tables[0]
        ids = np.arange(20)
        table.kick(ids)
        engine.check(0, ids)
        again = np.concatenate([ids, ids[:5], [40]])
        table.kick(again)
        engine.check(0, again)
        stats = table.stats()
        assert (stats["lookups"], stats["hits"], stats["misses"]) == (46, 25, 21)
        assert stats["bypasses"] == stats["demands"] == 0
        # 40 rows of one kick in 32 slots: what is in flight does not go, the rest passes by.
        many = np.arange(100, 140)
        table.kick(many)
        engine.check(0, many)
        stats = table.stats()
        assert (stats["misses"] - 21, stats["bypasses"]) == (32, 8)
        assert engine.cache.held(0) == 32
        engine.check(0, many[:7])  # not the kicked ids any more
        assert table.stats()["demands"] == 7


def test_a_quota_is_kept_and_can_move(rig: Rig) -> None:
    with Engine(rig, rig.images[:2], sets=1, quota=8) as engine:
        engine.check(0, np.arange(50))
        engine.check(1, np.arange(50))
        assert [engine.cache.held(t) for t in (0, 1)] == [8, 8]
        engine.tables[0].set_quota(24)  # empty ways are free to take
        engine.check(0, np.arange(50))
        assert [engine.cache.held(t) for t in (0, 1)] == [24, 8]
        engine.tables[0].set_quota(4)
        engine.tables[1].set_quota(28)
        assert engine.cache.held(0) == 24  # nothing is flushed
        engine.check(1, np.arange(50, 100))
        assert [engine.cache.held(t) for t in (0, 1)] == [4, 28]
        engine.tables[1].set_quota(0)
        before = engine.tables[1].stats()["bypasses"]
        engine.check(1, np.arange(200, 210))
        assert engine.tables[1].stats()["bypasses"] - before <= 10
        with pytest.raises(ValueError, match="0 to 32 ways"):
            engine.tables[0].set_quota(33)


def test_the_daemons_wish_moves_a_quota_and_nonsense_does_not(rig: Rig) -> None:
    with Engine(rig, rig.images[:2], sets=1, quota=16) as engine:

        def quotas() -> list[int]:
            return [engine.tables[ring].stats()["quota"] - 1 for ring in (0, 1)]

        assert quotas() == [16, 16]
        engine.wish(0, 1 + 24)
        engine.wish(1, 1 + 8)
        engine.check(1, np.arange(40))
        assert quotas() == [16, 8]  # each follows at its own kick
        engine.check(0, np.arange(40))
        assert quotas() == [24, 8]
        assert [engine.cache.held(t) for t in (0, 1)] == [24, 8]
        for nonsense in (34, 2**31, 2**32 - 1):
            engine.wish(0, nonsense)
            engine.check(0, np.arange(40))
            assert quotas() == [24, 8]
        engine.wish(0, 1)
        engine.check(0, np.arange(3))
        assert quotas() == [0, 8]


def test_the_least_recent_rows_go_first(rig: Rig) -> None:
    with Engine(rig, rig.images[:1], sets=1, quota=32) as engine:
        for first in (0, 8, 16, 24):
            engine.check(0, np.arange(first, first + 8))
        engine.check(0, np.arange(8))  # touched again: 8..15 are now the oldest
        engine.check(0, np.arange(100, 108))
        before = engine.tables[0].stats()
        kept = np.concatenate([np.arange(8), np.arange(16, 32), np.arange(100, 108)])
        engine.check(0, kept)
        after = engine.tables[0].stats()
        assert after["hits"] - before["hits"] == len(kept)
        engine.check(0, np.arange(8, 16))
        assert engine.tables[0].stats()["misses"] - after["misses"] == 8


def test_what_another_table_has_in_flight_does_not_go(rig: Rig) -> None:
    with Engine(rig, rig.images[:2], sets=1, quota=32) as engine:
        first = np.arange(32)
        engine.tables[0].kick(first)  # claims every way, and is not gathered yet
        engine.tables[0].set_quota(0)
        for step in range(5):
            engine.check(1, np.arange(step * 20, step * 20 + 20))
        assert engine.cache.held(0) == 32
        engine.check(0, first)
        engine.check(1, np.arange(20))  # now they may go
        assert engine.cache.held(0) == 12


def test_fewer_sets_clear_what_they_give_up(rig: Rig) -> None:
    ids = np.arange(100)
    with Engine(rig, rig.images[:1], sets=16, quota=32) as engine:
        engine.check(0, ids)
        assert engine.cache.held(0) == 100
        engine.cache.resize(5)
        held = engine.cache.held(0)
        assert 0 < held < 100
        before = engine.tables[0].stats()["hits"]
        engine.check(0, ids)
        assert engine.tables[0].stats()["hits"] - before == held  # the other sets kept theirs
        engine.cache.resize(16)
        engine.check(0, ids)
        for sets in (0, 17):
            with pytest.raises(ValueError, match="sets must be between 1 and 16"):
                engine.cache.resize(sets)


def test_a_table_number_leaves_nothing_behind(rig: Rig) -> None:
    """A number that is bound to another image must not find the first image's rows."""
    ids = np.arange(40)
    with Engine(rig, rig.images[:1], sets=4, quota=32) as engine:
        engine.check(0, ids)
        with pytest.raises(ValueError, match="has a client already"):
            make_table(engine, rig.images[0])
        engine.tables.clear()
        assert engine.cache.held(0) == 0
        number = engine.attached
        assert number is not None
        rig.pump.remove_channel(number)
        engine.images = [rig.images[1]]
        engine.attach()
        engine.tables = [make_table(engine, rig.images[1])]
        engine.check(0, ids)


def make_table(engine: Engine, image: Image, **changes: Any) -> Any:
    options = {
        "table": 0, "image_id": image.image_id, "generation": image.generation,
        "rows": image.rows, "dim": image.dim, "row_format": image.row_format, "quota": 32,
        **changes,
    }  # fmt: skip
    return _core.TwinTable(engine.cache, engine.channel, 0, engine.rig.pump.wake_fd, **options)


def test_a_late_step_is_counted(rig: Rig) -> None:
    ids = np.arange(4)
    with Engine(rig, rig.images[:1], serve=False) as engine:
        engine.tables[0].kick(ids)
        gather = threading.Thread(target=engine.gather, args=(0, ids))
        gather.start()
        while engine.control_word(0, p.OFFSET_WAITER) == 0:
            pass  # until it sleeps
        engine.attach()
        gather.join()
        stats = engine.tables[0].stats()
        assert stats["late_steps"] == stats["steps"] == 1
        assert stats["stall_ns"] > 20_000
        engine.check(0, ids)  # all hits
        assert engine.tables[0].stats()["stall_ns"] == stats["stall_ns"]
        assert engine.tables[0].stats()["late_steps"] == 1


def test_more_misses_than_the_ring_holds(rig: Rig) -> None:
    """A kick of many sub-batches fills its own earlier requests to come on."""
    with Engine(rig, rig.images[:1], sets=64, quota=32, rows_max=4, arena_pages=4) as engine:
        ids = np.random.default_rng(1).permutation(1500)
        engine.tables[0].kick(ids)
        assert engine.tables[0].stats()["ring_full"] > 300
        engine.check(0, ids)
        assert engine.tables[0].stats()["published"] >= 1500 / 4


def test_kicks_without_gather_do_not_hold_the_cache(rig: Rig) -> None:
    with Engine(rig, rig.images[:1], sets=1, quota=32) as engine:
        for first in range(0, 1000, 10):
            engine.tables[0].kick(np.arange(first, first + 10))
        assert engine.tables[0].stats()["bypasses"] < 500
        engine.check(0, np.arange(990, 1000))
        before = engine.tables[0].stats()["bypasses"]
        engine.check(0, np.arange(32))
        assert engine.tables[0].stats()["bypasses"] == before


# --- what callers may bring ----------------------------------------------------------------------


def test_ids_of_any_shape_stride_and_width(rig: Rig) -> None:
    image = rig.images[0]
    base = np.random.default_rng(2).integers(0, image.rows, (6, 8, 10))
    variants = [
        base, base[::2, ::-1, 3:7], base.transpose(2, 0, 1), base[0, 0], base[1, 1, 1].reshape(()),
        base.astype(np.int32)[:, 1::3], np.broadcast_to(base[0, 0, 0], (3, 4)), base[:, :0],
        np.asfortranarray(base),
    ]  # fmt: skip
    with Engine(rig, [image], sets=8, quota=32) as engine:
        for ids in variants:
            engine.tables[0].kick(ids)
            engine.check(0, np.ascontiguousarray(ids))  # the same values: not a demand
        assert engine.tables[0].stats()["demands"] == 0
        frozen = base[0].copy()
        frozen.flags.writeable = False
        engine.check(0, frozen)


def test_torch_tensors(rig: Rig) -> None:
    image = rig.images[0]
    ids = torch.arange(24).reshape(4, 6).t()
    with Engine(rig, [image], sets=8, quota=32) as engine:
        out = torch.full((6, 4, image.dim), 7.0, dtype=torch.bfloat16)
        engine.tables[0].kick(ids)
        engine.tables[0].gather(ids, out)
        want = image.decoded[ids.numpy()]
        np.testing.assert_array_equal(out.view(torch.int16).numpy().view(np.uint16), want)
        assert engine.tables[0].stats()["demands"] == 0


@pytest.mark.parametrize(
    ("bad", "position"), [(-1, 0), (1500, 7), (2**40, 23), (-(2**63), 11), (2**63 - 1, 5)]
)
def test_a_bad_id_is_named_and_changes_nothing(rig: Rig, bad: int, position: int) -> None:
    with Engine(rig, rig.images[:1], sets=8, quota=32) as engine:
        good = np.arange(24).reshape(4, 6)
        engine.tables[0].kick(good)
        before = (engine.tables[0].stats(), engine.cache.held(0), engine.cache.kicks)
        ids = good.copy()
        ids.flat[position] = bad
        message = f"id {bad} at position {position} is outside the table's 1500 rows"
        with pytest.raises(IndexError, match=message):
            engine.tables[0].kick(ids)
        with pytest.raises(IndexError, match=message):
            engine.gather(0, ids)
        assert (engine.tables[0].stats(), engine.cache.held(0), engine.cache.kicks) == before
        engine.check(0, good)
        assert engine.tables[0].stats()["demands"] == 0


def test_arguments_of_the_wrong_kind(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, rig.images[:1], sets=8) as engine:
        table = engine.tables[0]
        ids = np.arange(6).reshape(2, 3)
        for wrong in (ids.astype(np.uint64), ids.astype(np.int16), ids.astype(float)):
            with pytest.raises(TypeError, match="int64 or int32"):
                table.kick(wrong)
        for shape in [(2, 3, 255), (3, 2, 256), (6, 256), (2, 3), (2, 3, 256, 1)]:
            with pytest.raises(ValueError, match="last dimension of 256"):
                table.gather(ids, np.zeros(shape, np.uint16))
        for dtype in (np.uint8, np.float32, np.float16):
            with pytest.raises(TypeError, match="uint16, int16 or bfloat16"):
                table.gather(ids, np.zeros((2, 3, 256), dtype))
        with pytest.raises(ValueError, match="contiguous"):
            table.gather(ids, np.zeros((2, 3, 512), np.uint16)[..., ::2])
        frozen = np.zeros((2, 3, 256), np.uint16)
        frozen.flags.writeable = False
        with pytest.raises(TypeError):
            table.gather(ids, frozen)
        assert table.stats()["lookups"] == 0
        engine.tables.clear()
        del table
        for message, changes in {
            "rows of 264 bytes, the table's have 512": {"row_format": "bf16"},
            "ring is for table 0, not 1": {"table": 1},
            "rows must be between": {"rows": 0},
            "0 to 32 ways": {"quota": 33},
            "row_format must be": {"row_format": "fp4"},
            "multiple of 32": {"dim": 255},
        }.items():
            with pytest.raises(ValueError, match=message):
                make_table(engine, image, **changes)
        engine.tables = [make_table(engine, image)]  # none of these left the ring taken
        engine.check(0, ids)


def test_canonical_zero(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=32, quota=32, canonical_zero=True) as engine:
        ids = np.arange(500)
        got = engine.gather(0, ids)
        want = image.decoded[ids]
        assert (want == 0x8000).any()
        np.testing.assert_array_equal(got, np.where(want == 0x8000, 0, want))


def test_calls_from_several_threads_wait_for_each_other(rig: Rig) -> None:
    image = rig.images[0]
    with Engine(rig, [image], sets=2, quota=32) as engine:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(60):
                ids = rng.integers(0, image.rows, 20)
                engine.tables[0].kick(ids)
                engine.check(0, ids)

        run_threads(work, range(4))


def run_threads(work: Any, arguments: Any) -> None:
    errors: list[BaseException] = []

    def guarded(argument: Any) -> None:
        try:
            work(argument)
        except BaseException as error:  # noqa: BLE001  (told to the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(a,)) for a in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

"""Random lives of two GPU tables in one small cache, against numpy, over a real pump."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gpu_rig  # first: it decides that kernels are interpreted
import numpy as np
import pytest
import torch
from gpu_rig import GpuEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twin_rig import Rig

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = 90
assert gpu_rig.kernels_sync.INTERPRET


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("gpu") / "device"
    made = Rig(path, [(ROWS, 32, "e4m3_e8m0"), (ROWS, 32, "e4m3_e8m0")])
    yield made
    made.close()


def ids() -> st.SearchStrategy[list[int]]:
    """Few distinct rows and many, in runs of duplicates."""
    rows = st.one_of(st.integers(0, ROWS - 1), st.integers(0, 7))
    return st.lists(rows, min_size=1, max_size=8)


TABLE = st.integers(0, 1)
OPERATION = st.one_of(
    st.tuples(st.just("step"), TABLE, ids()),
    st.tuples(st.just("kick"), TABLE, ids()),
    st.tuples(st.just("gather"), TABLE, ids()),  # of ids that nobody kicked, or some did
    st.tuples(st.just("parts"), TABLE, ids(), ids()),
    st.tuples(st.just("warm"), TABLE, ids()),
    st.tuples(st.just("quota"), st.integers(0, 32)),
    st.tuples(st.just("resize"), st.integers(1, 2)),
)


@pytest.mark.timeout(180)  # half a minute of a CPU, in the interpreter
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    operations=st.lists(OPERATION, min_size=3, max_size=7),
    quota=st.integers(0, 16),
    arena=st.sampled_from([8, 11, 24]),
    start=st.sampled_from([0, (1 << 24) - 4, (1 << 32) - 3]),
)
def test_any_life_serves_the_right_rows(
    rig: Rig, operations: list[tuple[object, ...]], quota: int, arena: int, start: int
) -> None:
    with GpuEngine(
        rig, rig.images, sets=2, rows_max=8, arena_pages=arena, quota=quota,
        first_kick=start, first_sequence=start & 0xFFFFFFFF,
    ) as engine:  # fmt: skip
        for table in engine.tables:
            table._timeout_ns = 2_000_000_000  # a failure should not take the test's minute
        for operation in operations:
            play(engine, operation)
        check_directory(engine)
        for number in (0, 1):
            engine.step(number, np.arange(number, 8))
            stats = engine.tables[number].stats()
            found = stats["hits"] + stats["misses"] + stats["bypasses"]
            assert stats["lookups"] == found
            assert not stats["failed"]
            assert not stats["tag_errors"]


def play(engine: GpuEngine, operation: tuple[object, ...]) -> None:
    what, *rest = operation
    if what == "quota":
        ways = int(rest[0])  # type: ignore[call-overload]
        engine.cache.set_quotas({0: ways, 1: 32 - ways})
        return
    if what == "resize":
        engine.cache.resize(int(rest[0]))  # type: ignore[call-overload]
        return
    table, wanted = int(rest[0]), np.array(rest[1], np.int64)  # type: ignore[call-overload]
    decoded = engine.images[table].decoded
    if what == "step":
        engine.step(table, wanted)
    elif what == "kick":
        engine.tables[table].kick(torch.from_numpy(wanted))
    elif what == "warm":
        if engine.tables[table]._kicked is None:
            engine.tables[table].warm(torch.from_numpy(wanted))
    elif what == "gather":
        np.testing.assert_array_equal(engine.gather(table, wanted), decoded[wanted])
    else:
        many = np.concatenate([wanted, np.array(rest[2], np.int64), wanted])
        np.testing.assert_array_equal(engine.gather(table, many), decoded[many])


def check_directory(engine: GpuEngine) -> None:
    """Every word lies in its row's set or in one given up, and no table is far above its quota."""
    words = engine.cache.words.numpy()
    live = words[words != 0]
    rows = (live >> 24 & ((1 << 34) - 1)) - 1
    assert ((rows >= 0) & (rows < ROWS)).all()
    assert set((live >> 58 & 63).tolist()) <= {0, 1}

"""The sample ring: what a client looked up, as the daemon reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.gpu_rig import GpuEngine
from tests.unit.twin_rig import Engine, Rig
from tierd.io import _core
from tierd.io.samples import SampleReader
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

P = _core.protocol


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("samples") / "images", [(1500, 256, "e4m3_e8m0")] * 2)
    yield made
    made.close()


def samples_at(channel: _core.Channel, ring: int) -> int:
    entry = P.OFFSET_RINGS + ring * P.RING_ENTRY_BYTES
    return int(channel.buffer()[entry + 40 : entry + 48].view(np.uint64)[0])


def reader_of(channel: _core.Channel, ring: int, threshold: int | None = None) -> SampleReader:
    at = samples_at(channel, ring)
    if threshold is not None:
        channel.buffer()[at + 12 : at + 16].view(np.uint32)[0] = threshold
    return SampleReader(channel.buffer(), at, ring)


def picked(ids: NDArray[np.int64], threshold: int) -> list[int]:
    return [int(i) for i in ids.ravel() if P.sample_hash(int(i)) < threshold]


def test_the_twin_samples_what_the_hash_picks(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    threshold = 1 << 30  # one row in four
    with Engine(rig, rig.images, sets=8, quota=16) as engine:
        readers = [reader_of(engine.channel, ring, threshold) for ring in range(2)]
        stamps = []
        for step in range(20):
            ids = rng.integers(0, 1500, 12 if step != 7 else 40)  # 40 are more than a request
            engine.check(step % 2, ids)
            got = readers[step % 2].read()
            assert got.rows.tolist() == picked(ids, threshold)
            assert (got.table, got.rate, got.lost) == (step % 2, 0.25, 0)
            assert (got.prefill == (step == 7)).all()
            stamps += got.stamps.tolist()
        assert readers[0].read().rows.tolist() == []
        # One counter orders the samples of both tables.
        assert stamps == sorted(stamps)
        assert len(set(stamps)) > 10


def test_the_gpu_samples_what_the_hash_picks(rig: Rig) -> None:
    """Two tables of one cache; a step that is kicked, and a prefill in two parts."""
    rows = np.arange(1500)
    marked = picked(rows, P.SAMPLE_THRESHOLD)
    others = np.setdiff1d(rows, marked)
    with GpuEngine(rig, rig.images, rows_max=8) as engine:
        readers = [reader_of(engine.channel, ring) for ring in range(2)]
        engine.step(0, np.array([*others[:3], *marked[:3]]))
        engine.step(1, np.array([*marked[3:5], *others[:2]]))
        engine.gather(0, np.array([*marked[5:8], *others[:7]]))
        first, second = readers[0].read(), readers[1].read()
        assert sorted(first.rows.tolist()) == sorted(marked[:3] + marked[5:8])
        assert sorted(second.rows.tolist()) == marked[3:5]
        assert first.prefill.tolist() == [False] * 3 + [True] * 3
        assert second.stamps.tolist() == [first.stamps[0] + 1] * 2
        assert (first.rate, first.lost) == (1 / 64, 0)
        assert readers[0].read().rows.tolist() == []


def test_a_reader_that_comes_too_late_says_what_it_lost(rig: Rig) -> None:
    with Engine(rig, rig.images[:1], sets=8, quota=32) as engine:
        reader = reader_of(engine.channel, 0, (1 << 32) - 1)
        ids = np.arange(1000)
        for _ in range(5):
            engine.check(0, ids)
        got = reader.read()
        assert got.lost == 5000 - 2048
        assert got.rows.tolist() == [*range(952, 1000), *range(1000), *range(1000)]


@pytest.mark.parametrize("written", [2**64 - 1, 2**63, 5, 10**9])
def test_nonsense_of_a_client_stays_nonsense(rig: Rig, written: int) -> None:
    with Engine(rig, rig.images[:1], sets=8, quota=32) as engine:
        reader = reader_of(engine.channel, 0)
        at = samples_at(engine.channel, 0)
        engine.channel.buffer()[at : at + 8].view(np.uint64)[0] = written
        engine.channel.buffer()[at + 64 : at + 4096] = 0xFF
        assert len(reader.read().rows) <= 2048
        for offset in (0, 63, engine.channel.bytes):
            with pytest.raises(ValueError, match="outside"):
                SampleReader(engine.channel.buffer(), offset, 0)


def test_probed_windows_survive_json() -> None:
    windows = ProbedWindows(
        "H200", "transformers 5", "demo", {"torch": "2"}, "2026-11-30", {8: 0.011},
        {1: {8: 0.0003}, 14: {8: 0.009, 128: 0.01}},
    )  # fmt: skip
    assert ProbedWindows.from_json(windows.to_json() | {"newer": 1}) == windows

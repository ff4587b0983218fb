"""Traces: the file, the policies, replays, splits, plots, seen-sets, and what is refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.cli import cli
from tierd.controller.readtime import PAPER_DISK
from tierd.errors import SeenSetError, TraceError
from tierd.io.seen import is_wanted
from tierd.io.seen import load as load_seen
from tierd.io.tracefile import TracedTable, TraceWriter, read_trace
from tierd.tools import plots, policies
from tierd.tools import trace as tool

if TYPE_CHECKING:
    from numpy.typing import NDArray

TABLES = (
    TracedTable("layers.1.engram", 1, 50_000, 264, 3334, "ab"),
    TracedTable("layers.14.engram", 14, 50_000, 264, 3334, "cd"),
)
Kick = tuple[int, list[int], bool]


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def refusal(*words: object) -> str:
    result = invoke(*words)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("tierd: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def write(path: Path, kicks: list[Kick], model: str = "v41") -> Path:
    with TraceWriter(path, model, TABLES, engine="test") as writer:
        for table, ids, prefill in kicks:
            writer.add(table, ids, prefill=prefill)
    return path


def sessions(path: Path, steps: int = 300, model: str = "v41") -> Path:
    """Two tables: the first reuses 600 rows, the second 4,000; a tenth is new. A prompt first."""
    rng = np.random.default_rng(0)
    kicks: list[Kick] = [(n, list(range(500)), True) for n in range(2)]
    for _ in range(steps):
        for table, hot in ((0, 600), (1, 4000)):
            ids = np.where(
                rng.random(64) < 0.9, rng.integers(0, hot, 64), rng.integers(hot, 50_000, 64)
            )
            kicks.append((table, ids.tolist(), False))
    return write(path, kicks, model)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(0, 2**32 - 1), max_size=30), st.booleans()
        ),
        max_size=20,
    )
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, kicks: list[Kick]
) -> None:
    path = write(tmp_path_factory.mktemp("trace") / "t", kicks)
    trace = read_trace(path)
    assert (trace.model, trace.tables, trace.made_by, trace.cut) == (
        "v41", TABLES, {"engine": "test"}, False,
    )  # fmt: skip
    assert trace.ids.tolist() == [row for _, ids, _ in kicks for row in ids]
    for number in range(2):
        mine = [(ids, prefill) for table, ids, prefill in kicks if table == number]
        ids, step, prefill = trace.of_table(number)
        assert ids.tolist() == [row for rows, _ in mine for row in rows]
        assert step.tolist() == [n for n, (rows, _) in enumerate(mine) for _ in rows]
        assert prefill.tolist() == [flag for rows, flag in mine for _ in rows]


def test_a_trace_that_a_killed_engine_left_is_read_up_to_its_last_block(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, "v41", TABLES) as writer:
        for _ in range(3):
            writer.add(0, np.arange(1 << 18))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    trace = read_trace(path)
    assert trace.cut
    assert len(trace.ids) == 2 << 18
    assert "cut short" in invoke("trace", "replay", path, "--sizes", "10").stdout


def damage(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda data: b"", "not a trace"),
        (lambda data: b"\x89PNG" + data[4:], "not a trace"),
        (lambda data: damage(data, 8, b"\x07"), "version 7"),
        (lambda data: damage(data, 16, b"!"), "damaged"),
        (lambda data: damage(data, len(data) - 9, b"\xff\xff\xff\xff\xff\xff\xff"), "damaged"),
    ],
)
def test_damaged_traces_are_refused(tmp_path: Path, change: Any, word: str) -> None:
    path = write(tmp_path / "t", [(0, [1, 2, 3], False)])
    path.write_bytes(change(path.read_bytes()))
    assert word in refusal("trace", "replay", path)
    with pytest.raises(TraceError):
        read_trace(path)


def test_refusals(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t", steps=20)
    assert str(tmp_path / "nothing") in refusal("trace", "replay", tmp_path / "nothing")
    assert "a trace of v41, not of other" in refusal("trace", "replay", path, "--model", "other")
    empty = write(tmp_path / "empty", [])
    assert "an empty trace" in refusal("trace", "replay", empty)
    replay = ("trace", "replay", path, "--cache-rows", 3200)
    assert "no window for layers.1.engram, layers.14.engram" in refusal(*replay)
    both = ("--window", "layers.1.engram=0.27", "--window", "layers.14.engram=9.35")
    assert "write TABLE=MS" in refusal(*replay, "--window", "layers.1.engram=soon")
    assert "40 ways of 32" in refusal(*replay, *both, "--ways", "20,20")
    assert "1 quotas for 2 tables" in refusal(*replay, *both, "--ways", "20")
    other = sessions(tmp_path / "o", steps=20, model="other")
    seen = ("trace", "seen", path, other, "--table", "layers.1.engram", "--out", tmp_path / "s")
    assert "do not go together" in refusal(*seen)
    assert "no table x; there are: layers.1" in refusal(
        "trace", "seen", path, "--table", "x", "--out", tmp_path / "s"
    )
    assert "cannot be written" in refusal(
        "trace", "seen", path, "--table", "layers.1.engram", "--out", tmp_path / "no" / "s"
    )
    with pytest.raises(SeenSetError, match="not a seen-set"):
        load_seen(path)


# --- policies ------------------------------------------------------------------------------------


def lru_hits(ids: list[int], counted: list[bool], size: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row, counts in zip(ids, counted, strict=True):
        hits += counts and row in cache
        cache[row] = None
        cache.move_to_end(row)
        if len(cache) > size:
            cache.popitem(last=False)
    return hits / sum(counted)


lookups = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=200)


@settings(deadline=None)
@given(lookups, st.integers(1, 40))
def test_lru_is_lru(pairs: list[tuple[int, bool]], size: int) -> None:
    ids, counted = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    (found,) = policies.hit_ratios(ids, counted, [size], "lru")
    if counted.any():
        assert found == pytest.approx(lru_hits(ids.tolist(), counted.tolist(), size))
    else:
        assert np.isnan(found)


@settings(deadline=None)
@given(lookups, st.integers(1, 40), st.sampled_from(["clock", "s3fifo"]))
def test_no_policy_hits_what_it_cannot(
    pairs: list[tuple[int, bool]], size: int, policy: str
) -> None:
    ids = np.array([p[0] for p in pairs], np.int64)
    counted = np.ones(len(ids), bool)
    small, large = policies.hit_ratios(ids, counted, [size, 1000], policy)
    compulsory = 1 - len(np.unique(ids)) / len(ids)
    assert 0 <= small <= compulsory + 1e-9
    assert large == pytest.approx(compulsory)


def loop_and_scan() -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A hot set of 50 rows, each used twice between scans of 200 new ones."""
    ids, fresh = [], 1000
    for _ in range(40):
        ids += [*range(50), *range(50), *range(fresh, fresh + 200)]
        fresh += 200
    return np.array(ids, np.int64), np.ones(len(ids), bool)


def test_policies_differ_where_they_should() -> None:
    """A scan washes an LRU cache out and leaves S3-FIFO's main queue alone."""
    ids, counted = loop_and_scan()
    at = {name: policies.hit_ratios(ids, counted, [100], name)[0] for name in policies.POLICIES}
    assert at["lru"] == pytest.approx(1 / 6, abs=0.02)
    assert at["s3fifo"] > at["lru"] + 0.1
    assert at["static"] == pytest.approx(1 / 3, abs=0.02)
    assert 0 < at["clock"] <= 1 / 3


def test_a_sampled_replay_is_near_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids = (20_000 * rng.random(120_000) ** 3).astype(np.int64)
    counted = np.ones(len(ids), bool)
    whole = policies.hit_ratios(ids, counted, [1000, 5000], "clock")
    monkeypatch.setattr(policies, "PLAYED_MAX", 12_000)
    part = policies.hit_ratios(ids, counted, [1000, 5000], "clock")
    assert part == pytest.approx(whole, abs=0.03)


# --- replays -------------------------------------------------------------------------------------


def test_a_replay_counts_decode_and_warms_with_the_rest(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t")
    result = invoke("trace", "replay", path, "--sizes", "600,6000", "--policy", "clock", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    first, second = found["tables"]
    assert first["lookups"] == 500 + 300 * 64
    assert first["lookups_per_step"] == 64
    assert set(first["hit_ratio"]) == {"lru", "clock"}
    # 600 hot rows fit 6,000 and mostly 600; 4,000 do not fit 600.
    assert first["hit_ratio"]["lru"][1] == pytest.approx(0.9, abs=0.03)
    assert second["hit_ratio"]["lru"][0] < 0.25
    shown = invoke("trace", "replay", path, "--sizes", "600").stdout
    assert "layers.14.engram" in shown


def test_splits_are_played_step_by_step(tmp_path: Path) -> None:
    trace = tool.load(sessions(tmp_path / "t"), model=None)
    windows = {"layers.1.engram": 0.27, "layers.14.engram": 0.35}
    found = tool.splits(trace, cache_rows=3200, windows_ms=windows, device=PAPER_DISK)
    assert [one["ways"] for one in found["splits"]] == [[w, 32 - w] for w in range(0, 33, 2)]
    growth = [one["growth_ms"] for one in found["splits"]]
    # Neither end is best: the short window's 600 rows need 6 ways, the rest helps the other.
    assert 2 <= int(np.argmin(growth)) <= 10
    assert growth[-1] > min(growth)
    assert growth[0] > min(growth) + 0.03
    bare = found["splits"][0]
    assert bare["pages"][0] == pytest.approx(64, abs=3)


def test_plots_are_written_and_the_same_each_time(tmp_path: Path) -> None:
    path = sessions(tmp_path / "t", steps=60)
    result = invoke(
        "trace", "replay", path, "--cache-rows", 3200, "--window", "layers.1.engram=0.27",
        "--window", "layers.14.engram=9.35", "--json", "--plot", tmp_path / "plots",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sorted(Path(file).name for file in found["plots"]) == sorted(
        f"{stem}.{form}" for stem in ("miss_curves", "split", "windows") for form in ("png", "svg")
    )
    for file in map(Path, found["plots"]):
        assert file.stat().st_size > 2000
        assert file.suffix == ".png" or b"layers.14.engram" in file.read_bytes()
    (again,) = (f for f in plots.split(found["split"], tmp_path / "again") if f.endswith("svg"))
    assert Path(again).read_bytes() == (tmp_path / "plots" / "split.svg").read_bytes()


def test_seen_sets_from_traces(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [(0, [1, 2, 3], False), (1, [7], False)])
    second = write(tmp_path / "b", [(0, [3, 49_999], True)])
    out = tmp_path / "seen.npz"
    words = ("trace", "seen", first, second, "--table", "layers.1.engram", "--out", out)
    assert "4 lookups" not in invoke(*words).stdout
    made = load_seen(out)
    assert (made.model, made.table, made.rows, made.fingerprint) == (
        "v41", "layers.1.engram", 50_000, "ab",
    )  # fmt: skip
    assert made.lookups == 5
    asked = np.array([0, 1, 2, 3, 7, 49_999])
    assert is_wanted(made.bits, asked).tolist() == [False, True, True, True, False, True]

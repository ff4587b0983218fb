"""Placement and size: the cheapest tier in time, and whether a cache pays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.controller.curves import MissCurve
from tierd.controller.load import NodeLoad, TableLoad, distinct_pages, predict
from tierd.controller.placement import TableNeed, Tier, place
from tierd.controller.readtime import PAPER_DISK, ReadTime
from tierd.controller.size import advise, best_ways
from tierd.io.seen import empty, is_wanted, mark, share

AGENT = MissCurve.of([0, 250e3, 5e5, 1e6, 5e6], [1, 0.19, 0.15, 0.13, 0.1])
DISK, DRAM = Tier("disk", (PAPER_DISK,)), Tier("dram", (), 300 * 2.0**30)
REMOTE = Tier("remote", (ReadTime(0.015, 0.33),))


def need(layer: int, window: float, curve: MissCurve | None = None) -> TableNeed:
    return TableNeed(f"t{layer}", layer, 384_006_168, 264, 25_600_412, window, 740.0, curve)


V41 = [need(14, 9.35), need(1, 0.27)]


def test_the_papers_placement() -> None:
    """Layer 14 fits on one uncached disk; layer 1 does not, and not behind a small cache either."""
    plan = place(V41, [DISK, DRAM])
    assert [(one.table.layer, one.choice) for one in plan.tables] == [(1, "dram"), (14, "disk")]
    first, second = plan.tables
    assert first.refused[0].choice == "disk"
    assert first.refused[0].why.startswith("reads 2.56 ms, window 0.27 ms")
    assert second.refused == ()
    assert second.read_ms == pytest.approx(2.557, abs=0.01)
    assert (plan.growth_ms, plan.problem) == (0.0, "")
    assert (plan.host_bytes, plan.disk_bytes, plan.hbm_bytes) == (104_859_287_552,) * 2 + (0,)


def test_over_rdma_both_are_in_time_uncached() -> None:
    plan = place(V41, [REMOTE])
    assert [one.choice for one in plan.tables] == ["remote", "remote"]
    assert plan.tables[0].read_ms < 0.27


def test_a_cache_is_taken_where_it_brings_a_table_in_time() -> None:
    tables = [need(14, 9.35), need(1, 0.27, AGENT)]
    plan = place(tables, [DISK, DRAM], cache_rows=1_000_000, allowed_ms=0.6)
    assert [one.choice for one in plan.tables] == ["disk + cache", "disk"]
    assert plan.tables[0].cache_rows == 1_000_000
    assert plan.hbm_bytes == 1_000_000 * 272
    strict = place(tables, [DISK, DRAM], cache_rows=1_000_000, allowed_ms=0.05)
    assert strict.tables[0].choice == "dram"
    why = {refusal.choice: refusal.why for refusal in strict.tables[0].refused}
    assert "late" in why["disk + cache"]


def test_what_a_table_does_to_those_before_it_counts() -> None:
    """Alone both are in time; together the second one's pages make the first late."""
    slow_later = Tier("disk", (ReadTime(0.05, 0.2, 2.0),))
    plan = place([need(1, 0.27), need(14, 9.35)], [slow_later, DRAM])
    assert [one.choice for one in plan.tables] == ["disk", "dram"]
    assert "makes the tables before it" in plan.tables[1].refused[0].why


def test_refusals_when_nothing_fits() -> None:
    plan = place(V41, [DISK, dataclasses.replace(DRAM, bytes_free=50 * 2.0**30)])
    assert "no tier takes t1" in plan.problem
    assert "47.7 GiB too large" in plan.problem
    assert "disk: reads" in plan.problem


def test_layer_0_has_no_window() -> None:
    plan = place([need(0, 0.0)], [DISK, DRAM])
    (one,) = plan.tables
    assert one.choice == "dram"
    assert "layer 0" in one.warnings[0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3000)), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_a_plan_keeps_its_promises(
    given_tables: list[tuple[float, float]], has_disk: bool, has_remote: bool
) -> None:
    tables = [
        TableNeed(f"t{n}", n + 1, 10**6, 264, 66_667, window, lookups)
        for n, (window, lookups) in enumerate(given_tables)
    ]
    tiers = [DRAM] + [DISK] * has_disk + [REMOTE] * has_remote
    plan = place(tables, tiers, allowed_ms=0.1)
    assert plan.problem == ""
    assert plan.growth_ms <= 0.1 * len(tables) + 1e-6
    order = [one.table.window_ms for one in plan.tables]
    assert order == sorted(order)
    for one in plan.tables:
        # Everything cheaper than the choice was refused, with a reason.
        kinds = [kind for kind in ("disk", "remote") if kind in {t.kind for t in tiers}]
        if one.choice in kinds:
            kinds = kinds[: kinds.index(one.choice)]
        assert set(kinds) <= {refusal.choice for refusal in one.refused}


def load_of(curve: MissCurve, windows: tuple[float, float] = (0.27, 9.35)) -> NodeLoad:
    return NodeLoad(
        tuple(TableLoad(f"t{n}", window, 740, curve) for n, window in enumerate(windows)),
        (PAPER_DISK,),
    )


def test_the_next_mib_is_worth_less_than_the_last() -> None:
    advice = advise(load_of(AGENT), (16, 16), 32_768, 264, 29.4)
    assert advice.pays
    assert 0 <= advice.next_mib_us < advice.last_mib_us
    assert advice.cache_mib == pytest.approx(272)
    assert "% of a step" in advice.text


@pytest.mark.parametrize(
    ("load", "word"),
    [
        (load_of(AGENT, (5.0, 9.35)), "every read fits its window"),
        (load_of(MissCurve.of([0, 1e6], [1.0, 0.999])), "seen for the first time"),
    ],
)
def test_a_cache_that_does_not_pay_is_told(load: NodeLoad, word: str) -> None:
    advice = advise(load, (16, 16), 32_768, 264, 29.4)
    assert not advice.pays
    assert "does not pay" in advice.text
    assert word in advice.text


def test_the_models_best_split_is_a_local_optimum() -> None:
    load, sets = load_of(AGENT), 32_768
    best = best_ways(load, sets, (0, 32))
    growth = predict(load, np.array(best) * float(sets)).growth_ms
    for giver, receiver in ((0, 1), (1, 0)):
        other = list(best)
        if other[giver]:
            other[giver] -= 1
            other[receiver] += 1
            assert predict(load, np.array(other) * float(sets)).growth_ms >= growth - 1e-9
    assert best[0] > 16


def test_missing_rows_share_few_pages() -> None:
    """740 random rows in 6.4 million pages share a page 0.04 times a step."""
    assert 740 - distinct_pages(np.array(740.0), 6.4e6) == pytest.approx(0.043, abs=0.002)
    assert distinct_pages(np.array(1e9), 1000.0) == pytest.approx(1000)


@settings(deadline=None)
@given(st.lists(st.integers(0, 999), max_size=200), st.lists(st.integers(0, 999), max_size=50))
def test_seen_sets(ids: list[int], asked: list[int]) -> None:
    bits = empty(1000)
    mark(bits, ids)
    assert is_wanted(bits, np.array(asked, np.int64)).tolist() == [row in set(ids) for row in asked]
    assert share(bits, 1000) == len(set(ids)) / 1000
    with pytest.raises(IndexError):
        mark(bits, [1000])

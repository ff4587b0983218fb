"""How the climber behaves, in simulated time (bench/splits.py), at a sixteenth of the paper's size.

Each behaviour has a healthy score, the score of a climber that fails at it, and the bar between.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import splits
from tierd.controller import split as climber
from tierd.controller.curves import CurveSampler, MissCurve
from tierd.controller.load import NodeLoad, TableLoad, predict
from tierd.controller.readtime import PAPER_DISK

SCALE = 16
WARM = 10 * splits.STEPS_PER_S
STEPS = WARM + splits.MINUTE + 10 * splits.STEPS_PER_S
SCENARIOS = splits.scenarios(SCALE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_finds_the_best_split_within_a_minute(name: str) -> None:
    """From f=0 and f=1. Healthy: up to 0.04 ms from the best fixed split. Failed (a climber that
    stays where it is): 0.7 to 4 ms from at least one end. The bar: 0.15 ms."""
    scenario = SCENARIOS[name]
    traffic = scenario.draw(1, STEPS)
    tables = len(traffic)
    late = slice(WARM + splits.MINUTE, None)
    means = {ways: g[late].mean() for ways, g in splits.fixed(scenario, traffic, step=4).items()}
    best = min(means.values())
    if name != "the paper's":
        assert means[splits.even(tables)] - best >= 0.5
    ends = [(0,) * (tables - 1) + (32,), (32,) + (0,) * (tables - 1)]
    assert max(means[end] for end in ends) - best > 0.6  # what a climber that fails would score
    for start in ends:
        run = splits.play(scenario, traffic, start, follow=True, hold_until=WARM)
        assert run.growth_ms[late].mean() - best <= 0.15, (start, run.moves)


def test_it_rests_in_steady_traffic() -> None:
    """Healthy: no move in a minute. Failed (no hysteresis): 10. The bar: one a minute."""
    scenario = SCENARIOS["the paper's"]
    steps = WARM + 2 * splits.MINUTE
    traffic = scenario.draw(2, steps)
    moves = {}
    for name, limits in (
        ("healthy", climber.Limits()),
        ("failed", climber.Limits(gain_min_ms=-1.0, sure=0.0, settle_min=0, settle_max=0)),
    ):
        run = splits.play(scenario, traffic, (24, 8), follow=True, hold_until=WARM, limits=limits)
        moves[name] = sum(at >= WARM + splits.MINUTE for at, _ in run.moves)
    assert moves["healthy"] <= 1
    assert moves["failed"] > 1


@pytest.mark.parametrize("name", splits.adversaries())
def test_bad_traffic_costs_little(name: str) -> None:
    """Against the even split. Healthy: 0 ms, or a gain. Failed (``splits.Naive``, which compares
    measured stalls across samples): 0.28 ms where phases alternate. The bar: 0.2 ms."""
    scenario = splits.adversaries(SCALE)[name]
    traffic = scenario.draw(3, splits.MINUTE)
    start = splits.even(len(traffic))
    even = splits.play(scenario, traffic, start, follow=False)
    run = splits.play(scenario, traffic, start, follow=True)
    assert run.mean_ms(0) - even.mean_ms(0) <= 0.2, run.moves


# --- single decisions ----------------------------------------------------------------------------

STEEP = MissCurve.of([0, 1000, 2000, 32_000], [1, 0.3, 0.05, 0.05])
FLAT = MissCurve.of([0, 32_000], [1.0, 0.99])


def load_of(*curves: MissCurve, windows: tuple[float, ...] = (0.27, 9.35, 9.4)) -> NodeLoad:
    tables = zip(curves, windows, strict=False)
    return NodeLoad(
        tuple(TableLoad(f"t{n}", window, 700, curve) for n, (curve, window) in enumerate(tables)),
        (PAPER_DISK,),
    )


def observe(load: NodeLoad, stall: float | None = None, steps: float = 30) -> climber.Observation:
    return climber.Observation(load, 1000, steps, stall)


def test_ways_go_where_the_window_is_short() -> None:
    decision, state = climber.decide(
        observe(load_of(STEEP, STEEP)), climber.SplitState.start((0, 32))
    )
    assert decision.action == "move"
    assert state.ways[0] >= 2
    assert state.previous == (0, 32)
    assert "from t1 to t0" in decision.reason


def test_a_gain_within_its_uncertainty_moves_nothing() -> None:
    noisy = dataclasses.replace(
        STEEP,
        groups=np.clip(STEEP.miss + np.random.default_rng(0).normal(0, 0.4, (8, 1)), 0, 1)
        * np.linspace(1, 0.1, 4) ** np.arange(8)[:, None],
    )
    start = climber.SplitState.start((0, 32))
    assert climber.decide(observe(load_of(STEEP, FLAT)), start)[0].action == "move"
    sure = climber.Limits(sure=50.0)
    held = climber.decide(observe(load_of(noisy, FLAT)), start, sure)[0]
    assert held.action == "hold"
    assert "no move is worth it" in held.reason


def test_a_move_that_does_not_earn_its_cost_is_not_made() -> None:
    start = climber.SplitState.start((0, 2))
    short = climber.Limits(horizon_steps=0.01)
    # Both need their ways: what t1 loses while t0 fills is not earned back in no time.
    load = load_of(STEEP, STEEP, windows=(0.27, 0.5))
    assert climber.decide(observe(load), start, short)[0].action == "hold"
    assert climber.decide(observe(load), start)[0].action == "move"


def moved(stall_before: float = 2.2) -> tuple[NodeLoad, climber.SplitState]:
    load = load_of(STEEP, STEEP)
    state = climber.SplitState.start((0, 32))
    _, state = climber.decide(observe(load, stall_before), state)
    assert state.pending is not None
    return load, state


def test_a_move_is_judged_only_when_it_has_settled() -> None:
    load, state = moved()
    decision, state = climber.decide(observe(load, 50.0), state)
    assert decision.reason.startswith("settling")
    assert state.pending is not None


def test_the_measured_stall_vetoes_and_bars_for_longer_each_time() -> None:
    load, state = moved()
    split = state.ways
    decision, state = climber.decide(observe(load, 50.0, steps=700), state)
    assert decision.action == "undo"
    assert state.ways == (0, 32)
    assert state.previous == split
    assert "veto" in decision.reason
    # Only t1 could give to t0, and that pair rests.
    decision, state = climber.decide(observe(load, 2.2), state)
    assert (decision.action, decision.reason) == ("hold", "no ways can be moved")
    decision, state = climber.decide(observe(load, 2.2, steps=3600), state)
    assert decision.action == "move"
    _, state = climber.decide(observe(load, 50.0, steps=700), state)
    (bar,) = state.barred
    assert bar.until - state.steps == 2 * climber.Limits().bar_steps


def test_a_stall_that_traffic_explains_is_no_reason_for_a_veto() -> None:
    _, state = moved()
    # The same moment the traffic turns: everything misses, whatever the split.
    load = load_of(FLAT, FLAT)
    growth = float(predict(load, [0, 32_000]).growth_ms)
    decision, state = climber.decide(observe(load, growth, steps=700), state)
    assert decision.action != "undo"
    assert state.pending is None


def test_a_model_that_is_wrong_throughout_vetoes_nothing() -> None:
    load, state = load_of(STEEP, STEEP), climber.SplitState.start((0, 32))
    held = climber.Limits(gain_min_ms=100)
    for _ in range(60):  # every step stalls 1 ms longer than predicted
        _, state = climber.decide(observe(load, 3.2), state, held)
    assert state.bias_ms == pytest.approx(1.0, abs=0.1)
    _, state = climber.decide(observe(load, 3.2), state)
    after = float(predict(load, np.array(state.ways) * 1000.0).growth_ms)
    decision, state = climber.decide(observe(load, after + 1.0, steps=700), state)
    assert decision.action != "undo"
    assert state.anchor != (0, 32)


def test_the_operator_freezes_thaws_and_undoes() -> None:
    load, state = moved()
    split = state.ways
    frozen = climber.freeze(state, "maintenance")
    decision, frozen = climber.decide(observe(load, 50.0, steps=5000), frozen)
    assert (decision.action, decision.reason) == ("hold", "frozen: maintenance")
    assert frozen.ways == split
    back = climber.undo(frozen)
    assert (back.ways, back.frozen) == ((0, 32), "undone by the operator")
    assert climber.undo(back).ways == split
    assert climber.decide(observe(load), climber.thaw(back))[0].action == "move"
    fresh = climber.SplitState.start((16, 16))
    assert climber.undo(fresh) == fresh


@pytest.mark.parametrize(
    ("load", "ways", "word"),
    [
        (load_of(MissCurve.of([0, 10], [0.2, 0.9]), FLAT), (16, 16), "nonsense curve"),
        (load_of(STEEP, FLAT), (20, 20), "40 ways of 32"),
        (load_of(STEEP, FLAT), (32,), "1 quotas for 2 tables"),
        (load_of(STEEP, FLAT), (-1, 33), "quota of -1"),
        (load_of(STEEP, FLAT, windows=(9.0, 1.0)), (16, 16), "order of their windows"),
        (load_of(STEEP, FLAT, windows=(float("nan"), 1.0)), (16, 16), "window of nan"),
        (NodeLoad((), ()), (), "no table"),
    ],
)
def test_impossible_input_is_a_reason_to_hold(
    load: NodeLoad, ways: tuple[int, ...], word: str
) -> None:
    state = climber.SplitState.start(ways)
    decision, after = climber.decide(observe(load), state)
    assert decision.action == "hold"
    assert word in decision.reason
    assert after.ways == ways


def test_little_seen_is_a_reason_to_wait() -> None:
    sampler = CurveSampler()
    sampler.add(np.arange(10), lookups=1280)
    decision, _ = climber.decide(
        observe(load_of(sampler.curve(), STEEP)), climber.SplitState.start((16, 16))
    )
    assert "too little seen" in decision.reason


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=2, max_size=4),
    st.lists(st.floats(0, 12), min_size=4, max_size=4),
    st.lists(st.one_of(st.none(), st.floats(0, 20)), min_size=1, max_size=25),
    st.integers(0, 10_000),
)
def test_whatever_it_sees_the_quotas_stay_a_split(
    curves: list[list[float]], windows: list[float], stalls: list[float | None], seed: int
) -> None:
    made = [
        MissCurve.of([0, 1000, 8000, 32_000], [1.0, *np.minimum.accumulate(points)])
        for points in curves
    ]
    load = load_of(*made, windows=tuple(sorted(windows)))
    state = climber.SplitState.start(splits.even(len(made)))
    rng = np.random.default_rng(seed)
    for stall in stalls:
        before = state
        decision, state = climber.decide(
            observe(load, stall, steps=rng.choice([1, 30, 700])), state
        )
        assert climber.check_ways(state.ways, len(made)) == ""
        assert sum(state.ways) == 32
        assert decision.ways == state.ways
        assert (decision.action == "hold") == (state.ways == before.ways)
        assert decision.reason
        if decision.action == "move":
            growth = predict(load, np.array([before.ways, state.ways]) * 1000.0).growth_ms
            assert growth[1] <= growth[0] - climber.Limits().gain_min_ms + 1e-9

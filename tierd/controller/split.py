"""The split: which table gets how many ways of the row cache, following the traffic.

A climber on the quotas. Each decision predicts the growth of the step (equation 1) for the present
split and for every split that moves 1, 2, 4, 8 or 16 ways from one table to another, and takes the
best if it is worth it. What keeps it from harm, each learnt the hard way by others:

- Signals are compared within one sample, never across samples. "It was 1.2 ms before the move and
  is 1.4 ms after it" says as much about the traffic as about the move. Both splits are predicted
  from the same curves and the same load; the stall measured now is held against what the old split
  is predicted to cost now.
- Marginal values, not averages: what the next ways would save. Averages feed the table that has
  the highest hit ratio already.
- Moving costs: the receiver's new ways are empty until misses have filled them, while the giver
  misses more. A move must earn that back within the horizon.
- Hysteresis: a gain below ``gain_min_ms``, or within its own uncertainty, moves nothing.
- Veto: a move after which the GPU stalls more than the old split is predicted to, by more than
  ``veto_ms``, is undone at once; that pair of tables is then left alone, twice as long each time.
- An anchor: the last split whose measured stall bore its prediction out. That is what an undo goes
  back to.
- Starved tables are not probed: the curves come from sampled lookups, not from hits, so a table
  without a single way is as well known as any other.

Nothing here knows time: steps are the clock.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.load import Prediction, predict, predict_ways

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierd.controller.load import NodeLoad

WAYS = 32
"""Ways of a set, which quotas divide."""
MOVES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a climber is careful about.

    Attributes:
        gain_min_ms: a step must be predicted to shrink by this much.
        sure: by so many standard errors beyond it, too.
        horizon_steps: steps within which a move must have earned its cost.
        settle_min, settle_max: steps between a move and its judgement; in between, as long as
            filling the moved ways takes.
        veto_ms: measured stall beyond the old split's prediction that undoes a move.
        bar_steps: how long a pair rests after its first veto.
        samples_min: sampled lookups of every table before anything is decided.
    """

    gain_min_ms: float = 0.05
    sure: float = 2.0
    horizon_steps: float = 1800.0
    settle_min: float = 150.0
    settle_max: float = 600.0
    veto_ms: float = 0.15
    bar_steps: float = 3600.0
    samples_min: float = 64.0


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A move that has not been judged yet."""

    before: tuple[int, ...]
    giver: int
    receiver: int
    due: float  # in steps


@dataclasses.dataclass(frozen=True, slots=True)
class Barred:
    """A pair of tables that rests after a veto."""

    giver: int
    receiver: int
    until: float
    vetoes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SplitState:
    """What the climber remembers between decisions.

    Attributes:
        ways: the split in force, ways per table.
        anchor: the last split that was borne out.
        previous: the split before the last change, for the operator's undo; empty: none.
        frozen: why nothing moves, by the operator's word; "" when it may.
        steps: steps seen.
        bias_ms: measured stall beyond the predicted one, learnt while nothing is pending.
    """

    ways: tuple[int, ...]
    anchor: tuple[int, ...]
    previous: tuple[int, ...] = ()
    frozen: str = ""
    steps: float = 0.0
    bias_ms: float = 0.0
    pending: Pending | None = None
    barred: tuple[Barred, ...] = ()

    @classmethod
    def start(cls, ways: tuple[int, ...]) -> SplitState:
        """Begin with a split that is in force."""
        return cls(ways, ways)


@dataclasses.dataclass(frozen=True)
class Observation:
    """What was seen since the last decision.

    Attributes:
        load: tables with their curves as they are now, devices, windows.
        sets: sets in use; a table has ``ways * sets`` rows.
        steps: steps since the last decision.
        stall_ms: measured on the GPU, mean per step, all tables together; None: not measured.
    """

    load: NodeLoad
    sets: int
    steps: float
    stall_ms: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why.

    Attributes:
        action: "hold", "move" or "undo".
        ways: the split to have in force now.
        reason: one sentence for people.
        predicted_ms: growth under ``ways``, NaN where nothing can be predicted.
        gain_ms: what the best move that was weighed would have saved, net of its cost.
    """

    action: str
    ways: tuple[int, ...]
    reason: str
    predicted_ms: float = float("nan")
    gain_ms: float = 0.0


def check_ways(ways: tuple[int, ...], tables: int) -> str:
    """Say why these quotas do not fit a cache, "" if they do."""
    if len(ways) != tables:
        return f"{len(ways)} quotas for {tables} tables"
    if any(way < 0 for way in ways):
        return f"a quota of {min(ways)} ways"
    if sum(ways) > WAYS:
        return f"{sum(ways)} ways of {WAYS} in a set"
    return ""


def freeze(state: SplitState, reason: str) -> SplitState:
    """Keep the split as it is until :func:`thaw`, whatever the traffic does."""
    return dataclasses.replace(state, frozen=reason or "frozen by the operator", pending=None)


def thaw(state: SplitState) -> SplitState:
    """Let the climber move again."""
    return dataclasses.replace(state, frozen="")


def undo(state: SplitState) -> SplitState:
    """Return to the split before the last change, and freeze there: the operator knows better."""
    if not state.previous:
        return state
    return dataclasses.replace(
        state,
        ways=state.previous,
        anchor=state.previous,
        previous=state.ways,
        pending=None,
        frozen="undone by the operator",
    )


def decide(
    seen: Observation, state: SplitState, limits: Limits | None = None
) -> tuple[Decision, SplitState]:
    """Decide about the split.

    Args:
        seen: what happened since the last decision.
        state: what the last decision returned.
        limits: how careful to be; None: the defaults.

    Returns:
        the decision, and the state for the next one. Impossible input is a reason to hold.
    """
    limits = limits or Limits()
    state = dataclasses.replace(state, steps=state.steps + max(0.0, seen.steps))
    if state.frozen:
        return Decision("hold", state.ways, f"frozen: {state.frozen}"), state
    if trouble := _trouble(seen, state, limits):
        return Decision("hold", state.ways, trouble), state
    now = predict(seen.load, _rows(state.ways, seen.sets))
    growth = float(now.growth_ms)
    if state.pending is not None:
        if state.steps < state.pending.due:
            left = state.pending.due - state.steps
            text = f"settling: {left:.0f} steps until the last move is judged"
            return Decision("hold", state.ways, text, growth), state
        verdict, state = _judge(seen, state, limits)
        if verdict is not None:
            return verdict, state
    else:
        state = _learn_bias(seen, state, now)
    return _climb(seen, state, now, limits)


def _trouble(seen: Observation, state: SplitState, limits: Limits) -> str:
    if trouble := seen.load.problem():
        return trouble
    if trouble := check_ways(state.ways, len(seen.load.tables)):
        return f"quotas do not fit: {trouble}"
    for table in seen.load.tables:
        if table.curve.samples < limits.samples_min:
            have = f"{table.curve.samples:.0f} of {limits.samples_min:.0f} samples"
            return f"{table.name}: too little seen to judge ({have})"
    return ""


def _rows(ways: tuple[int, ...] | NDArray[np.int64], sets: int) -> NDArray[np.float64]:
    return np.asarray(ways, np.float64) * sets


def _learn_bias(seen: Observation, state: SplitState, now: Prediction) -> SplitState:
    """Learn what the model misses of the stall, so that a veto judges the move, not the model."""
    if seen.stall_ms is None or seen.steps <= 0:
        return state
    rest = seen.stall_ms - float(now.stalls_ms.sum())
    keep = 0.5 ** (seen.steps / 300.0)
    return dataclasses.replace(state, bias_ms=keep * state.bias_ms + (1 - keep) * rest)


def _judge(
    seen: Observation, state: SplitState, limits: Limits
) -> tuple[Decision | None, SplitState]:
    """Keep the pending move (None) or undo it."""
    pending = state.pending
    assert pending is not None
    old = predict(seen.load, _rows(pending.before, seen.sets))
    expected = float(old.stalls_ms.sum()) + state.bias_ms
    if seen.stall_ms is None or seen.stall_ms <= expected + limits.veto_ms:
        return None, dataclasses.replace(state, pending=None, anchor=state.ways)
    vetoes = 1 + sum(
        bar.vetoes
        for bar in state.barred
        if (bar.giver, bar.receiver) == (pending.giver, pending.receiver)
    )
    rest = limits.bar_steps * 2 ** min(vetoes - 1, 8)
    bar = Barred(pending.giver, pending.receiver, state.steps + rest, vetoes)
    others = tuple(
        b for b in state.barred if (b.giver, b.receiver) != (pending.giver, pending.receiver)
    )
    text = (
        f"veto: steps stall {seen.stall_ms:.2f} ms since {_named(seen, pending)}, where "
        f"{expected:.2f} ms is expected of the split before it"
    )
    state = dataclasses.replace(
        state,
        ways=state.anchor,
        previous=state.ways,
        pending=None,
        barred=(*others, bar),
    )
    return Decision("undo", state.ways, text, float(old.growth_ms)), state


def _named(seen: Observation, pending: Pending) -> str:
    giver, receiver = (seen.load.tables[n].name for n in (pending.giver, pending.receiver))
    return f"ways went from {giver} to {receiver}"


def _climb(
    seen: Observation, state: SplitState, now: Prediction, limits: Limits
) -> tuple[Decision, SplitState]:
    """Take the best move if it is worth it."""
    growth = float(now.growth_ms)
    moves = _moves(state)
    if not len(moves.given):
        return Decision("hold", state.ways, "no ways can be moved", growth), state
    # Every split after its move, and while the giver has lost rows that the receiver has not yet.
    both = predict_ways(seen.load, np.stack([moves.ways, moves.between]), seen.sets)
    after, between = both.growth_ms
    index = np.arange(len(moves.given))
    misses = both.pages[0, index, moves.receiver]
    fill = moves.given * seen.sets / np.maximum(misses, 1.0)
    # The giver loses its rows one by one, as the receiver's misses take them: half, on average.
    cost = 0.5 * np.maximum(between - growth, 0.0) * fill
    net = growth - after - cost / limits.horizon_steps
    best = int(np.argmax(net))
    gain = float(net[best])
    target = tuple(int(way) for way in moves.ways[best])
    giver, receiver = int(moves.giver[best]), int(moves.receiver[best])
    label = (
        f"{moves.given[best]} ways from {seen.load.tables[giver].name} "
        f"to {seen.load.tables[receiver].name}"
    )
    error = _gain_error(seen, state.ways, target) if gain >= limits.gain_min_ms else 0.0
    needed = max(limits.gain_min_ms, limits.sure * error)
    if gain < needed:
        text = f"no move is worth it: {label} would save {gain:.3f} ms, {needed:.3f} are wanted"
        return Decision("hold", state.ways, text, growth, gain), state
    due = state.steps + float(np.clip(fill[best], limits.settle_min, limits.settle_max))
    pending = Pending(state.ways, giver, receiver, due)
    text = f"{label}: {growth:.2f} -> {after[best]:.2f} ms (+- {error:.2f})"
    state = dataclasses.replace(state, ways=target, previous=state.ways, pending=pending)
    return Decision("move", target, text, float(after[best]), gain), state


@dataclasses.dataclass(frozen=True, slots=True)
class _Moves:
    """Moves side by side: the split after each, [moves, tables], and what it consists of."""

    ways: NDArray[np.int64]
    between: NDArray[np.int64]
    giver: NDArray[np.int64]
    receiver: NDArray[np.int64]
    given: NDArray[np.int64]


@functools.cache
def _pairs(tables: int) -> NDArray[np.int64]:
    """Return every giver, receiver and number of ways, [3, combinations]."""
    every = np.array(list(itertools.product(range(tables), range(tables), range(len(MOVES)))))
    return np.asarray(every[every[:, 0] != every[:, 1]].reshape(-1, 3).T, np.int64)


def _moves(state: SplitState) -> _Moves:
    """Return every move that is open; a table that has fewer ways than a move gives what it has."""
    now = np.array(state.ways, np.int64)
    giver, receiver, size = _pairs(len(now))
    steps = np.array((0, *MOVES))
    has = now[giver]
    given = np.minimum(steps[size + 1], has)
    is_open = given > steps[size]  # else it is the same as the next smaller move
    for bar in state.barred:
        if bar.until > state.steps:
            is_open &= (giver != bar.giver) | (receiver != bar.receiver)
    giver, receiver, given = giver[is_open], receiver[is_open], given[is_open]
    index = np.arange(len(given))
    between = np.repeat(now[None, :], len(given), axis=0)
    between[index, giver] -= given
    ways = between.copy()
    ways[index, receiver] += given
    return _Moves(ways, between, giver, receiver, given)


def _gain_error(seen: Observation, now: tuple[int, ...], target: tuple[int, ...]) -> float:
    """Return the standard error of a gain: how much the groups' curves differ about it.

    Both splits are judged by the same group each time, so what a group has too many or too few of
    at both sizes cancels out.
    """
    if not any(len(table.curve.groups) for table in seen.load.tables):
        return 0.0
    both = np.stack([_rows(now, seen.sets), _rows(target, seen.sets)])
    gains = np.diff(predict(seen.load, both, by_group=True).growth_ms, axis=-1)
    return float(np.std(gains, ddof=1) / np.sqrt(len(gains)))

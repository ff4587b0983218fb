"""Requests come, grow, turn sparse, fork, are preempted, aborted and resumed: whose block is it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.world import World
from tierd.errors import KvPoolFullError, KvUnsupportedError
from tierd.kv import layer as places
from tierd.kv.shape import Budget, KvShape

if TYPE_CHECKING:
    from tierd.kv.requests import Parked

SHAPE = KvShape(layers=2, kv_heads=2, group=2, head_dim=16, dtype=torch.float32)


def make(budget: Budget | None = None, **options: int) -> World:
    return World(SHAPE, budget or Budget(4, 0.5), **options)


def test_a_request_turns_sparse_only_after_its_full_copy_has_landed() -> None:
    world = make()
    row = world.begin(150)
    assert not world.requests.can_turn_sparse(row)
    world.plain.write_back(world.layers[0].only(row), world.tables.only(row))
    assert not world.requests.can_turn_sparse(row)  # the second layer's is missing
    world.land(row)
    free = world.requests.gpu.free
    world.requests.turn_sparse(row)
    assert world.requests.gpu.free == free + 10 - world.budget.slots
    assert world.check() > 0


def test_the_ring_never_loses_a_block_that_has_not_landed() -> None:
    """Drafts taken and rejected at every offset of a block, through many blocks."""
    world = make(rows=1, blocks=24)
    row = world.begin(100, sparse=True)
    for number in range(110):
        world.step(queries=4, accepted=1 + number % 4)
        request = world.requests.rows[row]
        if request.length > 250:
            break
        complete = request.length // SHAPE.block
        assert all(int(state.landed[row].min()) >= complete - 1 for state in world.layers)
        if number % 12 == 0:
            world.check()
    assert request.length > 250


def test_a_working_set_that_covers_everything_is_dense_attention() -> None:
    sparse, dense = make(Budget(30, 1.0), rows=1), make(Budget(30, 1.0), rows=1)
    sparse.begin(90, sparse=True)
    dense.begin(90)
    dense.land(0)
    for _ in range(20):
        a, b = sparse.step(), dense.step()
        for left, right in zip(a, b, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert sparse.requests.rows[0].sparse
    assert not dense.requests.rows[0].sparse


def test_an_aborted_request_leaves_nothing_to_others() -> None:
    world = make()
    first, second = world.begin(130, sparse=True), world.begin(140, sparse=True)
    for _ in range(5):
        world.step()
    for state in world.layers:  # a plan is under way when the abort comes
        world.ops.select(state, world.tables)
    world.requests.free(first)
    third = world.begin(150, sparse=True)
    assert third == first
    for _ in range(10):
        world.step()
    assert world.check() > 0
    assert world.requests.rows.keys() == {first, second}
    world.requests.free(second)
    world.requests.free(third)
    assert world.requests.gpu.free == 64
    assert world.requests.host.free == 96


def test_a_stale_plan_on_recycled_pages_is_refused_by_the_header() -> None:
    """The row's owner says request 1; its host pages were given to another since."""
    world = make(rows=2)
    row = world.begin(150, sparse=True)
    stolen = world.requests.rows[row].host[5:8]
    for state in world.layers:
        state.headers[stolen, 0] = 77
        state.map[row] = places.EMPTY
        state.slot_of[row] = places.EMPTY
    world.step()
    wrong = sum(int(state.counters[places.C_WRONG_OWNER]) for state in world.layers)
    assert wrong > 0
    for state in world.layers:
        assert not set(state.map[row].flatten().tolist()) & {5, 6, 7}


def test_a_preempted_request_comes_back_with_its_working_set() -> None:
    world = make()
    row = world.begin(157, sparse=True)
    other = world.begin(60)
    for _ in range(6):
        world.step()
    before = [state.map[row].clone() for state in world.layers]
    parked = world.preempt(row)
    world.requests.free(other)
    fresh = world.begin(170, sparse=True)  # takes the row and the pages
    for _ in range(4):
        world.step()
    assert parked.request.number != world.requests.rows[fresh].number
    back = world.requests.resume(parked)
    for state, was in zip(world.layers, before, strict=True):
        assert torch.equal(state.map[back], was)
    for _ in range(10):
        world.step()
    assert world.check() > 0


def test_a_dense_request_survives_preemption_too() -> None:
    world = make()
    row = world.begin(45)
    world.step()
    parked = world.preempt(row)
    assert world.requests.gpu.free == 64
    world.begin(40)
    world.requests.resume(parked)
    for _ in range(10):
        world.step()
    assert world.check() > 0


def test_a_fork_shares_what_has_landed_and_nothing_else() -> None:
    world = make(rows=3, blocks=20, gpu_pages=96)
    parent = world.begin(150, sparse=True)
    for _ in range(3):
        world.step()
    used = world.requests.host.free
    child = world.fork(parent)
    shared = world.requests.rows[child].host[:9]
    assert shared == world.requests.rows[parent].host[:9]
    assert used - world.requests.host.free == len(world.requests.rows[parent].host) - 9
    for _ in range(12):  # both write on, each its own
        world.step()
    assert world.check() > 0
    assert not torch.equal(world.past(parent), world.past(child))
    world.requests.free(parent)  # the child still reads its parent's blocks
    for _ in range(10):
        world.step()
    assert world.check() > 0
    world.requests.free(child)
    assert world.requests.host.free == 96


def test_an_exhausted_pool_makes_requests_wait_and_changes_nothing() -> None:
    world = make(rows=2, host_pages=12)
    first = world.begin(92, sparse=True)
    second = world.begin(75)
    lengths = {row: request.length for row, request in world.requests.rows.items()}
    for _ in range(8):
        world.step()
    assert world.waited
    stuck = max(world.waited, key=world.waited.count)
    grown = {row: r.length - lengths[row] for row, r in world.requests.rows.items()}
    assert grown[stuck] < 8
    world.check()
    with pytest.raises(KvPoolFullError, match="host pages wanted, 0 free: the request waits"):
        world.requests.grow(first if stuck == first else second, 64)
    other = second if stuck == first else first
    world.requests.free(other)
    before = world.requests.rows[stuck].length
    for _ in range(12):
        world.step()
    assert world.requests.rows[stuck].length == before + 12
    assert world.check() > 0


def test_a_context_beyond_the_tables_is_refused_and_changes_nothing() -> None:
    world = make(rows=1, blocks=6)
    row = world.begin(90)
    free = world.requests.gpu.free, world.requests.host.free
    with pytest.raises(KvUnsupportedError, match="100 tokens; a request has room for 6 blocks"):
        world.requests.grow(row, 10)
    assert (world.requests.gpu.free, world.requests.host.free) == free
    world.step(queries=4, accepted=4)
    assert world.check() > 0


def test_pages_that_a_crop_left_do_not_take_the_ring_s_places() -> None:
    """150 tokens, cropped to 100 while dense: blocks 7 to 9 have pages and hold nothing."""
    world = make(rows=1)
    row = world.begin(150)
    world.land(row)
    number = world.requests.rows[row].number
    world.truth[number] = world.truth[number][:, :, :100]
    world.requests.rows[row].length = 100
    world.tables.length[row] = 100
    for state in world.layers:
        state.landed[row].clamp_(max=6)
    world.requests.turn_sparse(row)
    assert world.check() > 0  # among others: the last two blocks are there
    for _ in range(20):
        world.step()
    assert world.check() > 0


def test_a_full_batch_is_refused_in_words() -> None:
    world = make(rows=1)
    world.begin(20)
    with pytest.raises(KvPoolFullError, match="all 1 rows of the batch are taken: it waits"):
        world.requests.admit()
    with pytest.raises(KvPoolFullError, match="GPU pages wanted"):
        make(gpu_pages=3).begin(100)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from(["begin", "sparse", "step", "fork", "free", "preempt", "resume", "taken"]),
        min_size=5, max_size=25,
    ),
    st.integers(0, 1000),
)  # fmt: skip
def test_any_order_of_events_keeps_every_owner(events: list[str], seed: int) -> None:
    world = make(rows=3, blocks=16, gpu_pages=60, host_pages=44, seed=seed)
    parked: list[Parked] = []
    for number, event in enumerate(events):
        happen(world, event, number + seed, parked)
        world.check()


def happen(world: World, event: str, number: int, parked: list[Parked]) -> None:
    """One event; where a pool is full, it does not happen."""
    rows = sorted(world.requests.rows)
    row = rows[number % len(rows)] if rows else None
    try:
        if event == "begin":
            world.begin(40 + 13 * number % 90)
        elif event in {"step", "taken"}:
            for long in [r for r in rows if world.requests.rows[r].length > 230]:
                world.requests.free(long)
            world.step(accepted=1 + (event == "taken"))
        elif event == "resume" and parked:
            world.requests.resume(parked[-1])
            parked.pop()
        elif row is not None:
            happen_to(world, event, row, parked)
    except KvPoolFullError:
        for new in set(world.requests.rows) - set(rows):
            world.requests.free(new)  # a prompt that found no room is given up


def happen_to(world: World, event: str, row: int, parked: list[Parked]) -> None:
    if event == "sparse":
        world.land(row)
        if world.requests.can_turn_sparse(row):
            world.requests.turn_sparse(row)
    elif event == "fork":
        world.fork(row)
    elif event == "free":
        world.requests.free(row)
    elif event == "preempt":
        parked.append(world.preempt(row))

"""The KV kernels on a GPU, in bf16, against the torch reference on the same GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kv.world import World
from tierd.kv import layer as places
from tierd.kv.shape import Budget, KvShape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128])
def test_steps_in_bf16(head_dim: int) -> None:
    """Each piece's result where its inputs are the same; owners and contents throughout."""
    shape = KvShape(layers=2, kv_heads=4, group=4, head_dim=head_dim)
    world = World(
        shape, Budget(6, 0.5), rows=4, blocks=32, gpu_pages=128, host_pages=160, kernels=True,
        device="cuda",
    )  # fmt: skip
    for tokens, sparse in ((300, True), (90, False), (261, True)):
        world.begin(tokens, sparse=sparse)
    for number in range(40):
        world.step(accepted=1 + (number % 3 == 2))
        if number % 10 == 9:
            compare_scores_and_attention(world)
    assert world.check() > 200
    assert sum(int(state.counters[places.C_EVICTED]) for state in world.layers) > 50


def compare_scores_and_attention(world: World) -> None:
    shape, tables = world.shape, world.tables
    size = (tables.rows, 2, shape.kv_heads * shape.group, shape.head_dim)
    q = world.random(*size)
    for state in world.layers:
        have = world.ops.attend(state, tables, q, 0.1)
        want = world.plain.attend(state, tables, q, 0.1)
        live = tables.slots > 0
        torch.testing.assert_close(have[live], want[live], rtol=2e-2, atol=1e-2)
        world.ops.score(state, tables, q, 1)
        torch.cuda.synchronize()
        scored = state.scores.clone()
        world.plain.score(state, tables, q, 1)
        seen = (tables.sparse > 0)[:, None, None] & (state.scores > -torch.inf)
        torch.testing.assert_close(scored[seen], state.scores[seen], rtol=2e-3, atol=1e-2)
        state.scores.copy_(scored)
        keep = [t.clone() for t in (state.stamp, state.counters)]
        world.ops.select(state, tables)
        torch.cuda.synchronize()
        plan = [t.clone() for t in (state.plan_count, state.plan_block, state.plan_slot)]
        stamps = state.stamp.clone()
        for tensor, was in zip((state.stamp, state.counters), keep, strict=True):
            tensor.copy_(was)
        world.plain.select(state, tables)
        assert torch.equal(plan[0], state.plan_count)
        used = state.plan_count[..., None] > torch.arange(plan[1].shape[-1], device="cuda")
        assert torch.equal(plan[1][used], state.plan_block[used])
        assert torch.equal(plan[2][used], state.plan_slot[used])
        assert torch.equal(stamps, state.stamp)
        world.ops.transfer(state, tables)

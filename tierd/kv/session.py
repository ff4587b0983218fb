"""One batch of requests on one device: what an engine's attention layers call, layer by layer.

    session.begin(queries)                      once a step, before the first layer
    out = session.attend(layer, q, k, v, scale) each layer: append, attend, predict, select, move
    session.end()                               once a step: lengths, who turns sparse
    session.crop(length)                        rejected drafts are gone

This is the synchronous form, for engines that run layer by layer in Python and for the CPU; an
engine that captures graphs uses the same kernels through `pipeline.Background`. All requests of a
batch have the same length here; they turn sparse on their own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tierd.errors import KvUnsupportedError
from tierd.io.pool import PoolView
from tierd.kv import layer as places
from tierd.kv import reference
from tierd.kv.layer import LayerState, Tables
from tierd.kv.ops import ops_for
from tierd.kv.pool import KvPool
from tierd.kv.requests import Requests
from tierd.kv.shape import StepBudget

if TYPE_CHECKING:
    from tierd.kv.shape import Budget, KvShape


class Session:
    """A batch over one pool.

    Attributes:
        requests: the control side: rows, pages, forks, preemption.
        length: tokens in the cache of every request.
    """

    def __init__(
        self, shape: KvShape, budget: Budget, *, rows: int, context: int, threshold: int,
        device: torch.device | str = "cpu", view: PoolView | None = None, judge: bool = False,
        link_bytes_s: float | None = None,
    ) -> None:  # fmt: skip
        """Allocate HBM for dense requests up to the threshold and working sets beyond it.

        Args:
            shape: of the cache.
            budget: K and the cap.
            rows: requests at once.
            context: tokens that a request may have.
            threshold: tokens from which a request is sparse.
            device: where the layers run.
            view: the lease in the host pool; a private one is made without.
            judge: compare predicted sets with the exact ones and count both (costs a scan).
            link_bytes_s: what the link to host memory moves; the cap then follows the steps' time.
        """
        self.shape, self.budget, self.threshold = shape, budget, threshold
        self.device = torch.device(device)
        blocks = shape.blocks(context) + 1
        self.view = view or PoolView.private(
            rows * blocks, layers=shape.layers, block_bytes=shape.block_bytes
        )
        self.pool = KvPool(self.view, shape, self.device)
        self.ops = ops_for(shape, budget, self.device)
        self.tables = Tables.make(rows, blocks, budget, self.device)
        self._gpu_pages = rows * (blocks + budget.slots)
        self.layers = [self._layer(number, blocks) for number in range(shape.layers)]
        pages = range(self.pool.pages)
        self.requests = Requests(shape, budget, self.tables, self.layers, pages)
        self.judge = judge
        self.length = 0
        self._gate = StepBudget(shape, budget, link_bytes_s) if link_bytes_s else None
        self._began = 0.0
        self._queries = 0
        self._start = 0  # tokens before the last step
        self._fresh: set[int] = set()
        self._predicted: list[torch.Tensor | None] = [None] * shape.layers

    def _layer(self, number: int, blocks: int) -> LayerState:
        return LayerState.make(
            number, self.shape, self.budget, rows=self.tables.rows, blocks_max=blocks,
            gpu_pages=self._gpu_pages, host=self.pool.host(number),
            headers=self.pool.headers(number), device=self.device,
        )  # fmt: skip

    @property
    def queries_max(self) -> int:
        """Query rows of a decode step: more could pass a ring slot by."""
        return self.shape.block // 2

    def reset(self) -> None:
        """End all requests."""
        for row in list(self.requests.rows):
            self.requests.free(row)
        self.length, self._queries = 0, 0
        self._fresh.clear()
        self._predicted = [None] * self.shape.layers

    def begin(self, batch: int, queries: int) -> None:
        """Start a step of so many new tokens a request; the first step admits the requests.

        Raises:
            KvPoolFullError: a pool has no page for them; nothing has changed.
            KvUnsupportedError: another batch than the one under way.
        """
        if batch > self.tables.rows:
            raise KvUnsupportedError(
                f"a batch of {batch}; the session was made for {self.tables.rows} (rows)"
            )
        if not self.requests.rows and self.length == 0:
            for _ in range(batch):
                self.requests.admit()
        if batch != len(self.requests.rows):
            raise KvUnsupportedError(
                f"a batch of {batch} on a cache that holds {len(self.requests.rows)} requests; "
                "make a new cache for it"
            )
        for row in self.requests.rows:
            self.requests.grow(row, queries)
        self._start, self._queries = self.length, queries
        self._began = time.perf_counter()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of a step.

        Args:
            layer: its number.
            q: [batch, queries, heads, head_dim]: the real token's row, then its drafts'.
            k: [batch, queries, kv_heads, head_dim].
            v: as k.
            scale: of the scores.

        Returns:
            What attention puts out, as q.
        """
        state = self.layers[layer]
        if self._queries > self.queries_max:
            return self._prefill(state, q, k, v, scale)
        q, k, v = (self._in_rows(t) for t in (q, k, v))
        for row in self._fresh:
            self._select_on_demand(state, row, q)
        self.ops.append(state, self.tables, k, v)
        out = self.ops.attend(state, self.tables, q, scale)
        if self.judge:
            self._judge(layer, state, q)
        # The last row predicts: the draft's; without a draft it is the current token's query.
        self.ops.score(state, self.tables, q, self._queries - 1)
        self.ops.select(state, self.tables)
        if self.judge:
            self._predicted[layer] = self._set(state)
        moving = time.perf_counter_ns()
        self.ops.write_back(state, self.tables)
        self.ops.transfer(state, self.tables)
        if self.device.type == "cpu":  # nothing runs beside it: all of it is waiting
            self.view.count(stall_ns=time.perf_counter_ns() - moving)
        return out[: len(self.requests.rows)]

    def _in_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pad a batch to the rows of the tables."""
        missing = self.tables.rows - len(tensor)
        if missing:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        return tensor.contiguous()

    def _prefill(
        self, state: LayerState, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """A prompt: dense attention over what is given, then pages and host copies.

        Raises:
            KvUnsupportedError: the cache holds tokens already; prompts come in one piece.
        """
        if self.length:
            raise KvUnsupportedError(
                f"{self._queries} tokens at once after {self.length}: a prompt comes in one piece, "
                f"and a step has at most {self.queries_max} rows"
            )
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], is_causal=True, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        length = self.tables.length.clone()
        for start in range(0, self._queries, self.shape.block):
            part = slice(start, start + self.shape.block)
            given = [self._in_rows(t[:, part]) for t in (k, v)]
            self.ops.append(state, self.tables, *given)
            self.tables.length += given[0].shape[1]
        self.ops.write_back(state, self.tables)
        self.tables.length.copy_(length)
        return out.transpose(1, 2)

    def _select_on_demand(self, state: LayerState, row: int, q: torch.Tensor) -> None:
        """Let a first sparse step's own query select before it attends: nothing predicted it."""
        one, tables = state.only(row), self.tables.only(row)
        self.ops.score(one, tables, q[row : row + 1], 0)
        for _ in range(-(-self.budget.blocks // max(1, self.budget.admitted)) + 1):
            self.ops.select(one, tables)
            if not int(one.plan_count.max()):
                break
            self.ops.transfer(one, tables)

    def end(self) -> None:
        """Count the step's tokens, and let requests turn sparse whose full copy has landed."""
        self._fresh.clear()
        self.length += self._queries
        for row in self.requests.rows:
            self.requests.advance(row, self._queries)
        self.tables.step += 1
        sparse = sum(request.sparse for request in self.requests.rows.values())
        if self._gate is not None and self._queries <= self.queries_max:
            self._gate.observe(time.perf_counter() - self._began)
            self.tables.admit.fill_(self._gate.admit(sparse))
        self._report(sparse)

    def crop(self, length: int) -> None:
        """Take back the tokens from `length` on: drafts that were rejected.

        Raises:
            KvUnsupportedError: tokens that are not there, or, of a sparse request, more than its
                last step's: what is local was chosen by where that step began.
        """
        if length == self.length:
            return
        if not 0 <= length < self.length:
            raise KvUnsupportedError(f"crop to {length} tokens; the cache holds {self.length}")
        sparse = any(request.sparse for request in self.requests.rows.values())
        if sparse and length < self._start:
            raise KvUnsupportedError(
                f"crop from {self.length} to {length} tokens: a sparse request takes back its last "
                f"step's only, from {self._start} on"
            )
        for row, request in self.requests.rows.items():
            request.length = length
            self.tables.length[row] = length
            for state in self.layers:
                state.landed[row].clamp_(max=length // self.shape.block)
        self.length = length

    def settle(self) -> None:
        """Between steps, when drafts are accepted or gone: turn requests sparse."""
        if self.length < self.threshold:
            return
        for row, request in self.requests.rows.items():
            if not request.sparse and self.requests.can_turn_sparse(row):
                self.requests.turn_sparse(row)
                self._fresh.add(row)

    def _set(self, state: LayerState) -> torch.Tensor:
        """The best K by the scores there are, bool [rows, kv_heads, blocks]."""
        allowed = reference.candidates(self.tables, self.shape) & (self.tables.sparse[:, None] > 0)
        allowed = allowed[:, None].expand_as(state.scores)
        return reference.best(state.scores, allowed, allowed.sum(-1).clamp(max=self.budget.blocks))

    def _judge(self, layer: int, state: LayerState, q: torch.Tensor) -> None:
        """Count how much of the exact set, by the real query, had been predicted."""
        predicted = self._predicted[layer]
        self.ops.score(state, self.tables, q, 0)
        if predicted is not None:
            exact = self._set(state)
            self.view.count(judged=int(exact.sum()), agreed=int((exact & predicted).sum()))

    def _report(self, sparse: int) -> None:
        """Bring the pool's counters, which the daemon shows, up to date."""
        total = torch.stack([state.counters for state in self.layers]).sum(0).tolist()
        entry = self.shape.entry_bytes
        self.view.count(steps=1)
        self.view.set(
            bytes=total[places.C_ADMITTED] * entry, bytes_written=total[places.C_WRITTEN] * entry,
            admitted=total[places.C_ADMITTED], evicted=total[places.C_EVICTED],
            wanted=total[places.C_WANTED], hit=total[places.C_HIT],
            wrong_owner=total[places.C_WRONG_OWNER], requests=len(self.requests.rows),
            sparse_requests=sparse, pages_used=self.pool.pages - self.requests.host.free,
            waits=self.requests.waits, preemptions=self.requests.preemptions,
        )  # fmt: skip

"""What a KV cache looks like, what of it stays in HBM, and how much may move in a step."""

from __future__ import annotations

import dataclasses
import math

import torch

from tierd.errors import KvUnsupportedError

BLOCKS = (16, 32, 64)
HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOCAL = 3  # slots of a request beside its K: the local block, a draft's, the one before
HEADER_WORDS = 4  # request, block, layer, generation: 16 bytes for each host block


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache of one rank.

    Attributes:
        layers: attention layers whose KV is kept.
        kv_heads: KV heads of this rank.
        group: query heads for each KV head.
        head_dim: elements of a key.
        block: tokens of a block.
        dtype: of keys and values.
    """

    layers: int
    kv_heads: int
    group: int
    head_dim: int
    block: int = 16
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Refuse what no kernel here serves, by name.

        Raises:
            KvUnsupportedError: the head size, block size or dtype is not supported.
        """
        if self.head_dim not in HEAD_DIMS:
            raise KvUnsupportedError(
                f"head size {self.head_dim} is not supported; the kernels take {HEAD_DIMS}"
            )
        if self.block not in BLOCKS:
            raise KvUnsupportedError(f"blocks of {self.block} tokens; supported are {BLOCKS}")
        if self.dtype not in DTYPES:
            name = str(self.dtype).removeprefix("torch.")
            raise KvUnsupportedError(
                f"a {name} KV cache is not supported; keys are summarised as bf16, fp16 or fp32"
            )
        if min(self.layers, self.kv_heads, self.group) < 1:
            raise KvUnsupportedError(
                f"{self.layers} layers, {self.kv_heads} KV heads, groups of {self.group}: "
                "each must be at least 1"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one block of one KV head: its keys, then its values."""
        return 2 * self.block * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, all KV heads."""
        return self.kv_heads * self.entry_bytes

    @property
    def summary_bytes(self) -> int:
        """Bytes of one block's summary in one layer, all KV heads."""
        return self.kv_heads * 2 * self.head_dim * self.dtype.itemsize

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens occupy."""
        return -(-tokens // self.block)

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the full KV of so many tokens."""
        return self.layers * self.blocks(tokens) * self.block_bytes

    def resident_bytes(self, tokens: int, budget: Budget) -> int:
        """Bytes of HBM that a sparse request of so many tokens holds, summaries included."""
        slots = min(budget.slots, self.blocks(tokens) + LOCAL)
        summaries = self.blocks(tokens) * self.summary_bytes
        return self.layers * (slots * self.block_bytes + summaries)


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """How much of a request stays in HBM, and how much of that may change in a step.

    Attributes:
        blocks: K, the selected blocks of each KV head (section 5.2: 128 of 16 tokens).
        cap: the share of K that a head may admit in a step (section 5.5: 0.05; 1 for all).
    """

    blocks: int = 128
    cap: float = 0.05

    def __post_init__(self) -> None:
        if self.blocks < 1 or not 0 <= self.cap <= 1:
            raise KvUnsupportedError(
                f"a budget of {self.blocks} blocks with cap {self.cap}: at least one block, "
                "and a cap from 0 to 1"
            )

    @property
    def admitted(self) -> int:
        """C: blocks that a head may admit in a step; at least one, or nothing would ever move."""
        return max(1, math.floor(self.blocks * self.cap)) if self.cap else 0

    @property
    def slots(self) -> int:
        """GPU blocks of a sparse request."""
        return self.blocks + LOCAL


def step_bytes(link_bytes_s: float, step_s: float) -> float:
    """C_token: what a link can move behind one step (equation 3)."""
    return link_bytes_s * step_s


def cap_that_hides(
    shape: KvShape, requests: int, link_bytes_s: float, step_s: float, budget: Budget
) -> int:
    """Blocks that each head may admit so that the step's transfers hide behind it.

    Equation 3 over the block-head entries of all layers and requests; never more than the
    budget's own cap, and at least one.
    """
    if requests < 1:
        return budget.admitted
    entries = step_bytes(link_bytes_s, step_s) / shape.entry_bytes
    per_head = int(entries // (shape.layers * shape.kv_heads * requests))
    return max(min(per_head, budget.admitted), min(1, budget.admitted))


class StepBudget:
    """Keeps each step's transfers within what the link moves behind it.

    Step times are smoothed, so that one slow step (a prefill among decodes) does not open the gate.
    """

    SMOOTHING = 0.1

    def __init__(self, shape: KvShape, budget: Budget, link_bytes_s: float) -> None:
        self._shape, self._budget, self._link = shape, budget, link_bytes_s
        self._step_s = 0.0

    def observe(self, step_s: float) -> None:
        """Take a step's time into account."""
        first = self._step_s == 0.0
        self._step_s += (1.0 if first else self.SMOOTHING) * (step_s - self._step_s)

    def admit(self, requests: int) -> int:
        """Return the blocks that each head of so many sparse requests may admit now."""
        if self._step_s == 0.0:
            return self._budget.admitted
        return cap_that_hides(self._shape, requests, self._link, self._step_s, self._budget)

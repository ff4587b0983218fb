"""The row cache in GPU memory: slots, their directory, and the stream that looks things up.

One cache serves all tables of one row size. Its lookups run on one high-priority stream, so that
they have one order whatever streams the engine uses.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from tierd.errors import HookError
from tierd.gpu import state
from tierd.gpu.kernels_kick import resize_cache
from tierd.gpu.shared import resolve_device
from tierd.io import _core

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_RESIZE_BLOCK = 1024
_HEADROOM_BYTES = 256 << 20  # left to the engine when a cache is allocated


class GpuCache:
    """Slots in HBM, 32-way set-associative, shared by the tables of one row size.

    Attributes:
        sets: sets of 32 slots, as allocated.
        row_bytes: bytes of a row as stored.
        words: int64 [slots], the directory: table 6 bits, row + 1 34, stamp 24; 0 is free.
        slots: uint8 [slots * stride], the rows.
        state: int64 [state.CACHE_WORDS].
    """

    def __init__(
        self,
        *,
        sets: int,
        row_bytes: int,
        device: str | torch.device = "cuda",
        first_kick: int = 0,
    ) -> None:
        """Reserve the memory.

        Args:
            sets: sets of 32 slots.
            row_bytes: bytes of a row as stored.
            device: a CUDA device; the CPU under Triton's interpreter.
            first_kick: where the kick counter starts; tests put it near 2^24.

        Raises:
            HookError: no such device, a size out of range, or not enough free GPU memory.
        """
        self.device = resolve_device(device)
        ways = state.WAYS.value
        if sets < 1 or sets * ways > state.SLOTS_LIMIT:
            limit = state.SLOTS_LIMIT // ways
            raise HookError(f"a row cache has 1 to {limit} sets of {ways} slots, not {sets}")
        self.sets = sets
        self.row_bytes = row_bytes
        self.stride = int(_core.row_stride(row_bytes))
        self._check_room()
        slots = int(sets * ways)
        self.words = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.slots = torch.empty(slots * self.stride, dtype=torch.uint8, device=self.device)
        self.state = torch.zeros(state.CACHE_WORDS, dtype=torch.int64, device=self.device)
        self.state[state.C_KICK.value] = first_kick + 1
        self.state[state.C_SETS.value] = sets
        self._sets_in_use = sets
        self._tables: set[int] = set()
        self._stream = (
            torch.cuda.Stream(self.device, priority=-5) if self.device.type == "cuda" else None
        )

    def _check_room(self) -> None:
        if self.device.type != "cuda":
            return
        need = self.sets * state.WAYS.value * (self.stride + 8)
        free, total = torch.cuda.mem_get_info(self.device)
        if need + _HEADROOM_BYTES > free:
            raise HookError(
                f"a row cache of {self.sets * state.WAYS.value} rows of {self.row_bytes} B needs "
                f"{need / 2**30:.2f} GiB; {self.device} has {free / 2**30:.2f} of "
                f"{total / 2**30:.1f} GiB free; lower cache.rows or the engine's memory fraction"
            )

    @property
    def directory_bytes(self) -> int:
        """Bytes of the directory."""
        return int(self.words.numel()) * 8

    def attach(self, table: int, quota: int) -> None:
        """Bind a table number; it is never bound twice, so its words cannot be mistaken.

        Raises:
            HookError: the number is taken or the quotas exceed the ways.
        """
        if not 0 <= table < int(_core.protocol.RINGS_MAX) or table in self._tables:
            raise HookError(f"table number {table} is out of range or in use in this cache")
        self._tables.add(table)
        retired = self.state[state.C_KICK.value] - 1
        self.state[state.C_RETIRED.value + table] = retired
        try:
            self.set_quota(table, quota)
        except HookError:
            self._tables.remove(table)
            raise

    def set_quota(self, table: int, ways: int) -> None:
        """Change a table's ways per set. Takes effect at its next miss; flushes nothing."""
        others = sum(self.quota(one) for one in self._tables if one != table)
        if not 0 <= ways <= state.WAYS.value - others:
            raise HookError(
                f"table {table}: {ways} ways; the other tables hold {others} of "
                f"{state.WAYS.value} ways per set"
            )
        with self.lookups(torch.cuda.current_stream(self.device) if self._stream else None):
            self.state[state.C_QUOTA.value + table] = ways

    def set_quotas(self, quotas: dict[int, int]) -> None:
        """Change several tables' ways together: what some give up, others may take."""
        kept = sum(self.quota(table) for table in self._tables - set(quotas))
        if min(quotas.values(), default=0) < 0 or kept + sum(quotas.values()) > state.WAYS.value:
            raise HookError(
                f"quotas {quotas}: the other tables hold {kept} of {state.WAYS.value} ways per set"
            )
        growth = {table: ways - self.quota(table) for table, ways in quotas.items()}
        for table in sorted(quotas, key=growth.__getitem__):
            self.set_quota(table, quotas[table])

    def quota(self, table: int) -> int:
        """Return a table's ways per set; waits for the GPU, whose kernels follow the daemon."""
        with self.lookups(None):
            return int(self.state[state.C_QUOTA.value + table])

    def resize(self, sets: int) -> None:
        """Use ``sets`` sets from now on; the words of the others are cleared.

        Words that a table has kicked and not gathered stay; they are still gathered, and found
        again if the sets come back.
        """
        if not 1 <= sets <= self.sets:
            raise HookError(f"sets in use must be between 1 and {self.sets}, got {sets}")
        capacity = self.words.numel()
        stream = torch.cuda.current_stream(self.device) if self._stream else None
        with self.lookups(stream):
            resize_cache[(-(-capacity // _RESIZE_BLOCK),)](
                self.words, self.state, sets, capacity, BLOCK=_RESIZE_BLOCK
            )
        if stream is not None and self._stream is not None:
            stream.wait_stream(self._stream)
        self._sets_in_use = sets

    def lookups(self, after: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """Enter the stream of lookups, behind everything that is on stream ``after`` now."""
        if self._stream is None:
            return contextlib.nullcontext()
        if after is not None:
            self._stream.wait_stream(after)
        return torch.cuda.stream(self._stream)

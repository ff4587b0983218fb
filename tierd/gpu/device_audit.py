"""The audit of a table on a GPU. See audit.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierd.errors import RowError
from tierd.gpu import kernels_audit
from tierd.gpu.audit import ROWS
from tierd.gpu.fault import WATCH
from tierd.gpu.ids import layout_of
from tierd.gpu.shared import HostBlock
from tierd.gpu.table import pow2
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.gpu.audit import RowJudge

_CLOSE_S = 2.0
_HEAD_BYTES = 4096
_HEAD_WORDS = _HEAD_BYTES // 8


class DeviceAudit:
    """Copies rows by a kernel, compares them on the thread that watches for faults."""

    def __init__(
        self, judge: RowJudge, every: int, device: torch.device, close: Callable[[], None]
    ) -> None:
        spec = judge.info.table
        raw = spec.row_format == RowFormat.RAW
        self._element = torch.uint8 if raw else torch.int16
        size = ROWS * spec.dim * (1 if raw else 2)
        whole = np.zeros(_HEAD_BYTES + -(-size // 4096) * 4096 + 4096, np.uint8)
        start = -whole.ctypes.data % 4096
        memory = whole[start : start + len(whole) - 4096]
        block = HostBlock(memory, device)
        self._judge, self._every, self._close = judge, every, close
        self._name, self._device, self._dim = judge.info.name, device, spec.dim
        self._block = block.view(0, _HEAD_WORDS, torch.int64)
        self._rows = block.view(_HEAD_BYTES, ROWS * spec.dim, self._element)
        self._words = memory[:_HEAD_BYTES].view(np.int64)
        kind = np.uint8 if raw else np.uint16
        self._values = memory[_HEAD_BYTES : _HEAD_BYTES + size].view(kind).reshape(ROWS, spec.dim)
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._cuda = device.type == "cuda"
        # At close() the watcher may be comparing, with descriptors that close() takes.
        self._lock = threading.Lock()
        self._closed = False
        if self._cuda:
            WATCH.add(self)

    def observe(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Enqueue the audit's kernel behind a gather; may be captured.

        Raises:
            RowError: in the interpreter, a row differs.
        """
        layout = layout_of(ids, self._device, self._name)
        if layout.count == 0:
            return
        kernels_audit.audit_rows[(1,)](
            ids, layout.cols, layout.stride0, layout.stride1, layout.count,
            out.view(self._element), self._block, self._rows, self._state, self._every,
            DIM=self._dim, WIDTH=pow2(self._dim), ROWS=ROWS, num_warps=1,
        )  # fmt: skip
        if not self._cuda and (reason := self.reason()) is not None:
            raise RowError(reason)

    def reason(self) -> str | None:
        """Compare what the kernel has copied since the last call; why it is wrong, or None."""
        with self._lock:
            return None if self._closed else self._compare()

    def _compare(self) -> str | None:
        written = int(self._words[kernels_audit.WRITTEN.value])
        if written == int(self._words[kernels_audit.TAKEN.value]):
            return None
        count = int(self._words[kernels_audit.COUNT.value])
        first = kernels_audit.IDS.value
        found = self._judge.differing(
            self._words[first : first + count].copy(), self._values[:count].copy()
        )
        self._words[kernels_audit.TAKEN.value] = written
        return found

    @property
    def compared(self) -> int:
        """Rows compared so far."""
        return self._judge.compared

    def close(self) -> None:
        """Watch no more, and let go of the oracle."""
        WATCH.remove(self)
        self._closed = True
        # A read that hangs must not hold the engine up; its descriptors then stay open.
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._close()
            finally:
                self._lock.release()

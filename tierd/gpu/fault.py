"""What happens when a kernel finds that it cannot serve a row: say why, and end the rank.

A kernel that must not go on writes its reason into a fault block in host memory and stops. The
watcher, one thread of the engine process, sees it within milliseconds, prints the reason and ends
the process, because after that the GPU will serve nothing. Only if nobody looks does the kernel
trap, which tells the engine no more than "unspecified launch failure".
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierd.gpu import state
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

EXIT_CODE = 70  # EX_SOFTWARE
_POLL_S = 0.002

log = logging.getLogger("tierd")


class Watched(Protocol):
    """What may tell why its table cannot be served any more."""

    def reason(self) -> str | None:
        """Return why, in one line, or None; called every few milliseconds."""


class FaultBlock:
    """One table's fault words, in host memory.

    Attributes:
        memory: page-aligned bytes; the first words are state.F_*.
    """

    def __init__(self, name: str, rows_per_page: int) -> None:
        whole = np.zeros(2 * 4096, np.uint8)
        start = -whole.ctypes.data % 4096
        self.memory: NDArray[np.uint8] = whole[start : start + 4096]
        self._words = self.memory[: state.FAULT_WORDS * 8].view(np.int64)
        self._name = name
        self._rows_per_page = rows_per_page

    def reason(self) -> str | None:
        """Return why the table stopped, in one line, or None."""
        code = int(self._words[state.F_CODE.value])
        if code == 0:
            return None
        sequence = int(self._words[state.F_SEQUENCE.value])
        detail = int(self._words[state.F_DETAIL.value])
        return f"{self._name}: {self._explain(code, sequence, detail)}"

    def _explain(self, code: int, sequence: int, detail: int) -> str:
        verify = "; run: tierd verify"
        if code == state.FAULT_BAD_ID.value:
            return f"row {detail} is outside the table: the engine's row numbers are wrong"
        if code == state.FAULT_STATUS.value:
            status = _core.protocol.Status(detail).name
            return f"request {sequence} failed: {status}{verify}"
        if code == state.FAULT_TIMEOUT.value:
            return f"request {sequence}: no answer within {detail / 1e9:.1f} s; run: tierd status"
        if code == state.FAULT_TAG.value:
            page = detail // self._rows_per_page
            return f"row {detail} (page {page}) does not carry its tag{verify}"
        if code == state.FAULT_CHANGED.value:
            return f"row {detail}: the row numbers changed between kick and gather"
        return f"request {sequence}: the ring stayed full for {detail / 1e9:.1f} s"


def end_process(reason: str) -> None:
    """Print the reason and end the process at once: nothing that it would still do is sound."""
    print(f"tierd: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class FaultWatch:
    """The thread that looks at the fault blocks of a process's tables."""

    def __init__(self, policy: Callable[[str], None] = end_process) -> None:
        self._policy = policy
        self._blocks: list[Watched] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, block: Watched) -> None:
        """Watch one more table; the first starts the thread."""
        with self._lock:
            self._blocks.append(block)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tierd-faults", daemon=True)
                self._thread.start()

    def remove(self, block: Watched) -> None:
        """Stop watching a table."""
        with self._lock:
            self._blocks = [b for b in self._blocks if b is not block]

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                blocks = list(self._blocks)
            for block in blocks:
                reason = block.reason()
                if reason is not None:
                    log.critical("%s", reason)
                    self.remove(block)
                    self._policy(reason)
            time.sleep(_POLL_S)


WATCH = FaultWatch()

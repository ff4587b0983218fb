"""One thread of a process made to stand still while the rest of it goes on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# PTRACE_SEIZE, then PTRACE_INTERRUPT; the tracer's end lets the thread go on. If the process ends
# before, the tracer has to take note of its thread's end, or nobody hears of the process's.
_TRACER = """
import ctypes, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
thread = int(sys.argv[1])
for request in (0x4206, 0x4207):
    if libc.ptrace(request, thread, 0, 0):
        sys.exit(print(os.strerror(ctypes.get_errno()), flush=True))
os.waitpid(thread, 0x40000000)
print("halted", flush=True)
threading.Thread(target=lambda: os._exit(len(sys.stdin.read()))).start()
os.waitpid(thread, 0x40000000)
"""


@contextlib.contextmanager
def halted(name: str, pid: int | str = "self") -> Iterator[None]:
    """Stop the only thread of this name; it goes on at the end."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    (thread,) = [task.name for task in tasks if (task / "comm").read_text().strip() == name]
    with subprocess.Popen(
        [sys.executable, "-c", _TRACER, thread],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as tracer:  # fmt: skip
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        try:
            said = tracer.stdout.readline().strip()
            if said != "halted":
                pytest.skip(f"threads cannot be traced here: {said}")
            yield
        finally:
            tracer.stdin.close()

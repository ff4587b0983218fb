"""The watchdog sees what stands still, and ends the process when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0


def eventually(check: Callable[[], bool], beat: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline
        beat()
        time.sleep(0.005)


def test_what_stands_still_is_named_until_it_turns_again() -> None:
    pump = _core.Pump(spin_us=0)
    pump.start()
    dog = _core.Watchdog(interval_ms=200, ends=False)
    dog.watch("pump 0", pump)
    eventually(lambda: dog.stuck == "event loop")  # nobody beats; the parked pump turns by itself
    eventually(lambda: dog.stuck == "", dog.beat)
    pump.stop()
    eventually(lambda: dog.stuck == "pump 0", dog.beat)
    dog.stop()
    dog.stop()


def test_an_interval_that_would_bark_at_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 200, got 10"):
        _core.Watchdog(interval_ms=10, ends=False)


def test_the_process_is_ended_if_wanted() -> None:
    code = (
        "import time; from tierd.io import _core\n"
        "dog = _core.Watchdog(interval_ms=200, ends=True)\ntime.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGABRT
    assert "event loop stood still for 400 ms" in done.stderr
    assert "daemon.watchdog_ends" in done.stderr

"""A node under chaos: a device that can be slow, daemons, an engine, and what must hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tests import checkpoints
from tests.chaos.engine import PHASES, Board
from tests.lab import disks
from tests.oracle import EngramOracle, Shards
from tierd.api import rest_client
from tierd.errors import DaemonError
from tierd.io.checkpoint import Checkpoint
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
ROWS = 20_000
DEVICE_BYTES = 64 << 20
HANG_S = 120.0  # no step for this long, with a server there, is a hang, on any machine
LOOK_S = 0.002


class ChaosError(Exception):
    """Something that must hold did not."""


@dataclasses.dataclass
class Counts:
    """What happened so far."""

    kills: int = 0
    kills_with_delayed_reads: int = 0
    cases: int = 0
    rows: int = 0
    wrong_rows: int = 0
    hangs: int = 0
    tokens: int = 0
    tokens_differing: int = 0
    failed_as_expected: int = 0


class Zygote:
    """Forks daemons and engines."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote", *words],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if self._out.readline() != "ready\n":
            raise ChaosError("the zygote did not start")

    def start(self, **order: Any) -> int:
        self._in.write(json.dumps(order) + "\n")
        self._in.flush()
        return int(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait()
        self._out.close()


class Process:
    """A process that the zygote started, held by a pidfd."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def send(self, number: int) -> None:
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def wait(self, timeout_s: float) -> bool:
        """Tell whether it has ended within the time."""
        if self._fd < 0:
            return True
        ended = bool(select.select([self._fd], [], [], timeout_s)[0])
        if ended:
            os.close(self._fd)
            self._fd = -1
        return ended


class World:
    """One node: starts and ends everything, and knows what must hold."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.chance = random.Random(seed)
        self.counts = Counts()
        self.began = time.monotonic()
        self.run = directory / "run"
        self.run.mkdir()
        self.socket = self.run / "engine.sock"
        self.api = self.run / "api.sock"
        self.log = directory / "log"
        self._disk = contextlib.ExitStack()
        self.slow: disks.BadDisk | None = None
        self.why_not_slow = ""
        self.device = self._make_device()
        self.tiny = checkpoints.engram(directory / "v41", rows=ROWS)
        self.oracle = directory / "oracle"
        self._stage()
        self.zygote, self.next_zygote = Zygote(), Zygote("9.9.9")
        self.daemon: Process | None = None
        self.engine: Process | None = None
        self.board = Board(directory / "board")
        self.engines = 0
        self.boards: list[Board] = []
        self.tokens: Board | None = None
        self._tokens: subprocess.Popen[bytes] | None = None
        self.stop_s = 0.3  # longer than any server is granted
        self.tolerated = False

    def _make_device(self) -> str:
        self.why_not_slow = disks.why_not()
        if not self.why_not_slow:
            bad = disks.bad_disk(self.directory, DEVICE_BYTES)
            try:
                self.slow = self._disk.enter_context(bad)
            except OSError as error:
                self.why_not_slow = f"no slow device here: {error}"
        return self.slow.path if self.slow else str(self.directory / "device.img")

    def _stage(self) -> None:
        size = None if self.slow else DEVICE_BYTES
        with Store.format(self.device, size=size) as store:
            source = Checkpoint.open(self.tiny.path)
            stage(store, source, find_tables(source), model="v41")
        self.oracle.mkdir()
        shards = Shards(self.tiny.path)
        for layer in (1, 14):
            rows = EngramOracle(shards, layer).bf16(np.arange(ROWS))
            np.save(self.oracle / f"layers.{layer}.engram.npy", rows)

    def stage_model(self, directory: Path, model: str) -> None:
        """Stage another checkpoint beside the first, while no daemon runs."""
        with Store.open(self.device) as store:
            source = Checkpoint.open(directory)
            stage(store, source, find_tables(source), model=model)

    # --- processes -------------------------------------------------------------------------------

    def start_daemon(self, *, version: str = "this") -> None:
        """Start ``tierd serve``, and wait until it says that it is ready."""
        address = self.directory / "notify.sock"
        address.unlink(missing_ok=True)
        zygote = self.zygote if version == "this" else self.next_zygote
        words = ["serve", "--json", "--dir", str(self.run), "--device", self.device]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(address))
            pid = zygote.start(what="serve", words=words, log=str(self.log), notify=str(address))
            self.daemon = Process(pid)
            manager.settimeout(0.1)
            deadline = time.monotonic() + HANG_S
            while True:
                with contextlib.suppress(TimeoutError):
                    if b"READY=1" in manager.recv(4096):
                        return
                if self.daemon.wait(0) or time.monotonic() > deadline:
                    raise ChaosError("the daemon did not start; see " + str(self.log))

    def kill_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.send(signal.SIGKILL)
        self.counts.kills += 1
        if not self.daemon.wait(HANG_S):
            raise ChaosError("a killed daemon did not end")

    def stop_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.send(signal.SIGTERM)
        if not self.daemon.wait(HANG_S):
            raise ChaosError("the daemon did not stop on SIGTERM")

    def start_engine(self) -> None:
        self.engines += 1
        board = self.directory / f"board{self.engines}"
        self.board = Board(board)
        self.boards.append(self.board)
        words = [str(self.socket), str(self.oracle), str(board), str(self.engines)]
        log = str(self.directory / "engine.log")
        self.engine = Process(self.zygote.start(what="engine", words=words, log=log))

    def start_tokens(self, checkpoint: Path, model: str) -> None:
        """Start an engine with a model that has been staged under a name."""
        words = ["tierd.tools.demo_generate", checkpoint]
        done = self._python(*words, capture=True)
        expected = self.directory / "tokens.json"
        expected.write_text(json.dumps(json.loads(done)[checkpoint.name]))
        self.tokens = Board(self.directory / "tokens.board")
        command = [
            sys.executable, "-m", "tierd.cli", "run", "--socket", self.socket, "--model", model,
            "--", sys.executable, "-m", "tests.chaos.tokens", checkpoint, expected,
            self.directory / "tokens.board",
        ]  # fmt: skip
        with (self.directory / "tokens.log").open("wb") as log:
            self._tokens = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, stdout=log, stderr=log,
                env={**os.environ, "TIERD_CACHE_ROWS": "256", "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def _python(self, *words: object, capture: bool) -> str:
        command = [sys.executable, "-m", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=capture, text=True)
        return done.stdout

    # --- what must hold --------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        self.board.set("phase", PHASES.index(name))

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not done():
            if time.monotonic() > deadline:
                self.counts.hangs += 1
                raise ChaosError(f"hang: {what}")
            time.sleep(LOOK_S)

    def goes_on(self, steps: int = 3) -> None:
        """Wait until the engine has done some steps more."""
        wanted = self.board.get("steps") + steps
        self.until(lambda: self.board.get("steps") >= wanted, "the engine does no step")

    def goes_on_alone(self, steps: int = 2) -> None:
        """As goes_on, while there is no daemon: an engine that attaches waits for one."""
        if PHASES[self.board.get("phase")] == "attach":
            time.sleep(0.05)
        else:
            self.goes_on(steps)

    def tolerate(self) -> None:
        """The fault just injected makes requests fail; that is no fault of the servers."""
        self.tolerated = True

    def check(self) -> None:
        """Nobody has seen a wrong row or a wrong token."""
        self.counts.rows = sum(board.get("rows") for board in self.boards)
        self.counts.wrong_rows = sum(board.get("wrong") for board in self.boards)
        if self.tokens is not None:
            self.counts.tokens = self.tokens.get("rows")
            self.counts.tokens_differing = self.tokens.get("wrong")
        if self.counts.wrong_rows or self.counts.tokens_differing:
            raise ChaosError(f"wrong rows or tokens: {self.counts}")
        if self._tokens is not None and self._tokens.poll() is not None:
            raise ChaosError("the engine with the model ended; see tokens.log")

    def failed_since(self, before: int) -> int:
        return self.board.get("failed") - before

    def clients(self) -> int:
        try:
            return len(rest_client.get(self.api, "/v1/clients")["clients"])
        except DaemonError:
            return -1

    def close(self) -> None:
        if self.slow is not None:
            self.slow.fail()
        for board in [*self.boards, *([self.tokens] if self.tokens else [])]:
            board.set("stop", 1)
        if self._tokens is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._tokens.wait(20)
            self._tokens.kill()
            self._tokens.wait()
        for process in (self.engine, self.daemon):
            if process is not None:
                process.send(signal.SIGCONT)
                process.send(signal.SIGKILL)
                process.wait(HANG_S)
        self.zygote.close()
        self.next_zygote.close()
        self._disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

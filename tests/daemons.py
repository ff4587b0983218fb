"""Real daemons for tests: ``tierd serve`` as a process, ready when it tells systemd so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from tests import checkpoints
from tests.node import Node as BareNode
from tierd import config
from tierd.api.server import RestApi
from tierd.cli import cli
from tierd.daemon.service import serve
from tierd.errors import TierdError
from tierd.io.checkpoint import Checkpoint
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.checkpoints import TinyCheckpoint

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


@dataclasses.dataclass
class Node(BareNode):
    """One whose device has staged images."""

    checkpoints: dict[str, TinyCheckpoint]  # by model


def make_node(directory: Path, models: dict[str, TinyCheckpoint], *, size: int = 16 << 20) -> Node:
    """Format a file and stage every table of the checkpoints on it."""
    run = directory / "run"
    run.mkdir()
    device = directory / "device.img"
    with Store.format(device, size=size) as store:
        for model, tiny in models.items():
            source = Checkpoint.open(tiny.path)
            stage(store, source, find_tables(source), model=model)
    return Node(run, device, models)


def engram_node(directory: Path, *, rows: int = 1000) -> Node:
    """Make a node with the two tables of a tiny V4.1."""
    return make_node(directory, {"v41": checkpoints.engram(directory / "v41", rows=rows)})


def serve_command(node: Node, *options: object) -> list[str]:
    words = ["serve", "--json", "--dir", node.directory, "--device", node.device, *options]
    return [sys.executable, "-m", "tierd.cli", *map(str, words)]


class Daemon:
    """A running ``tierd serve``."""

    def __init__(self, node: Node, *options: object, environ: dict[str, str] | None = None) -> None:
        self.node = node
        address = node.directory / "notify.sock"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(address))
            with node.log.open("ab") as log:
                self.process = subprocess.Popen(
                    serve_command(node, *options),
                    cwd=ROOT,
                    stderr=log,
                    env={**os.environ, **(environ or {}), "NOTIFY_SOCKET": str(address)},
                )
            self._manager = manager.dup()
        self.expect("READY=1")

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, word: str) -> None:
        """Wait until the daemon tells systemd something; fail with its log if it ends instead."""
        self._manager.settimeout(0.2)
        for _ in range(int(START_TIMEOUT_S / 0.2)):
            try:
                if word in self._manager.recv(4096).decode().splitlines():
                    return
            except TimeoutError:
                if self.process.poll() is not None:
                    break
        self.close()
        raise AssertionError(f"no {word}; log:\n{self.node.log.read_text()}")

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_TIMEOUT_S)
        self._manager.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._manager.close()

    def events(self) -> list[dict[str, Any]]:
        """Return the log's entries."""
        return [json.loads(line) for line in self.node.log.read_text().splitlines()]


@contextlib.contextmanager
def running(
    node: Node, *options: object, environ: dict[str, str] | None = None
) -> Iterator[Daemon]:
    daemon = Daemon(node, *options, environ=environ)
    try:
        yield daemon
    finally:
        daemon.close()


def tierd(*words: object, exit_code: int = 0) -> Result:
    """Run a ``tierd`` command in this process (starting Python anew costs a second each)."""
    result = CliRunner().invoke(cli, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == exit_code, result.output
    return result


def refused_start(node: Node, **overrides: Any) -> str:
    """Start a daemon in this process that must refuse, and return its one line."""
    config_path = overrides.pop("config_path", None)
    given = {
        "daemon.runtime_dir": str(node.directory),
        "daemon.state_dir": str(node.directory),
        "devices.paths": [str(node.device)],
        **overrides,
    }
    with pytest.raises(TierdError) as caught:
        serve(config.load(config_path, overrides=given).settings, RestApi)
    assert "\n" not in str(caught.value)
    return str(caught.value)

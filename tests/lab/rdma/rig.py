"""What runs inside the lab's machines: daemons, and a client that compares whole pages.

Imports cost seconds in there, so this does without most of what other tests share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.node import Node
from tierd.api import rest_client
from tierd.errors import TierdError
from tierd.io import _core, wire
from tierd.io.blocks import PageReader
from tierd.io.store import Store
from tierd.io.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PAGE = 4096
SECOND = 1_000_000_000
TOKEN = "t" * 32
ROOT = Path(__file__).resolve().parents[3]
START_S = 240.0  # emulated, and its host may be busy
STOP_S = 120.0


class Daemon:
    """A running ``tierd serve``; it may still be starting."""

    def __init__(self, node: Node, environ: dict[str, str]) -> None:
        words = ["serve", "--json", "--dir", str(node.directory), "--device", str(node.device)]
        self.node = node
        with node.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierd.cli", *words],
                cwd=ROOT,
                stderr=log,
                env={**os.environ, **environ},
            )

    def wait_ready(self) -> None:
        until(lambda: answers(self.node) or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.node.log.read_text()[-2000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(STOP_S)


def answers(node: Node) -> bool:
    try:
        rest(node, "/v1/status")
    except TierdError:
        return False
    return True


def write_secret(path: Path, text: str) -> Path:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    return path


def oracle(device: Path) -> dict[str, tuple[Any, NDArray[np.uint8]]]:
    """Every image of a device, read by nothing that is under test: name -> (info, pages)."""
    found = {}
    with StoreSet.open([device], write=False) as stores:
        for image in stores.images:
            pages = np.zeros(image.info.pages * PAGE, np.uint8)
            assert not PageReader(image).read(0, pages).any()
            found[image.name] = (image.info, pages.reshape(-1, PAGE))
    return found


def node_at(directory: Path, device: Path | None) -> Node:
    """A node with a copy of a device, or with an empty one."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "run").mkdir(parents=True)
    own = directory / "device.img"
    if device is None:
        Store.format(own, size=16 << 20).close()
    else:
        shutil.copyfile(device, own)
    return Node(directory / "run", own)


def serve_exports(node: Node, listen: str = "127.0.0.1:9468", **more: str) -> Daemon:
    """Start a daemon that exports everything it has."""
    environ = {
        "TIERD__API__LISTEN": listen,
        "TIERD__API__TOKEN_FILE": str(write_secret(node.directory / "admin", "a" * 32)),
        "TIERD__EXPORTS__IMAGES": "*",
        "TIERD__EXPORTS__TOKEN_FILE": str(write_secret(node.directory / "peers", TOKEN)),
        "TIERD__IO__SCRUB": "false",
        **more,
    }
    return Daemon(node, environ)


def serve_remote(
    node: Node, peer: str = "http://127.0.0.1:9468", token: str = TOKEN, **more: str
) -> Daemon:
    """Start a daemon that reads a peer's exports."""
    environ = {
        "TIERD__REMOTE__PEERS": peer,
        "TIERD__REMOTE__TOKEN_FILE": str(write_secret(node.directory / "token", token)),
        "TIERD__REMOTE__TIMEOUT_US": "1000000",
        "TIERD__IO__SCRUB": "false",
        **more,
    }
    return Daemon(node, environ)


def rest(node: Node, path: str) -> dict[str, Any]:
    return rest_client.get(node.api_socket, path)


def until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def peer_up(node: Node) -> bool:
    (peer,) = rest(node, "/v1/status")["peers"]
    return bool(peer["up"])


def all_linked(node: Node) -> bool:
    """Every table is there, and can be read from the peer now."""
    placements = rest(node, "/v1/placements")["placements"]
    tiers = [tier for one in placements for tier in one["tiers"] if tier["tier"] == "remote"]
    return len(tiers) == 2 and all(tier["linked"] for tier in tiers)


class Client:
    """An engine rank with one ring, over the engine socket."""

    def __init__(
        self, node: Node, info: Any, pages: NDArray[np.uint8], rows_max: int = 256
    ) -> None:
        self.data = pages
        self.channel = _core.Channel(
            rank=0, world=1, client_id=b"c" * 16, rings=[(rows_max, 4 * rows_max, 0, 0)]
        )
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.connect(str(node.engine_socket))
        self._ask({"op": "hello", "abi": wire.ABI})
        image = {"image_id": f"{info.image_id:016x}", "generation": info.generation}
        asked = {"op": "attach", "abi": wire.ABI, "engine": "lab", "rank": 0, "world": 1}
        _, fds = self._ask({**asked, "expected_ranks": 1, "images": [image]}, [self.channel.fd])
        self.fds = fds
        self.ring = _core.RingClient(self.channel, 0, fds[0], spin_us=20, first_sequence=0)
        self.rows_wrong = self.pages_read = 0

    def _ask(self, message: dict[str, Any], fds: list[int] | None = None) -> tuple[Any, list[int]]:
        wire.send(self._sock, message, fds or [])
        answer, received = wire.receive(self._sock)
        assert answer["ok"], answer
        return answer, received

    def read(self, pages: NDArray[np.int64], timeout_s: float = 60) -> int:
        """Read pages, compare every byte; return the status. A hang is an error."""
        numbers = pages.astype(np.uint32)
        zeros = np.zeros_like(numbers)
        sequence = int(self.ring.publish(numbers, zeros, zeros, 0))
        status = int(self.ring.wait(sequence, int(timeout_s * SECOND)))
        if status == _core.protocol.Status.ok:
            wrong = (self.ring.pages(sequence) != self.data[pages]).any(axis=1)
            self.rows_wrong += int(wrong.sum())
            self.pages_read += len(pages)
        self.ring.retire(sequence)
        return status

    def right(self, rng: np.random.Generator, count: int = 200) -> bool:
        """Read drawn pages; whether all came, and right."""
        before = self.rows_wrong
        status = self.read(rng.integers(0, len(self.data), count))
        return status == _core.protocol.Status.ok and self.rows_wrong == before

    def close(self) -> None:
        self._sock.close()
        wire.close_all(self.fds)


@contextlib.contextmanager
def shown_on_failure(*nodes: Node) -> Any:
    """Print the daemons' logs if the body fails."""
    try:
        yield
    except BaseException:
        for node in nodes:
            if node.log.exists():
                print(f"--- {node.log}\n{node.log.read_text()[-4000:]}", file=sys.stderr)
        raise

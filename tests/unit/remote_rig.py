"""A node that exports and one that reads, in one process: real HTTP, real pumps, real threads.

Only the wire is played: pages are copied from the exporting side's memory by their addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import select
import shutil
import socket
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.daemons import engram_node
from tests.rest import Rest, serving
from tierd.config import load
from tierd.daemon import exports as exporting_side
from tierd.daemon import remotes
from tierd.daemon.plane import DataPlane
from tierd.io import _core
from tierd.io.device import PAGE_BYTES
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    import pytest

    from tierd.io.exports import ImageMemory, Place

PATIENCE_S = 20.0
TOKEN = "p" * 32
TIMEOUT_NS = 2_000_000_000
OK = int(_core.protocol.Status.ok)


def staged_device(directory: Path) -> Iterator[Path]:
    """A device with two tables, for a module."""
    yield engram_node(directory, rows=300).device
    gc.collect()  # links and pumps go now, not while another test counts descriptors


def secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def exporting(directory: Path, **more: Any) -> dict[str, Any]:
    """The configuration of a node that exports everything it has."""
    return {
        "api.listen": "127.0.0.1:0",
        "api.token_file": secret(directory / "admin", "a" * 32),
        "exports.images": ["v41/*"],
        "exports.token_file": secret(directory / "peers", TOKEN),
        **more,
    }


class Region:
    """An export that peers read by its address."""

    def __init__(self, memory: ImageMemory) -> None:
        self.memory: ImageMemory | None = memory
        where, pages = memory.pages.ctypes.data, memory.pages.size // PAGE_BYTES
        self.places: list[Place] = [(0, pages, where, 7)]
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.memory = None


class Exporter:
    """The passive side."""

    kind = "nixl"
    linger_s = 0.0
    gone = False

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.closed = False

    def describe(self) -> list[str]:
        return ["played"]

    def register(self, memory: ImageMemory) -> Region:
        self.regions.append(Region(memory))
        return self.regions[-1]

    def accept(self, asked: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        assert asked["links"] == []
        return [], {"agent": "played"}

    def is_gone(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.closed = True


class Reader:
    """The side that reads: a real link a pump, and a thread that copies what it wants."""

    kind = "nixl"
    way = None

    def __init__(self, depth: int, pumps: int) -> None:
        self.links: list[Any] = [_core.QueueLink(depth, TIMEOUT_NS) for _ in range(pumps)]
        self.tried: list[tuple[int, int]] = []
        self._rows: list[tuple[int, int]] = []  # (address, pages)
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def asks(self) -> dict[str, Any]:
        return {"transport": self.kind, "port": None, "links": [], "agent": ""}

    def connect(self, answer: dict[str, Any]) -> None:
        assert answer["agent"] == "played"
        for link in self.links:
            link.open()

    def places(self, offered: list[Place]) -> list[Place]:
        # A link takes numbers of pages, which count through all that is offered.
        out = []
        for first, pages, address, _ in offered:
            before = sum(count for _, count in self._rows)
            self._rows.append((address, pages))
            out.append((first, pages, before * PAGE_BYTES, 0))
        return out

    def page(self, number: int) -> Any:
        for address, pages in self._rows:
            if number < pages:
                text = ctypes.string_at(address + number * PAGE_BYTES, PAGE_BYTES)
                return np.frombuffer(text, np.uint8)
            number -= pages
        raise AssertionError("a page that is not offered")

    def probe(self, pages: list[tuple[int, int]], out: Any) -> float:
        for at, (address, _) in enumerate(pages):
            out[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] = self.page(address // PAGE_BYTES)
        return 5.0

    def try_ways(self, page: tuple[int, int]) -> None:
        self.tried.append(page)

    def start(self) -> None:
        for link in self.links:
            thread = threading.Thread(target=self._move, args=(link,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _move(self, link: Any) -> None:
        wanted = select.poll()
        wanted.register(link.event_fd, select.POLLIN)
        while link.up and not self._ends.is_set():
            wanted.poll(50)
            slots, pages = link.take(64)
            for slot, page in zip(slots, pages, strict=True):
                at = int(slot) * PAGE_BYTES
                link.memory[at : at + PAGE_BYTES] = self.page(int(page))
            if len(slots):
                link.finish(slots, True)

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@contextlib.asynccontextmanager
async def exporting_node(
    monkeypatch: pytest.MonkeyPatch, device: Path, directory: Path, **more: Any
) -> AsyncIterator[Rest]:
    """Serve a device's images to peers, once they are in memory."""
    monkeypatch.setattr(exporting_side, "open_exporter", lambda _: Exporter())
    async with serving(device, directory, **exporting(directory, **more)) as rest:
        exported = rest.daemon.exports
        exported.start()
        try:
            await rest.until(lambda: ready(exported))
            yield rest
        finally:
            exported.stop()


def ready(exported: exporting_side.Exports) -> bool:
    listed = exported.listing()
    return bool(listed) and all(one.state == "ready" for one in listed)


def address(rest: Rest) -> str:
    return f"http://{rest.api.addresses['api.listen']}"


class Reading:
    """A node that reads from peers."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, device: Path, peer: str, **more: Any
    ) -> None:
        given = {"remote.peers": [peer], "remote.token_file": "/t", "devices.paths": [str(device)]}
        self.settings = load(environ={}, overrides={**given, **more}).settings
        self.plane = DataPlane.open(self.settings)
        self.events: list[tuple[str, str, str]] = []
        self.readers: list[Reader] = []
        monkeypatch.setattr(remotes, "open_reader", self._open)
        self.peer = remotes.Peer(
            remotes.Caller(peer, TOKEN, ""),
            self.settings.remote,
            self.settings.pump,
            self.plane,
            lambda *event: self.events.append(event),
        )

    def _open(self, _: Any, depth: int, pumps: int) -> Reader:
        self.readers.append(Reader(depth, pumps))
        return self.readers[-1]

    def linked(self) -> bool:
        images = self.plane.images.values()
        return self.peer.up and all(
            tier.linked for image in images for tier in image.remotes.values()
        )

    def close(self) -> None:
        self.peer.stop(PATIENCE_S)
        self.plane.close()


class Engine:
    """A channel on a plane's pump with one image, and what reads it."""

    def __init__(self, plane: DataPlane, image: Any) -> None:
        ring = (32, 256, 0, 0)
        self.channel = _core.Channel(rank=0, world=1, client_id=b"c" * 16, rings=[ring])
        self._plane = plane
        self.attached = plane.attach(self.channel.fd, [image])
        wake = plane.pumps[self.attached.pump].wake_fd
        self._ring = _core.RingClient(self.channel, 0, wake, spin_us=20, first_sequence=0)

    def read(self, pages: list[int]) -> int:
        """Read pages, each of them checked by the pump; return the status."""
        numbers = np.asarray(pages, np.uint32)
        zeros = np.zeros_like(numbers)
        sequence = int(self._ring.publish(numbers, zeros, zeros, 0))
        status = int(self._ring.wait(sequence, int(PATIENCE_S * 1e9)))
        self._ring.retire(sequence)
        return status

    def close(self) -> None:
        assert self._plane.detach(self.attached, 5000)


class Played:
    """A peer's REST interface that says what a test wants: one answer a request, then the last."""

    def __init__(self, *answers: Callable[[socket.socket], None]) -> None:
        self._answers = list(answers)
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._sock.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self._sock.accept()
            except OSError:
                return
            with one, contextlib.suppress(OSError):
                text = b""
                while b"\r\n\r\n" not in text:
                    text += one.recv(65536)
                self.asked.append(text.split(b" ")[0].decode())
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                answer(one)

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(PATIENCE_S)


def says(status: int, body: bytes) -> Callable[[socket.socket], None]:
    head = f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda sock: sock.sendall(head + body)


@contextlib.contextmanager
def played(*answers: Callable[[socket.socket], None]) -> Iterator[Played]:
    one = Played(*answers)
    try:
        yield one
    finally:
        one.close()


def empty_device(directory: Path) -> Path:
    Store.format(directory / "empty.img", size=16 << 20).close()
    return directory / "empty.img"


def copy_of(device: Path, directory: Path, name: str) -> Path:
    return shutil.copy(device, directory / name)

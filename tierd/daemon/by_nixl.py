"""Remote tables over NIXL (UCX over TCP and others), where there are no verbs.

The package is ``nixl-cu12`` without its dependencies: it needs neither torch nor a GPU for memory.
Its bytes go into memory of the link and are copied from there (``_core.QueueLink``), since a NIXL
transfer cannot be cancelled. A thread a link takes what the pump wants in batches, and NIXL picks
the pages of a batch from a list that was prepared once.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import secrets
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from tierd.errors import RdmaMemoryError, RdmaMissingError, RdmaPeerError
from tierd.io import _core
from tierd.io.device import PAGE_BYTES, aligned_buffer

if TYPE_CHECKING:
    from tierd.config.remote import RemoteSection
    from tierd.io.exports import ImageMemory, Place

log = structlog.get_logger("tierd.daemon.nixl")

BATCH = 64  # pages in one transfer
TRANSFERS_MAX = 4  # at once
PROBE_S = 5.0
CLOSE_S = 2.0
IDLE_MS = 200
PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


def load() -> Any:
    """Return NIXL's Python interface.

    Raises:
        RdmaMissingError: it is not installed.
    """
    # UCX would look for RDMA devices again, which there are not.
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{package}._api")
    raise RdmaMissingError("NIXL is not installed; run: pip install --no-deps nixl-cu12")


def errors() -> tuple[type[Exception], ...]:
    """Return NIXL's exceptions; they have no base of their own."""
    found = vars(load().nixlBind).values()
    own = [one for one in found if isinstance(one, type) and issubclass(one, Exception)]
    return (RuntimeError, *own)


def make_agent() -> Any:
    """Return an agent with the UCX backend.

    Raises:
        RdmaMissingError: there is none.
    """
    api = load()
    try:
        config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        return api.nixl_agent(f"tierd-{secrets.token_hex(8)}", config)
    except errors() as error:
        raise RdmaMissingError(f"NIXL cannot be used: {error}") from None


class NixlRegion:
    """An image that peers may read."""

    def __init__(self, agent: Any, memory: ImageMemory) -> None:
        self._agent = agent
        self._memory = memory
        where = memory.pages.ctypes.data
        try:
            self._registered = agent.register_memory([(where, memory.pages.size, 0, "")], "DRAM")
        except errors() as error:
            raise RdmaMemoryError(f"NIXL takes no memory to export: {error}") from None
        self.places: list[Place] = [(0, memory.pages.size // PAGE_BYTES, where, 0)]

    def close(self) -> None:
        """Withdraw it."""
        with contextlib.suppress(*errors()):  # it is withdrawn all the same: peers forget it
            self._agent.deregister_memory(self._registered)
        self._agent = None  # it ends with its last user


class NixlExporter:
    """The passive side: NIXL's own thread answers."""

    kind = "nixl"
    # UCX over TCP copies from whatever address a peer names, registered or not: memory that is
    # given up while one still reads would end the process. Peers hear of it within a second.
    linger_s = 10.0

    def __init__(self) -> None:
        self._agent = make_agent()

    def describe(self) -> list[str]:
        """Say how peers reach it."""
        return ["NIXL, UCX over " + os.environ["UCX_TLS"]]

    def register(self, memory: ImageMemory) -> NixlRegion:
        """Return memory that peers may read."""
        return NixlRegion(self._agent, memory)

    def accept(self, asked: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what a peer needs to know; it connects by itself."""
        del asked
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return [], {"agent": metadata}

    def is_gone(self) -> bool:
        """Never: no device is opened."""
        return False

    def close(self) -> None:
        """End the agent."""
        self._agent = None


class NixlReader:
    """The side that reads: one link and one thread a pump.

    Attributes:
        links: for the pumps.
    """

    kind = "nixl"
    way = None

    def __init__(self, settings: RemoteSection, depth: int, pumps: int) -> None:
        """Make an agent a pump.

        Raises:
            RdmaMissingError: NIXL cannot be used.
        """
        timeout_ns = settings.timeout_us * 1000
        self.links: list[Any] = [_core.QueueLink(depth, timeout_ns) for _ in range(pumps)]
        self._movers = [Mover(link) for link in self.links]
        self._rows: list[tuple[int, int]] = []  # (address, pages)

    def asks(self) -> dict[str, Any]:
        """Return what the peer needs to know."""
        return {"transport": self.kind, "port": None, "links": [], "agent": ""}

    def connect(self, answer: dict[str, Any]) -> None:
        """Connect the agents; the links are up then."""
        metadata = base64.b64decode(answer["agent"])
        for mover in self._movers:
            mover.connect(metadata)

    def places(self, offered: list[Place]) -> list[Place]:
        """Return where a link finds what the peer offers: numbers in the list that is prepared."""
        out = []
        for first, pages, address, _ in offered:
            before = sum(count for _, count in self._rows)
            self._rows.append((address, pages))
            out.append((first, pages, before * PAGE_BYTES, 0))
        return out

    def probe(self, pages: list[tuple[int, int]], out: Any) -> float:
        """Read (address, key) pages into ``out``; return microseconds.

        Raises:
            RdmaPeerError: one of them does not come.
        """
        self._movers[0].prepare(self._rows)
        return self._movers[0].probe([address // PAGE_BYTES for address, _ in pages], out)

    def try_ways(self, page: tuple[int, int]) -> None:
        """Read an (address, key) page over each link.

        Raises:
            RdmaPeerError: it does not come.
        """
        out = aligned_buffer(PAGE_BYTES)
        for mover in self._movers:
            mover.prepare(self._rows)
            mover.probe([page[0] // PAGE_BYTES], out)

    def start(self) -> None:
        """Move pages from now on."""
        for mover in self._movers:
            mover.prepare(self._rows)
            mover.start()

    def close(self) -> None:
        """End the threads and agents."""
        for mover in self._movers:
            mover.close()


class Mover:
    """Fetches a link's pages."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self._agent = make_agent()
        self._memory = link.memory
        where, size = self._memory.ctypes.data, self._memory.size
        rows = np.array([[where, PAGE_BYTES, 0, PAGE_BYTES, size // PAGE_BYTES]], np.uint64)
        try:
            self._registered = self._agent.register_memory([(where, size, 0, "")], "DRAM")
            self._local = self._agent.prep_xfer_dlist("", rows, "DRAM")
        except errors() as error:
            raise RdmaMemoryError(f"NIXL takes no memory to read into: {error}") from None
        self._remote: Any = None
        self._peer = ""
        self._prepared = 0
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierd-nixl", daemon=True)

    def connect(self, metadata: bytes) -> None:
        """Get to know the peer's agent."""
        try:
            self._peer = self._agent.add_remote_agent(metadata)
            self._peer = self._peer.decode() if isinstance(self._peer, bytes) else self._peer
            self._agent.make_connection(self._peer)
        except errors() as error:
            raise RdmaPeerError(f"NIXL does not reach the peer: {error}") from None
        self._link.open()

    def prepare(self, rows: list[tuple[int, int]]) -> None:
        """Prepare the list of the peer's pages, unless it is."""
        if self._prepared == len(rows):
            return
        table = [[address, PAGE_BYTES, 0, PAGE_BYTES, pages] for address, pages in rows]
        try:
            self._remote = self._agent.prep_xfer_dlist(
                self._peer, np.array(table, np.uint64), "DRAM"
            )
        except errors() as error:
            raise RdmaPeerError(f"NIXL takes no list of the peer's pages: {error}") from None
        self._prepared = len(rows)

    def begin(self, slots: Any, pages: Any) -> Any:
        """Start a transfer of pages into slots; return its handle."""
        handle = self._agent.make_prepped_xfer("READ", self._local, slots, self._remote, pages)
        self._agent.transfer(handle)
        return handle

    def state(self, handle: Any) -> str:
        """Return PROC, DONE or ERR; a transfer that is over is let go of."""
        state = str(self._agent.check_xfer_state(handle))
        if state != "PROC":
            handle.release()
        return state

    def probe(self, pages: list[int], out: Any) -> float:
        """Read pages before the thread runs; see :class:`NixlReader`."""
        started = time.monotonic()
        came = 0
        self._link.post(np.array(pages, np.int32), out)
        try:
            while came < len(pages):
                self.turn()
                came += self._link.poll()
                if not self._link.up or time.monotonic() - started > PROBE_S:
                    raise RdmaPeerError(
                        f"NIXL: a probe failed: {self._link.failure or 'no answer'}"
                    )
        except errors() as error:
            raise RdmaPeerError(f"NIXL cannot read from the peer: {error}") from None
        return (time.monotonic() - started) * 1e6

    def turn(self) -> bool:
        """Start what is waiting and look at what is under way; whether anything still is."""
        link, under_way = self._link, self._under_way
        while len(under_way) < TRANSFERS_MAX:
            slots, pages = link.take(BATCH)
            if not len(slots):
                break
            under_way.append((slots, self.begin(slots, pages)))
        for _ in range(len(under_way)):
            slots, handle = under_way.popleft()
            state = self.state(handle)
            if state == "PROC":
                under_way.append((slots, handle))
            else:
                link.finish(slots, state == "DONE")
        return bool(under_way)

    def start(self) -> None:
        """Move pages from now on."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, then the agent and with it whatever is under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            return  # NIXL hangs; the agent stays with its thread
        self._under_way.clear()
        self._local = self._remote = self._agent = None

    def _run(self) -> None:
        wanted = select.poll()  # select() knows no descriptor above 1,023
        wanted.register(self._link.event_fd, select.POLLIN)
        try:
            while not self._stop.is_set() and (self._link.up or self._under_way):
                if not self.turn():
                    wanted.poll(IDLE_MS)
        # Either way the pump finds that nothing comes, and ends the link.
        except errors() as error:
            log.warning("NIXL failed", error=str(error))
        except Exception:
            log.exception("NIXL failed")
        self._stop.set()

"""Keeps a client's rings served while daemons come and go.

The guardian is a native thread of the core: it sees within milliseconds that the daemon does not
answer, reads the rows itself with the descriptors that the daemon gave, and gives the rings back.
The keeper is a Python thread and never in a hurry: when the daemon's socket closes it tells the
guardian, looks for the next daemon, and attaches the same channel there, whose addresses captured
graphs hold. Nothing of either calls CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import AttachError
from tierd.gpu.link import Link
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUSPECT_MS = 20  # how long a daemon may stand still while a request waits
QUEUE_DEPTH = 64
READ_THREADS = 8  # where io_uring is refused to the engine
PARK_US = 100  # between two looks at a ring that the guardian serves
RETRY_S = 0.1
REFUSED_RETRY_S = 1.0
SWAP_LOOK_MS = 100
STOP_MS = 2000

log = logging.getLogger("tierd")


class Keeper:
    """The guardian and the connection of one client.

    Attributes:
        link: to the daemon that was attached last; closed once it has gone.
        attaches: how often the channel was attached.
    """

    def __init__(
        self,
        path: str,
        link: Link,
        channel: Any,
        request: dict[str, Any],
        *,
        suspect_ms: int = SUSPECT_MS,
    ) -> None:
        """Start both threads.

        Args:
            path: the daemons' engine socket.
            link: attached.
            channel: the client's channel; all its rings are guarded.
            request: the attach message, sent again to each daemon to come.
            suspect_ms: how long a daemon may stand still while a request waits.

        Raises:
            AttachError: the daemon sent descriptors or an image map that cannot be used.
        """
        self.link = link
        self.attaches = 1
        self._takeovers_before = 0  # by guardians that were replaced
        self._path = path
        self._channel = channel
        self._request = request
        self._suspect_ms = suspect_ms
        self._rewakes: list[Callable[[int], None]] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stopping = False
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._next: Link | None = None  # in the making
        self._stale = False  # the guardian has the last daemon's descriptors
        self._removing = False  # the guardian was told to let the channel go, and takes nothing new
        self._said = ""
        self._guardian: Any = None
        self._guarded = -1  # the channel's number there
        self._guard(*self._make_guardian(link))
        self._thread = threading.Thread(target=self._run, name="tierd-keeper", daemon=True)
        self._thread.start()

    def on_rewake(self, rewake: Callable[[int], None]) -> None:
        """Call ``rewake`` with the eventfd of every daemon to come."""
        with self._lock:
            self._rewakes.append(rewake)

    @property
    def takeovers(self) -> int:
        """How often this engine has taken a ring from a daemon."""
        return self._takeovers_before + int(self.guardian_stats["takeovers"])

    @property
    def guardian_stats(self) -> dict[str, Any]:
        """The present guardian's counters."""
        with self._lock:
            return dict(self._guardian.stats())

    def alarm(self) -> None:
        """Let the guardian take every ring now, as if the daemon had died."""
        with self._lock:
            self._guardian.alarm()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody guards meanwhile: for measuring what a guardian costs."""
        with self._lock:
            rings = self._guardian.stats()["rings"]
            tables = {ring["ring"]: ring["table"] for ring in rings}
            self._guardian.remove_channel(self._guarded)
            try:
                yield
            finally:
                channel = self._guardian.add_channel(self._channel.fd)
                self._guard(self._guardian, channel, tables)

    def close(self) -> None:
        """Detach and end both threads. Idempotent."""
        if os.getpid() != self._pid:  # a fork: the connection is its parent's as well
            self.link.close()
            return
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            if self._next is not None:
                self._next.interrupt()
        os.eventfd_write(self._stop_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.link.detach()
        self.link.close()
        end_guardian(self._guardian)
        self._guardian = None
        self._rewakes.clear()
        self._channel = None
        os.close(self._stop_fd)

    # --- the keeper's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_the_end():
                gone = time.monotonic()
                self._guardian.alarm()
                log.warning(
                    "the daemon (pid %d) has gone; the engine reads its rows itself until there "
                    "is one at %s",
                    self.link.daemon_pid,
                    self._path,
                )
                self.link.close()
                if not self._attach_again():
                    return
                away_s = time.monotonic() - gone
                log.warning(
                    "attached to the daemon with pid %d after %.1f s", self.link.daemon_pid, away_s
                )
        except Exception:  # a fault of ours: the guardian goes on, and that is enough to serve
            log.exception("the keeper has failed; the engine reads its rows itself from now on")

    def _wait_for_the_end(self) -> bool:
        """Wait until the daemon closes its end; False when the client is being closed."""
        poller = select.poll()
        poller.register(self._stop_fd, select.POLLIN)
        # Only the end is of interest: answers are for whoever asked.
        poller.register(self.link.fileno(), select.POLLRDHUP)
        while True:
            ready = dict(poller.poll(SWAP_LOOK_MS if self._stale else None))
            if self._stopping:
                return False
            if ready:
                return True
            self._renew_guardian()

    def _attach_again(self) -> bool:
        """Attach to the next daemon; False when the client is being closed."""
        self._said = ""
        delay_s = RETRY_S
        while not select.select([self._stop_fd], [], [], delay_s)[0]:
            try:
                link = Link.open(self._path, 0.0)
            except AttachError as error:
                self._say(error)
                delay_s = RETRY_S
                continue
            if self._attach_over(link):
                return True
            delay_s = REFUSED_RETRY_S
        return False

    def _attach_over(self, link: Link) -> bool:
        with self._lock:
            if self._stopping:
                link.close()
                return False
            self._next = link
        try:
            link.greet()
            link.attach(self._request, self._channel.fd)
        except AttachError as error:
            link.close()
            self._say(error)
            return False
        finally:
            with self._lock:
                self._next = None
        with self._lock:
            self.link = link
            self.attaches += 1
            for rewake in self._rewakes:
                rewake(link.wake_fd)
        self._stale = True
        return True

    def _say(self, error: AttachError) -> None:
        """Log why there is no daemon, once for each reason."""
        if str(error) != self._said:
            self._said = str(error)
            log.warning("not attached: %s", error)

    # --- the guardian ----------------------------------------------------------------------------

    def _make_guardian(self, link: Link) -> tuple[Any, int, dict[int, int]]:
        """Return a running pump, the channel's number in it and the table of each ring."""
        guardian = _core.Pump(
            guardian=True,
            queue_depth=QUEUE_DEPTH,
            read_threads=READ_THREADS,
            park_us=PARK_US,
            crc_sample=1,
            suspect_ms=self._suspect_ms,
            end_rank=True,
        )
        try:
            devices = {
                uuid: guardian.add_device(fd)
                for uuid, fd in zip(link.devices, link.device_fds, strict=True)
            }
            tables = {
                int(image["image_id"], 16): guardian.add_table(**_table(image, devices))
                for image in link.map["images"]
                if image["devices"]  # what lies at peers alone only the daemon can read
            }
            guardian.start()
            channel = guardian.add_channel(self._channel.fd)
            wanted = self._guarded_rings(tables)
        except (KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
            end_guardian(guardian)
            raise AttachError(f"the daemon's image map cannot be used: {error!r}") from None
        return guardian, channel, wanted

    def _guarded_rings(self, tables: dict[int, int]) -> dict[int, int]:
        """Return ring -> table, for the rings that a guardian can serve."""
        wanted = enumerate(int(image["image_id"], 16) for image in self._request["images"])
        return {ring: tables[image] for ring, image in wanted if image in tables}

    def _guard(self, guardian: Any, channel: int, tables: dict[int, int]) -> None:
        for ring, table in tables.items():
            guardian.add_ring(channel, ring, table)
        self._guardian, self._guarded = guardian, channel

    def _renew_guardian(self) -> None:
        """Replace the guardian by one with the present daemon's descriptors, while it is idle.

        The new one holds its leases, and a device may have come back under another name. For less
        than a millisecond nobody guards; whatever happens in it is found afterwards.
        """
        stats = self._guardian.stats()
        busy = stats["in_flight"] or any(ring["serving"] for ring in stats["rings"])
        if busy and not self._removing:
            return
        with self._lock, contextlib.suppress(AttachError):
            if self._stopping:
                return
            before, after = self._guardian, self._make_guardian(self.link)
            if not before.remove_channel(
                self._guarded, SWAP_LOOK_MS if self._removing else STOP_MS
            ):
                # It began to serve just now, and its reads hang. From now on every look goes on
                # with the removal, or its rings would have no guardian once the reads are back.
                self._removing = True
                end_guardian(after[0])
                return
            self._guard(*after)
            self._stale = self._removing = False
            self._takeovers_before += int(before.stats()["takeovers"])
            end_guardian(before)


def end_guardian(guardian: Any) -> None:
    """Stop a guardian; one with a read that hangs is never collected.

    Its end would wait for the read with the interpreter's lock held, and so hold the engine up.
    What it left is freed with the process.
    """
    if not guardian.stop(STOP_MS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(guardian))


def _table(image: dict[str, Any], devices: dict[str, int]) -> dict[str, Any]:
    """Return what Pump.add_table wants to know of an image of the map."""

    def rows(places: list[dict[str, Any]]) -> Any:
        extents = [
            (first_page, pages, devices[device["uuid"]], device_page)
            for device in places
            for first_page, pages, device_page in device["extents"]
        ]
        return np.array(sorted(extents), dtype=np.uint64).reshape(-1, 4)

    return {
        "image_id": int(image["image_id"], 16),
        "generation": int(image["generation"]),
        "row_bytes": int(image["row_bytes"]),
        "rows": int(image["rows"]),
        "window_ns": 0,
        "extents": rows(image["devices"]),
        "copies": [rows(copy) for copy in image.get("copies", ())],
    }

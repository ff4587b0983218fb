"""Peers whose memory this daemon reads tables from, each with a thread that keeps it connected.

Connect: open a session at the peer's REST interface, make queue pairs to it, read a few pages of
every offered image and check them, and only then let the pumps use it. Keep: renew the session.
When a link fails, the peer does not answer or offers something else, everything is taken down and
built again, after a pause that doubles up to two seconds. The pumps notice a failed link by
themselves, within one read, and go on with each table's next tier.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import random
import ssl
import threading
import time
import urllib.parse
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from tierd.daemon.by_verbs import VerbsReader
from tierd.daemon.exports import VERSION
from tierd.daemon.remote_tiers import strange
from tierd.errors import (
    ConfigError,
    PeerSilentError,
    RdmaMissingError,
    RdmaPeerError,
    TierdError,
)
from tierd.io import _core, exports
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.types import ImageInfo

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tierd.config import PumpSection
    from tierd.config.remote import RemoteSection
    from tierd.daemon.by_nixl import NixlReader
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.remote_tiers import RemoteTier
    from tierd.io.exports import Place

    Reader = VerbsReader | NixlReader

log = structlog.get_logger("tierd.daemon.remotes")

BACKOFF_S = (0.05, 2.0)  # the first pause, and the longest
LOOK_S = 0.05  # between two looks at links
RENEW_S = 1.0
# A peer whose REST interface is slow is still read; one that is silent for so long is gone.
SILENT_S = 5.0
TIMEOUT_S = 2.0  # of a whole question, however its answer comes
OPEN_S = 10.0  # of the first one: the peer makes queue pairs, and looks ways up for them
STEADY_S = 2.0  # a connection that lasts so long was a good one
SAID_MAX = 300  # characters of a peer's reason that are kept
PROBE_PAGES = 64
ANSWER_BYTES_MAX = 4 << 20


class _Timed(io.RawIOBase):
    """What comes over a socket before a moment; then TimeoutError."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """One that has to be whole by a moment; a socket's own timeout begins anew with each byte."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, deadline))


class Caller:
    """Asks a peer's REST interface."""

    def __init__(self, url: str, token: str, ca_file: str) -> None:
        """Parse the address.

        Raises:
            ConfigError: the CA file cannot be used.
        """
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._token = token
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=ca_file or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"remote.ca_file: {ca_file} cannot be used: {error}") from None

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Send a request; return its answer, which is whole within ``timeout_s`` or TIMEOUT_S.

        Raises:
            PeerSilentError: no answer, or none for now: it is busy, or has a fault.
            RdmaPeerError: a refusal, with its reason.
        """
        patience_s = TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + patience_s
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=patience_s)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=patience_s, context=self._tls
            )
        connection.response_class = partial(_Answer, deadline=deadline)  # type: ignore[assignment]
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            data = json.loads(response.read(ANSWER_BYTES_MAX) or b"{}")
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            why = str(error) or type(error).__name__
            raise PeerSilentError(f"peer {self.url} does not answer: {why}") from None
        finally:
            connection.close()
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            said = data.get("detail", "no reason given") if isinstance(data, dict) else ""
            busy = response.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
            busy |= response.status == http.HTTPStatus.TOO_MANY_REQUESTS
            kind = PeerSilentError if busy else RdmaPeerError
            raise kind(f"peer {self.url} refuses ({response.status}): {_clean(said)}")
        return dict(data)


class Peer:
    """One peer, and the thread that keeps it connected.

    Attributes:
        name: its address, as configured.
        up: it is connected.
        reason: why it is not, or what is amiss although it is; "".
        connects: how often it was connected.
    """

    def __init__(
        self,
        caller: Caller,
        settings: RemoteSection,
        pump: PumpSection,
        plane: DataPlane,
        changed: Callable[[str, str, str], None],
    ) -> None:
        self.name = caller.url
        self.up = False
        self.reason = "not connected yet"
        self.connects = 0
        self._caller = caller
        self._settings = settings
        self._depth = pump.queue_depth
        self._plane = plane
        self._changed = changed
        self._stop = threading.Event()
        self._session = ""
        self._since = 0.0  # when it was connected
        self._silent = False  # it did not answer when it was asked last
        self._revision = 0
        self._reader: Reader | None = None
        self._thread = threading.Thread(target=self._run, name="tierd-peer", daemon=True)
        self._thread.start()

    @property
    def transport(self) -> str:
        """How its bytes move; "" while they do not."""
        reader = self._reader
        return "" if reader is None else reader.kind

    def leave(self) -> None:
        """Have the thread say good-bye to the peer and end."""
        self._stop.set()

    def stop(self, timeout_s: float) -> None:
        """Leave, and wait for it; the pumps let go of links by themselves.

        A thread that still waits for the network then ends with the process.
        """
        self.leave()
        self._thread.join(max(timeout_s, 0))

    def _run(self) -> None:
        try:
            self._stay_connected()
            self._take_down("this daemon stops")
        finally:
            if not self._stop.is_set():  # a fault of ours; its traceback is in the log
                self.up, self.reason = False, "this peer's thread ended by a fault: see the log"

    def _stay_connected(self) -> None:
        pause = BACKOFF_S[0]
        while not self._stop.is_set():
            why = self._connect_once()
            if self._stop.is_set():
                return
            # One that fails at its first reads would be made anew for ever, without a pause.
            if self.up and time.monotonic() - self._since > STEADY_S:
                pause = BACKOFF_S[0]
            self._take_down(why)
            self._stop.wait(pause)
            pause = min(2 * pause, BACKOFF_S[1])

    def _connect_once(self) -> str:
        """Connect and stay so; return why it has ended."""
        try:
            self._connect()
            self._keep()
        except TierdError as error:
            return str(error)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # of another tierd
            return f"peer {self.name}: answers that make no sense: {error!r:.200}"
        except Exception as error:  # a fault of ours, or of a driver: the next try may go well
            why = f"peer {self.name}: a fault of this daemon, see its log: {error!r:.200}"
            if why != self.reason:
                log.exception("connecting to a peer", peer=self.name)
            return why
        return ""

    # --- connecting ------------------------------------------------------------------------------

    def _connect(self) -> None:
        # A device may have come back under another name, or with another address.
        settings = self._settings
        reader = self._reader = open_reader(settings, self._depth, len(self._plane.pumps))
        asked = {"version": VERSION, **reader.asks()}
        answer = self._ask("POST", "/v1/exports/sessions", asked, OPEN_S)
        self._session, self._revision = str(answer["session"]), int(answer["revision"])
        reader.connect(answer)
        offered = []
        for one in answer["images"]:
            info = ImageInfo.from_json(one["image"])
            if why := strange(info):
                log.warning("an image of a peer is not taken", peer=self.name, reason=why)
                continue
            offered.append((info, reader.places(exports.places_from(one["places"]))))
        self._use(reader, offered)
        self.up, self.reason, self._since = True, "", time.monotonic()
        self.connects += 1
        names = [info.name for info, _ in offered]
        log.info("peer connected", peer=self.name, transport=reader.kind, images=names)
        self._changed("peer_up", self.name, "")

    def _use(self, reader: Reader, offered: list[tuple[ImageInfo, list[Place]]]) -> None:
        """Probe what is offered and hand the links to the pumps."""
        tiers = self._plane.remote_tiers(self.name, [info for info, _ in offered])
        usable: list[tuple[RemoteTier, list[Place]]] = []
        for info, places in offered:
            same = tiers.get(info.image_id, [])
            if not same:
                continue
            why, took_us, pages = self._probe(reader, info, places)
            for tier in same:
                tier.reason, tier.transport = why, reader.kind
                tier.probe_us, tier.probe_pages = took_us, pages
                if reader.way is not None:
                    tier.mtu, tier.gid = reader.way.mtu, str(reader.way.mine or "")
                if not why:
                    usable.append((tier, places))
        if usable:
            reader.try_ways(_address(usable[0][1], 0))
        reader.start()
        if not self._plane.link_peer(reader.links, usable):
            raise RdmaPeerError(f"peer {self.name}: {self._failure() or 'a link failed at once'}")

    def _probe(
        self, reader: Reader, info: ImageInfo, places: list[Place]
    ) -> tuple[str, float, int]:
        """Read some pages and check them; return what is wrong or "", microseconds, pages."""
        count = max(1, min(PROBE_PAGES, self._depth // 2, info.pages))
        pages = sorted(random.sample(range(info.pages), count))
        out = aligned_buffer(count * PAGE_BYTES)
        where = [_address(places, page) for page in pages]
        took = [reader.probe(where, out) for _ in range(2)][-1]  # the first one warms up
        fault = np.zeros(1, np.uint8)
        table = info.table
        for at, page in enumerate(pages):
            one = out[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]
            identity = (page, info.image_id, info.generation)
            if _core.check_pages(one, table.row_bytes, table.rows, *identity, True, True, fault):
                word = _core.PageFault(int(fault[0])).name
                return f"page {page} of {info.name} at the peer is wrong ({word})", took, count
        return "", took, count

    # --- connected -------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Look at the links and renew the session until something is wrong."""
        asked = heard = time.monotonic()
        while not self._stop.wait(LOOK_S):
            if failure := self._failure():
                raise RdmaPeerError(f"peer {self.name}: {failure}")
            self._look_for_trouble()
            if time.monotonic() - asked < RENEW_S:
                continue
            asked = time.monotonic()
            try:
                answer = self._ask("PUT", f"/v1/exports/sessions/{self._session}", {})
            except PeerSilentError:
                if time.monotonic() - heard > SILENT_S:
                    raise
                continue
            heard = time.monotonic()
            if int(answer["revision"]) != self._revision:
                raise RdmaPeerError(f"peer {self.name} exports something else now")
            # What was staged or deleted here meanwhile may match what is offered there.
            if self._plane.remote_wanted(self.name):
                raise RdmaPeerError("this node has other images now")

    def _look_for_trouble(self) -> None:
        """Tell of memory that a link may not read into; what is not refused is read on."""
        links = self._reader.links if self._reader is not None else []
        trouble = next((link.trouble for link in links if link.trouble), "")
        if trouble != self.reason:
            log.warning("reads from a peer are refused in part", peer=self.name, reason=trouble)
            self._plane.note_trouble(self.name, trouble)
            self.reason = trouble

    def _ask(
        self, method: str, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        self._silent = True
        try:
            answer = self._caller.ask(method, path, body, timeout_s=timeout_s)
        except PeerSilentError:
            raise
        except RdmaPeerError:
            self._silent = False
            raise
        self._silent = False
        return answer

    def _failure(self) -> str:
        links = self._reader.links if self._reader is not None else []
        return next((link.failure for link in links if not link.up), "")

    def _take_down(self, why: str) -> None:
        was_up, self.up = self.up, False
        if was_up or why != self.reason:
            log.warning("peer not connected", peer=self.name, reason=why)
            self._changed("peer_down", self.name, why)
        self.reason = why
        reader, self._reader = self._reader, None
        if reader is not None:
            try:
                self._plane.unlink_peer(self.name, reader.links, why)
                reader.close()
            except Exception:  # a new connection needs nothing of the old one
                log.exception("letting go of a peer", peer=self.name)
        session, self._session = self._session, ""
        if session and not self._silent:
            # Whatever it answers: it closes what is not renewed.
            with contextlib.suppress(Exception):
                self._caller.ask("DELETE", f"/v1/exports/sessions/{session}")


def _clean(said: object) -> str:
    """One line of bounded length, whatever the peer wrote."""
    text = str(said)[:SAID_MAX]
    return "".join(c if c.isprintable() else " " for c in text)


def open_reader(settings: RemoteSection, depth: int, pumps: int) -> Reader:
    """Return what reads from a peer: verbs, or NIXL where there are none.

    Raises:
        RdmaError: neither can be used, or not the one that was asked for.
    """
    missing = ""
    if settings.transport != "nixl":
        try:
            return VerbsReader(settings, depth, pumps)
        except RdmaMissingError as error:
            if settings.transport == "verbs":
                raise
            missing = f"{error}; "
    from tierd.daemon.by_nixl import NixlReader  # noqa: PLC0415 - NIXL is large and optional

    try:
        return NixlReader(settings, depth, pumps)
    except RdmaMissingError as error:
        raise RdmaMissingError(f"{missing}{error}") from None


def _address(places: list[Place], page: int) -> tuple[int, int]:
    """Return (address, key) of a page at the peer."""
    for first, pages, address, key in places:
        if first <= page < first + pages:
            return address + (page - first) * PAGE_BYTES, key
    raise ValueError(f"the peer does not say where page {page} is")

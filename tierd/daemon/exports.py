"""Images that other nodes may read from this node's memory, and the sessions of those that do.

A thread keeps what is exported in step with what is served: it loads new images, and withdraws
those that were staged anew or deleted. A peer opens a session, gets addresses and keys, and from
then on reads without this process: the network card answers. It renews its session; one that is
not renewed is closed, so a peer that died leaves nothing behind.

Withdrawing deregisters the memory first. A peer that reads it then gets an error and goes on with
its next tier; it can never get other bytes, and it checks what it gets.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, Any

import structlog

from tierd import __version__
from tierd.daemon.by_verbs import VerbsExporter
from tierd.daemon.keeper import LOOK_S, Keeper, same_staging
from tierd.errors import RdmaError, RdmaMissingError, RdmaPeerError, TierdError
from tierd.io import exports

if TYPE_CHECKING:
    from tierd.config.remote import ExportsSection
    from tierd.daemon.by_nixl import NixlExporter
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.served import ServedImage

log = structlog.get_logger("tierd.daemon.exports")

VERSION = 1  # of what peers say to each other
LEASE_S = 10.0
SESSIONS_MAX = 256
LINKS_MAX = 64
RETRY_S = 60.0  # after which what failed is loaded again


@dataclasses.dataclass(eq=False)
class Export:
    """One image, exported or on the way.

    Attributes:
        state: loading, ready or failed.
        reason: why it failed; "".
        failed: when it failed, on the monotonic clock.
        loaded: pages in memory.
    """

    image: ServedImage
    state: str = "loading"
    reason: str = ""
    failed: float = 0.0
    loaded: int = 0
    memory: exports.ImageMemory | None = None
    region: Any = None

    def withdraw(self) -> None:
        """Have it read no more, as far as what answers can."""
        region, self.region = self.region, None
        if region is not None:
            region.close()

    def close(self) -> None:
        """Withdraw it, then free its memory."""
        self.withdraw()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


@dataclasses.dataclass
class Session:
    """A peer that may read.

    Attributes:
        until: on the monotonic clock; renewing moves it.
        responders: the passive ends of its links.
    """

    number: str
    peer: str
    opened: float
    until: float
    responders: list[Any]

    def close(self) -> None:
        """Take its queue pairs away."""
        for responder in self.responders:
            responder.close()


class Exports(Keeper):
    """What this daemon exports.

    Attributes:
        fault: why nothing can be exported; "".
        revision: raised whenever what peers may read changes.
    """

    def __init__(self, settings: ExportsSection, plane: DataPlane) -> None:
        super().__init__("tierd-exports", settings.images, plane)
        self._settings = settings
        self._exporter: VerbsExporter | NixlExporter | None = None
        self._exports: dict[int, Export] = {}
        self._sessions: dict[str, Session] = {}
        self._leaving: list[tuple[float, Export]] = []  # withdrawn, and when they may be freed
        self.fault = ""
        self.revision = 0

    def stop(self) -> None:
        """Withdraw everything. Idempotent."""
        self._end_thread()
        self._close_all()

    def _close_all(self, only: VerbsExporter | NixlExporter | None = None) -> None:
        with self._lock:
            exporter = self._exporter
            if only is not None and exporter is not only:
                return  # somebody else has done it
            self._exporter = None
            sessions = list(self._sessions.values())
            left = [*self._exports.values(), *(export for _, export in self._leaving)]
            self._sessions.clear()
            self._exports.clear()
            self._leaving.clear()
            self.revision += 1
        # Outside the lock, which the event loop takes: giving up 100 GiB takes seconds.
        for session in sessions:
            session.close()
        for export in left:
            export.withdraw()
        if exporter is not None:
            exporter.close()
        for export in left:  # now that nothing answers peers any more
            export.close()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(0 if self._exporter is None and not self.fault else LOOK_S):
            try:
                if self._exporter is None:
                    self._exporter = open_exporter(self._settings)
                    log.info("exports", ways=self._exporter.describe())
                self.look()
                self.fault = ""
            except RdmaError as error:
                if str(error) != self.fault:
                    log.error("nothing is exported", reason=str(error))
                self.fault = str(error)
            except Exception as error:  # peers hear of it, and the next look may go well
                fault = f"a fault of this daemon, see its log: {error!r:.200}"
                if fault != self.fault:
                    log.exception("looking after exports")
                self.fault = fault

    def look(self) -> None:
        """Close what has expired; withdraw and load what has changed."""
        now = time.monotonic()
        wanted = self.chosen()
        with self._lock:
            expired = [s for s in self._sessions.values() if s.until < now]
            for session in expired:
                del self._sessions[session.number]
            stale = [e for e in self._exports.values() if self._is_stale(e, wanted, now)]
            for export in stale:
                del self._exports[export.image.info.image_id]
                self.revision += export.state == "ready"
            linger_s = 0.0 if self._exporter is None else self._exporter.linger_s
            self._leaving += [(now + linger_s, export) for export in stale]
            over = [export for until, export in self._leaving if until <= now]
            self._leaving = [one for one in self._leaving if one[0] > now]
        # Outside the lock, which the event loop takes: giving up 100 GiB takes seconds.
        for session in expired:
            log.warning("a peer has not renewed its session", peer=session.peer)
            session.close()
        for export in stale:
            if export.state == "ready":
                log.info("withdrawn", image=export.image.info.name)
            export.withdraw()
        for export in over:
            export.close()
        for number, image in wanted.items():
            if number not in self._exports and not self._stop.is_set():
                self._load(image)

    def _is_stale(self, export: Export, wanted: dict[int, ServedImage], now: float) -> bool:
        """Whether it is to be withdrawn, or is worth another try: memory may be free now."""
        served = same_staging(wanted.get(export.image.info.image_id), export.image)
        return not served or (export.state == "failed" and now > export.failed + RETRY_S)

    def _load(self, image: ServedImage) -> None:
        number, export, exporter = image.info.image_id, Export(image), self._exporter
        if exporter is None:
            return
        with self._lock:
            self._exports[number] = export
        started = time.monotonic()
        try:
            memory = export.memory = exports.ImageMemory(image.info.pages)
            exports.load(image.striped, memory.pages, lambda done, _: self._progress(export, done))
            if not self._goes_on(export):
                return
            export.region = exporter.register(memory)
        except Exception as error:  # out of memory, or a driver's: the other images go on
            if not isinstance(error, TierdError):
                log.exception("loading an export", image=image.info.name)
            export.state, export.reason = "failed", str(error) or type(error).__name__
            export.failed = time.monotonic()
            export.close()
            if self._goes_on(export):  # else its pages have gone with it: no fault of the device
                log.error("not exported", image=image.info.name, reason=export.reason)
            return
        with self._lock:
            current = self._exports.get(number) is export
            if current:
                export.state = "ready"
                self.revision += 1
        if not current:  # we stop, or the device has gone meanwhile
            export.close()
            return
        log.info(
            "exported",
            image=image.info.name,
            memory=memory.page_kind,
            seconds=round(time.monotonic() - started, 3),
        )

    def _progress(self, export: Export, done: int) -> bool:
        export.loaded = done
        return self._goes_on(export)

    def _goes_on(self, export: Export) -> bool:
        number = export.image.info.image_id
        return self._wanted(export.image) and self._exports.get(number) is export

    # --- what peers ask --------------------------------------------------------------------------

    def listing(self) -> list[Export]:
        """Return what is exported, by name."""
        with self._lock:
            return sorted(self._exports.values(), key=lambda one: one.image.info.name)

    def sessions(self) -> list[Session]:
        """Return who may read."""
        with self._lock:
            return list(self._sessions.values())

    def open_session(self, asked: dict[str, Any], peer: str) -> dict[str, Any]:
        """Let a peer read; return what it needs for that.

        Args:
            asked: ``version``, ``transport`` and, with verbs, ``port``
                (:meth:`tierd.io.verbs.Port.to_json`) and ``links``: for each the number and first
                packet of its queue pairs.
            peer: for people.

        Raises:
            RdmaPeerError: of another version, nothing fits, or too many sessions.
            RdmaMemoryError: the card gives no queue pairs.
        """
        require_version(asked["version"])
        exporter = self._exporter
        if exporter is None:
            raise RdmaPeerError(f"nothing is exported here: {self.fault or 'not open yet'}")
        if asked["transport"] != exporter.kind:
            raise RdmaPeerError(
                f"the peer reads over {asked['transport']}, this side exports over "
                f"{exporter.kind}; set remote.transport there or exports.transport here"
            )
        if len(self._sessions) >= SESSIONS_MAX:
            raise RdmaPeerError(f"{SESSIONS_MAX} sessions are open, as many as there may be")
        responders, agreed = self._accept(exporter, asked)
        number, until = secrets.token_hex(16), time.monotonic() + LEASE_S
        session = Session(number, peer, time.time(), until, responders)
        with self._lock:
            current = self._exporter is exporter
            if current:
                self._sessions[number] = session
                answer = {**self._answer(session), **agreed}
        if not current:
            session.close()
            raise RdmaPeerError("nothing is exported here: the device is being closed")
        log.info("a peer reads", peer=peer, transport=exporter.kind, links=len(asked["links"]))
        return answer

    def _accept(
        self, exporter: VerbsExporter | NixlExporter, asked: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Make the other ends of a peer's links; a device that has gone is opened anew."""
        try:
            return exporter.accept(asked)
        except RdmaError as error:
            if self._exporter is exporter and exporter.is_gone():
                log.error("the device has gone; everything is withdrawn", reason=str(error))
                self._close_all(exporter)
            raise

    def _answer(self, session: Session) -> dict[str, Any]:
        return {
            "session": session.number,
            "lease_s": LEASE_S,
            "revision": self.revision,
            "version": VERSION,
            "images": [
                {
                    "image": export.image.info.to_json(),
                    "places": exports.places_json(export.region.places),
                }
                for export in self._exports.values()
                if export.state == "ready"
            ],
        }

    @property
    def transport(self) -> str:
        """Verbs or nixl; "" before it is open."""
        return "" if self._exporter is None else self._exporter.kind

    @property
    def ways(self) -> list[str]:
        """How peers reach it, best first."""
        exporter = self._exporter
        return [] if exporter is None else exporter.describe()

    def renew(self, number: str) -> dict[str, Any] | None:
        """Renew a session; None if there is no such session any more."""
        with self._lock:
            session = self._sessions.get(number)
            if session is None:
                return None
            session.until = time.monotonic() + LEASE_S
        return {"lease_s": LEASE_S, "revision": self.revision}

    def close_session(self, number: str) -> bool:
        """Close a session; False if there is no such session."""
        with self._lock:
            session = self._sessions.pop(number, None)
        if session is not None:
            session.close()
        return session is not None


def require_version(version: int) -> None:
    """Refuse a peer of another version.

    Raises:
        RdmaPeerError: it is one.
    """
    if version != VERSION:
        raise RdmaPeerError(
            f"the peer speaks version {version} of the export protocol, this tierd "
            f"({__version__}) version {VERSION}; install the same tierd on both nodes"
        )


def open_exporter(settings: ExportsSection) -> VerbsExporter | NixlExporter:
    """Open what memory is exported through: verbs, or NIXL where there are none.

    Raises:
        RdmaError: neither can be used, or not the one that was asked for.
    """
    missing = ""
    if settings.transport != "nixl":
        try:
            return VerbsExporter.open(settings)
        except RdmaMissingError as error:
            if settings.transport == "verbs":
                raise
            missing = f"{error}; "
    from tierd.daemon.by_nixl import NixlExporter  # noqa: PLC0415 - NIXL is large and optional

    try:
        return NixlExporter()
    except RdmaMissingError as error:
        raise RdmaMissingError(f"{missing}{error}") from None

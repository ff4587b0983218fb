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


@dataclasses.dataclass(eq=False)
class Export:
    """One image, exported or on the way.

    Attributes:
        state: loading, ready or failed.
        reason: why it failed; "".
        loaded: pages in memory.
    """

    image: ServedImage
    state: str = "loading"
    reason: str = ""
    loaded: int = 0
    memory: exports.ImageMemory | None = None
    region: Any = None

    def close(self) -> None:
        """Withdraw it, then free its memory."""
        if self.region is not None:
            self.region.close()
        self.region = self.memory = None


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
        self.fault = ""
        self.revision = 0

    def stop(self) -> None:
        """Withdraw everything. Idempotent."""
        self._end_thread()
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()
            for export in self._exports.values():
                export.close()
            self._exports.clear()
            if self._exporter is not None:
                self._exporter.close()
            self._exporter = None

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
        with self._lock:
            for session in [s for s in self._sessions.values() if s.until < now]:
                log.warning("a peer has not renewed its session", peer=session.peer)
                self._sessions.pop(session.number).close()
            wanted = self.chosen()
            for number, export in list(self._exports.items()):
                if not same_staging(wanted.get(number), export.image):
                    self._withdraw(number)
        for number, image in wanted.items():
            if number not in self._exports and not self._stop.is_set():
                self._load(image)

    def _withdraw(self, number: int) -> None:
        export = self._exports.pop(number)
        log.info("withdrawn", image=export.image.info.name)
        export.close()
        self.revision += 1

    def _load(self, image: ServedImage) -> None:
        export = Export(image)
        with self._lock:
            self._exports[image.info.image_id] = export
        started = time.monotonic()
        try:
            memory = export.memory = exports.ImageMemory(image.info.pages)
            exports.load(image.striped, memory.pages, lambda done, _: self._progress(export, done))
            if self._stop.is_set():
                return
            assert self._exporter is not None, "it is open before anything is loaded"
            export.region = self._exporter.register(memory)
        except Exception as error:  # out of memory, or a driver's: the other images go on
            if not isinstance(error, TierdError):
                log.exception("loading an export", image=image.info.name)
            export.state, export.reason = "failed", str(error) or type(error).__name__
            export.close()
            log.error("not exported", image=image.info.name, reason=export.reason)
            return
        with self._lock:
            export.state = "ready"
            self.revision += 1
        log.info(
            "exported",
            image=image.info.name,
            memory=memory.page_kind,
            seconds=round(time.monotonic() - started, 3),
        )

    def _progress(self, export: Export, done: int) -> bool:
        export.loaded = done
        return not self._stop.is_set()

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
        if asked["version"] != VERSION:
            raise RdmaPeerError(
                f"the peer speaks version {asked['version']} of the export protocol, this tierd "
                f"({__version__}) version {VERSION}; install the same tierd on both nodes"
            )
        exporter = self._exporter
        if exporter is None:
            raise RdmaPeerError(f"nothing is exported here: {self.fault or 'not open yet'}")
        if asked["transport"] != exporter.kind:
            raise RdmaPeerError(
                f"the peer reads over {asked['transport']}, this side exports over "
                f"{exporter.kind}; set remote.transport there or exports.transport here"
            )
        with self._lock:
            if len(self._sessions) >= SESSIONS_MAX:
                raise RdmaPeerError(f"{SESSIONS_MAX} sessions are open, as many as there may be")
            responders, agreed = exporter.accept(asked)
            now = time.monotonic()
            number = secrets.token_hex(16)
            session = Session(number, peer, time.time(), now + LEASE_S, responders)
            self._sessions[number] = session
            answer = {**self._answer(session), **agreed}
        log.info("a peer reads", peer=peer, transport=exporter.kind, links=len(asked["links"]))
        return answer

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

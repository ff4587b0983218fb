"""Remote tables over verbs: both ends of a session."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from tierd.errors import RdmaError, RdmaMemoryError, RdmaMissingError, RdmaPeerError
from tierd.io import _core, verbs
from tierd.io.device import PAGE_BYTES, aligned_buffer

if TYPE_CHECKING:
    from tierd.config.remote import ExportsSection, RemoteSection
    from tierd.io.exports import ImageMemory, Place

QUEUE_PAIRS_MAX = 16


@dataclasses.dataclass
class VerbsExporter:
    """The passive side: the network card answers.

    Attributes:
        port: what is exported through.
    """

    kind = "verbs"
    linger_s = 0.0  # the card reads nothing that is deregistered
    port: verbs.Port
    _context: Any
    _gid_index: int = -1

    @classmethod
    def open(cls, settings: ExportsSection) -> VerbsExporter:
        """Open the port.

        Raises:
            RdmaError: there is none that can be used.
        """
        port = verbs.find_port(settings.device, settings.port, settings.gid_index)
        return cls(port, verbs.open_context(port), settings.gid_index)

    def describe(self) -> list[str]:
        """Say what peers can reach, best first."""
        return [str(self.port), *map(str, self.port.gids)]

    def register(self, memory: ImageMemory) -> Any:
        """Return memory that peers may read: its ``places``, and ``close``."""
        return verbs.register(self._context, memory.pages)

    def accept(self, asked: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Make the other ends of a peer's links; return them and what it needs to know.

        Raises:
            RdmaPeerError: the two ports do not fit, or the way to the peer is not found.
            RdmaMemoryError: the card gives no queue pairs.
            RdmaError: the port cannot be used any more.
        """
        if asked["port"] is None or not asked["links"]:
            raise RdmaPeerError("the peer says neither its port nor its queue pairs")
        try:
            theirs = verbs.Port.from_json(asked["port"])
        except (KeyError, TypeError, ValueError) as error:
            raise RdmaPeerError(f"the peer's port makes no sense: {error!r:.100}") from None
        # Its addresses may have changed since it was opened.
        self.port = verbs.find_port(self.port.device, self.port.port, self._gid_index)
        way = verbs.agree(self.port, theirs)
        responders: list[Any] = []
        try:
            self._make_ends(asked["links"], way, theirs, responders)
        except BaseException:
            for responder in responders:
                responder.close()
            raise
        return responders, {
            "port": self.port.to_json(),
            "gid": None if way.mine is None else way.mine.to_json(),
            "peer_gid": None if way.theirs is None else way.theirs.to_json(),
            "mtu": way.mtu,
            "read_depth": way.read_depth,
            "links": [responder.names for responder in responders],
        }

    def _make_ends(
        self, links: list[Any], way: verbs.Way, theirs: verbs.Port, made: list[Any]
    ) -> None:
        for pairs in links:
            try:
                made.append(_core.VerbsResponder(self._context, len(pairs)))
            except (_core.VerbsError, ValueError, TypeError) as error:
                raise RdmaMemoryError(f"no queue pairs for the peer: {error}") from None
            try:
                names = [(number, packet) for number, packet in pairs]
                made[-1].connect(queue_pairs=names, **way.for_core())
            except (_core.VerbsError, ValueError, TypeError) as error:
                raise RdmaPeerError(
                    f"{error}; here {self.port}, {way.mine}; there {theirs}, {way.theirs}"
                ) from None

    def is_gone(self) -> bool:
        """Whether the device was reset or taken away: what was opened of it is of no more use.

        A port that is merely down comes back by itself, and what is registered stays.
        """
        with contextlib.suppress(_core.VerbsError):
            _core.VerbsResponder(self._context, 1).close()
            return False
        try:
            port = verbs.find_port(self.port.device, self.port.port)
            _core.VerbsResponder(verbs.open_context(port), 1).close()
        except RdmaMissingError:
            return True
        except (RdmaError, _core.VerbsError):
            return False  # a fresh one is of no more use either
        return True

    def close(self) -> None:
        """Let go of the device; regions and responders keep it until they are closed."""
        self._context = None


class VerbsReader:
    """The side that reads: one link a pump.

    Attributes:
        links: for the pumps.
        way: what was agreed on, None before that.
    """

    kind = "verbs"

    def __init__(self, settings: RemoteSection, depth: int, pumps: int) -> None:
        """Make queue pairs.

        Raises:
            RdmaError: there is no port that can be used.
        """
        self._port = verbs.find_port(settings.device, settings.port, settings.gid_index)
        context = verbs.open_context(self._port)
        timeout_ns = settings.timeout_us * 1000
        try:
            self.links: list[Any] = [
                _core.VerbsLink(context, settings.queue_pairs, depth, timeout_ns)
                for _ in range(pumps)
            ]
        except _core.VerbsError as error:
            raise RdmaMemoryError(f"{error}; run: tierd doctor") from None
        self.way: verbs.Way | None = None

    def asks(self) -> dict[str, Any]:
        """Return what the peer needs to know."""
        names = [[list(name) for name in link.names] for link in self.links]
        return {"transport": self.kind, "port": self._port.to_json(), "links": names, "agent": ""}

    def connect(self, answer: dict[str, Any]) -> None:
        """Connect the links; they are up then."""
        mine, other = answer["peer_gid"], answer["gid"]
        self.way = verbs.Way(
            None if mine is None else verbs.Gid.from_json(mine),
            None if other is None else verbs.Gid.from_json(other),
            int(answer["mtu"]),
            int(answer["read_depth"]),
            verbs.Port.from_json(answer["port"]).lid,
        )
        for link, names in zip(self.links, answer["links"], strict=True):
            pairs = [(int(number), int(packet)) for number, packet in names]
            try:
                link.connect(queue_pairs=pairs, **self.way.for_core())
            except _core.VerbsError as error:
                theirs = verbs.Port.from_json(answer["port"])
                raise RdmaPeerError(
                    f"{error}; here {self._port}, {self.way.mine}; there {theirs}, "
                    f"{self.way.theirs}"
                ) from None

    def places(self, offered: list[Place]) -> list[Place]:
        """Return where a link finds what the peer offers."""
        return offered

    def probe(self, pages: list[tuple[int, int]], out: Any) -> float:
        """Read (address, key) pages into ``out``; return microseconds.

        Raises:
            RdmaPeerError: one of them does not come.
        """
        try:
            return float(self.links[0].probe(pages, out)) / 1e3
        except _core.VerbsError as error:
            raise RdmaPeerError(str(error)) from None

    def try_ways(self, page: tuple[int, int]) -> None:
        """Read an (address, key) page through each queue pair: each may have a way of its own.

        Raises:
            RdmaPeerError: it does not come.
        """
        out = aligned_buffer(PAGE_BYTES)
        try:
            for link in self.links:
                for _ in link.names:  # a link takes its queue pairs in turn
                    link.probe([page], out)
        except _core.VerbsError as error:
            raise RdmaPeerError(str(error)) from None

    def start(self) -> None:
        """Nothing: the pumps post and poll."""

    def close(self) -> None:
        """Nothing: the pumps let go of links by themselves."""

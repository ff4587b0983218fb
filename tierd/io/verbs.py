"""RDMA for the rest of tierd: which device, port and GID, and what both sides must agree on.

Everything that moves bytes is native (``_core``); this is the one place that knows how verbs are
chosen. Two machines reach each other over a pair of GIDs of the same kind: RoCE v2 before v1 and
what a router forwards before what it does not, so IPv4, then IPv6, then link-local. InfiniBand
needs no GID within its subnet. The MTU is the smaller of both sides.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tierd.errors import (
    RdmaMemoryError,
    RdmaMissingError,
    RdmaPeerError,
    RdmaPermissionError,
    RdmaPortError,
)
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CLASS = Path("/sys/class/infiniband")
KINDS = ("RoCE v2", "IB/RoCE v1")  # as the kernel names them, best first
SCOPES = ("ipv4", "ipv6", "link-local")  # best first
READ_DEPTH_MAX = 128
GIDS_MAX = 256  # of a port's table; a queue pair takes no index above 255
IWARP = "RNIC"  # in sysfs' node_type


@dataclasses.dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table.

    Attributes:
        index: in the table.
        value: 16 bytes.
        kind: "RoCE v2" or "IB/RoCE v1".
        netdev: the network device whose address it is.
    """

    index: int
    value: bytes
    kind: str
    netdev: str = ""

    @property
    def scope(self) -> str:
        """How far it reaches: ipv4, ipv6 or link-local."""
        address = ipaddress.IPv6Address(self.value)
        mapped = address.ipv4_mapped
        if mapped is not None:
            return "link-local" if mapped.is_link_local else "ipv4"
        return "link-local" if address.is_link_local else "ipv6"

    def __str__(self) -> str:
        address = ipaddress.IPv6Address(self.value)
        return f"{address.ipv4_mapped or address} ({self.kind}, index {self.index})"

    def to_json(self) -> dict[str, Any]:
        """Return what the peer is told."""
        return {"index": self.index, "value": self.value.hex(), "kind": self.kind}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from :meth:`to_json`'s dict."""
        return cls(int(data["index"]), bytes.fromhex(data["value"]), str(data["kind"]))


def rank(gids: Iterable[Gid]) -> list[Gid]:
    """Order GIDs: the best way to another node first. A link's own zone comes last."""

    def place(gid: Gid) -> tuple[bool, int, int, int]:
        kind = KINDS.index(gid.kind) if gid.kind in KINDS else len(KINDS)
        # A link-local GID reaches nobody behind a router, whatever its kind.
        return gid.scope == SCOPES[-1], kind, SCOPES.index(gid.scope), gid.index

    return sorted(gids, key=place)


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """A port that can be used, and what the peer needs to know of it.

    Attributes:
        device, port: its name and number here.
        link_layer: "InfiniBand" or "Ethernet" (RoCE).
        mtu: bytes.
        lid: InfiniBand's local address; 0 with RoCE.
        read_depth: READs that a queue pair of it may have on the wire.
        gids: best first; empty with InfiniBand.
    """

    device: str
    port: int
    link_layer: str
    mtu: int
    lid: int
    read_depth: int
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        return f"{self.device} port {self.port} ({self.link_layer}, MTU {self.mtu})"

    def to_json(self) -> dict[str, Any]:
        """Return what the peer is told."""
        gids = [gid.to_json() for gid in self.gids[:GIDS_MAX]]
        return {**dataclasses.asdict(self), "gids": gids}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from :meth:`to_json`'s dict."""
        gids = tuple(Gid.from_json(gid) for gid in data["gids"])
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: data[key] for key in names - {"gids"}}, gids=gids)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """What two ports agree on.

    Attributes:
        mine, theirs: GIDs; None with InfiniBand.
        mtu: the smaller of both, bytes.
        read_depth: likewise.
        lid: theirs.
    """

    mine: Gid | None
    theirs: Gid | None
    mtu: int
    read_depth: int
    lid: int

    def for_core(self) -> dict[str, Any]:
        """Return the keywords of the core's ``connect``."""
        return {
            "gid_index": 0 if self.mine is None else self.mine.index,
            "gid": bytes(16) if self.theirs is None else self.theirs.value,
            "lid": self.lid,
            "mtu": self.mtu,
            "read_depth": self.read_depth,
        }


def agree(mine: Port, theirs: Port) -> Way:
    """Return how two ports reach each other.

    Raises:
        RdmaPeerError: they cannot; the text has both sides' values.
    """
    if mine.link_layer != theirs.link_layer:
        raise RdmaPeerError(f"this side has {mine}, the peer {theirs}: they are no one network")
    shared = min(mine.mtu, theirs.mtu), min(mine.read_depth, theirs.read_depth), theirs.lid
    if mine.link_layer == "InfiniBand":
        return Way(None, None, *shared)
    for gid in mine.gids:
        for other in theirs.gids:
            if (gid.kind, gid.scope) == (other.kind, other.scope):
                return Way(gid, other, *shared)
    raise RdmaPeerError(
        f"no two GIDs fit: {mine.device} here has {_listed(mine.gids)}, {theirs.device} of the "
        f"peer {_listed(theirs.gids)}; give both interfaces an address of one kind"
    )


def _listed(gids: Sequence[Gid]) -> str:
    return ", ".join(map(str, gids)) or "none"


def find_port(device: str = "auto", port: int = 0, gid_index: int = -1) -> Port:
    """Return a port to use.

    Args:
        device: its name; "auto" takes the first with an active port that can be used.
        port: its number; 0 takes the first that is active.
        gid_index: the GID to use; -1 ranks them.

    Raises:
        RdmaMissingError: there is no RDMA, or no device, or not this one.
        RdmaPermissionError: the device cannot be opened.
        RdmaPortError: no port of it is active or has the GID.
    """
    found = devices()
    names = [one["name"] for one in found]
    if device != "auto" and device not in names:
        raise RdmaMissingError(
            f"there is no RDMA device {device}; there are: {', '.join(names) or 'none'}; "
            "run: tierd doctor"
        )
    chosen = [one for one in found if device in {"auto", one["name"]}]
    if all(one["trouble"] for one in chosen):
        raise RdmaPermissionError(f"{chosen[0]['trouble']}; run: tierd doctor")
    unfit: RdmaPortError | None = None
    for one in chosen:
        for each in one["ports"]:
            if each["state"] == "active" and port in {0, each["port"]}:
                try:
                    return _port(one, each, gid_index)
                except RdmaPortError as error:  # the next may do
                    unfit = unfit or error
    if unfit is not None:
        raise unfit
    seen = ", ".join(
        f"{one['name']} port {each['port']} is {each['state']}"
        for one in chosen
        for each in one["ports"]
        if port in {0, each["port"]}
    )
    raise RdmaPortError(
        f"no RDMA port is active: {seen or 'no such port'}; its link or its network interface is "
        "down; run: tierd doctor"
    )


def devices() -> list[dict[str, Any]]:
    """Return the RDMA devices of this machine; there is at least one.

    Raises:
        RdmaMissingError: no RDMA in the kernel or no library, or no device.
    """
    if not _core.VERBS:
        raise RdmaMissingError(
            "this tierd was built without RDMA: infiniband/verbs.h was not there; install "
            "libibverbs-dev and build it again"
        )
    try:
        found: list[dict[str, Any]] = _core.verbs_devices()
    except _core.VerbsError as error:
        raise RdmaMissingError(str(error)) from None
    if not found:
        raise RdmaMissingError(
            "there is no RDMA device: no card, or its driver is not loaded (soft-RoCE: "
            "rdma link add rxe0 type rxe netdev IFACE); run: tierd doctor"
        )
    return found


def _port(device: dict[str, Any], port: dict[str, Any], gid_index: int) -> Port:
    name, number = device["name"], port["port"]
    if IWARP in _text(CLASS / name / "node_type"):
        raise RdmaPortError(f"{name} is iWARP, which tierd does not use; run: tierd doctor")
    gids: list[Gid] = []
    if port["link_layer"] == "Ethernet":
        table = read_gids(name, number)
        gids = rank(table)
        if gid_index >= 0:
            gids = [gid for gid in table if gid.index == gid_index]
        if not gids:
            asked = f" at index {gid_index}" if gid_index >= 0 else ""
            raise RdmaPortError(
                f"{name} port {number} has no GID{asked}; there are: {_listed(table)}; its "
                "network interface needs an address; run: tierd doctor"
            )
    depth = min(device["read_depth_in"], device["read_depth_out"], READ_DEPTH_MAX)
    return Port(
        name, number, port["link_layer"], port["mtu"], port["lid"], max(depth, 1), tuple(gids)
    )


def read_gids(device: str, port: int, *, sys_: Path = CLASS) -> list[Gid]:
    """Return the used entries of a port's GID table that a queue pair can name, by index.

    Raises:
        RdmaPortError: there is no such table: the device has just gone, or /sys is hidden.
    """
    folder = sys_ / device / "ports" / str(port)
    found = []
    try:
        names = os.listdir(folder / "gids")
    except OSError as error:
        raise RdmaPortError(
            f"the GIDs of {device} port {port} cannot be read: {error}; the device has gone, or "
            "/sys is hidden from this process; run: tierd doctor"
        ) from None
    # A table may have a thousand entries; those in use are a few.
    for name in names:
        if int(name) >= GIDS_MAX:
            continue
        value = bytes.fromhex(_text(folder / "gids" / name).replace(":", ""))
        if not any(value):
            continue
        if kind := _text(folder / "gid_attrs/types" / name):
            netdev = _text(folder / "gid_attrs/ndevs" / name)
            found.append(Gid(int(name), value, kind, netdev))
    return sorted(found, key=lambda gid: gid.index)


def _text(path: Path) -> str:
    try:
        file = os.open(path, os.O_RDONLY)  # a file object costs ten times as much
    except OSError:
        return ""
    try:
        return os.read(file, 4096).decode("ascii", "replace").strip()
    except OSError:  # an unused entry
        return ""
    finally:
        os.close(file)


def open_context(port: Port) -> Any:
    """Open a port's device.

    Raises:
        RdmaPermissionError: the system refuses.
    """
    try:
        return _core.VerbsContext(port.device, port.port)
    except _core.VerbsError as error:
        raise RdmaPermissionError(f"{error}; run: tierd doctor") from None


def register(context: Any, memory: Any, *, piece_bytes: int = 64 << 30) -> Any:
    """Register memory for peers to read.

    Raises:
        RdmaMemoryError: the system refuses; RLIMIT_MEMLOCK is the usual reason.
    """
    try:
        return _core.VerbsExport(context, memory, piece_bytes)
    except _core.VerbsError as error:
        raise RdmaMemoryError(f"{error}; run: tierd doctor") from None

"""What exports and peers need here: a port, its MTU, locked memory, a read that works."""

from __future__ import annotations

import contextlib
import fnmatch
import resource
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import RdmaError, RdmaMissingError, TierdError
from tierd.io import _core, find_devices, verbs
from tierd.io.device import PAGE_BYTES, aligned_buffer
from tierd.io.store_set import StoreSet
from tierd.tools.doctor.finding import Finding, fine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierd.config import Settings

MTU_WANTED = 4096
PROBE_PAGES = 64
PROBE_NS = 2_000_000_000
UNIT_CURE = "systemctl edit tierd  # [Service] LimitMEMLOCK=infinity"


def examine(settings: Settings, *, probe: bool) -> Iterator[Finding]:
    """Yield what stands in the way of the configured exports and peers; nothing if there are none.

    Args:
        settings: which exports and peers.
        probe: read through the port.
    """
    if not (settings.exports.images or settings.remote.peers):
        return
    if "verbs" not in {_resolved(settings.exports.transport), _resolved(settings.remote.transport)}:
        return
    section = settings.exports if settings.exports.images else settings.remote
    try:
        port = verbs.find_port(section.device, section.port, section.gid_index)
    except RdmaMissingError as error:
        text = "there is no RDMA, so tables of other nodes come over NIXL, if it is installed"
        cure = "pip install --no-deps nixl-cu12"
        yield Finding("remote", "", "warning", text, str(error), "no card or no driver", cure)
        return
    except RdmaError as error:
        text, cause = "the RDMA port cannot be used", "its rights, its link or its addresses"
        yield Finding("remote", "", "problem", text, str(error), cause, "rdma link show")
        return
    yield _mtu(port)
    yield _memlock(settings)
    if probe:
        yield _read(port)


def _resolved(transport: str) -> str:
    return "verbs" if transport == "auto" else transport


def _mtu(port: verbs.Port) -> Finding:
    evidence = f"{port}; GIDs {', '.join(map(str, port.gids)) or 'none'}"
    if port.mtu >= MTU_WANTED:
        return fine(
            "remote", "a page of 4 KiB travels in one packet", evidence, subject=port.device
        )
    net = port.gids[0].netdev if port.gids else "IFACE"
    return Finding(
        "remote",
        port.device,
        "warning",
        f"the MTU is {port.mtu}, so a page of 4 KiB takes {MTU_WANTED // port.mtu} packets",
        evidence,
        "its network interface has a small MTU; the switch and the peers need a large one, too",
        f"ip link set dev {net} mtu 4200",
    )


def _memlock(settings: Settings) -> Finding:
    """Compare what is registered with the limit: exports, and with each peer clients' arenas."""
    arenas = settings.channel.arena_pages_max * PAGE_BYTES * len(settings.remote.peers)
    exported = _exported_bytes(settings)
    need = arenas + exported
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 20} MiB"
    evidence = (
        f"{exported >> 20} MiB of exports and up to {arenas >> 20} MiB for each client are "
        f"registered, RLIMIT_MEMLOCK is {shown}"
    )
    if limit == resource.RLIM_INFINITY or limit >= need:
        return fine("remote", "memory can be locked for the network card", evidence)
    return Finding(
        "remote",
        "",
        "problem",
        "too little memory can be locked for the network card",
        evidence,
        "exports are registered once, each client's arenas once for each peer",
        UNIT_CURE,
    )


def _exported_bytes(settings: Settings) -> int:
    total = 0
    patterns = settings.exports.images
    with contextlib.suppress(TierdError):  # the devices have findings of their own
        paths = [find_devices.resolve(path) for path in settings.devices.paths]
        with StoreSet.open(paths, write=False) as stores:
            for image in stores.images:
                if any(fnmatch.fnmatchcase(image.name, pattern) for pattern in patterns):
                    total += image.info.pages * PAGE_BYTES
    return total


def _read(port: verbs.Port) -> Finding:
    """Read from this process through the port and back."""
    try:
        took_us = _probe(port)
    except (TierdError, _core.VerbsError) as error:
        text, cause = "a read through the port and back fails", "its driver, its GID or a filter"
        return Finding("remote", port.device, "problem", text, str(error), cause, "rdma link show")
    text = "a read through the port and back works"
    evidence = f"{PROBE_PAGES} pages in {took_us:.0f} us"
    return fine("remote", text, evidence, subject=port.device)


def _probe(port: verbs.Port) -> float:
    context = verbs.open_context(port)
    memory = aligned_buffer(PROBE_PAGES * PAGE_BYTES)
    memory[:] = np.arange(memory.size, dtype=np.uint64).view(np.uint8)[: memory.size]
    way = verbs.agree(port, port)
    export = verbs.register(context, memory)
    responder = _core.VerbsResponder(context, 1)
    try:
        link = _core.VerbsLink(context, 1, PROBE_PAGES, PROBE_NS)
        responder.connect(queue_pairs=link.names, **way.for_core())
        link.connect(queue_pairs=responder.names, **way.for_core())
        out = aligned_buffer(memory.size)
        ((_, _, address, key),) = export.places
        pages = [(address + page * PAGE_BYTES, key) for page in range(PROBE_PAGES)]
        took = min(link.probe(pages, out) for _ in range(3))
        if not np.array_equal(out, memory):
            raise RdmaError("other bytes came than were read")
    finally:
        responder.close()
        export.close()
    return float(took) / 1e3

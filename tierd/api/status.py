"""GET /v1/status: one look at the whole daemon."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tierd import __version__
from tierd.api import schemas
from tierd.api.common import DAEMON, moment, reply

if TYPE_CHECKING:
    from tierd.daemon import Daemon
    from tierd.io.store import Store

PAGE_BYTES = 4096

routes = web.RouteTableDef()


@routes.get("/v1/status")
async def get_status(request: web.Request) -> web.Response:
    """Answer with the daemon's state."""
    daemon = request.app[DAEMON]
    # A pump that is registering a client's memory answers when it has done so.
    counters = await asyncio.to_thread(daemon.plane.stats)
    return reply(_status(daemon, counters))


def _status(daemon: Daemon, counters: list[dict[str, Any]]) -> schemas.Status:
    plane, clients = daemon.plane, daemon.attach.clients.values()
    return schemas.Status(
        name=daemon.settings.daemon.name,
        version=__version__,
        pid=os.getpid(),
        boot_id=daemon.identity.boot_id,
        started_at=moment(daemon.identity.started),
        uptime_s=round(daemon.identity.uptime_s, 3),
        devices=[_device(store) for store in plane.stores],
        pumps=[schemas.Pump.model_validate(pump) for pump in counters],
        images=len(plane.images),
        absent_devices=[
            schemas.AbsentDevice(device=name, reason=why) for name, why in plane.absent.items()
        ],
        incomplete_images=[
            schemas.IncompleteImage(name=image.name, reason=image.fault)
            for image in plane.incomplete
        ],
        shadowed_images=plane.shadowed,
        clients=len(clients),
        rings=sum(len(client.view.rings) for client in clients),
        totals=_totals(daemon),
        history=schemas.History(degraded=daemon.catalog.degraded, lost=daemon.catalog.lost),
        session_faults=daemon.attach.faults,
        refusals=[
            schemas.Refusal(pid=r.pid, at=moment(r.at), reason=r.reason)
            for r in daemon.attach.refusals
        ],
    )


def _device(store: Store) -> schemas.Device:
    device = store.device
    return schemas.Device(
        path=device.path,
        uuid=store.uuid,
        size_bytes=device.size,
        free_bytes=store.free_pages * PAGE_BYTES,
        direct=device.direct,
        direct_reason=device.direct_reason,
        images=len(store.images),
    )


def _totals(daemon: Daemon) -> schemas.Totals:
    views = [client.view for client in daemon.attach.clients.values()]
    stats = [view.stats(ring) for view in views for ring in range(len(view.rings))]
    names = ("lookups", "hits", "misses", "steps", "late_steps", "stall_ns", "failed")
    sums = {name: sum(ring[name] for ring in stats) for name in names}
    ratio = sums["hits"] / sums["lookups"] if sums["lookups"] else None
    return schemas.Totals(**sums, hit_ratio=ratio)

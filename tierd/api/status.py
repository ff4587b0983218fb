"""/v1/status and /v1/doctor: one look at the whole daemon."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierd import __version__
from tierd.api import schemas
from tierd.api.common import moment
from tierd.api.devices import device_answer
from tierd.api.doctor import EXAMINATION, verdict
from tierd.api.routing import Call, Routes

if TYPE_CHECKING:
    from tierd.daemon.dram import Held
    from tierd.daemon.service import Daemon

routes = Routes("status", "The daemon: what it is, what it serves, how it is.")


@routes.get("/v1/status", schemas.Status)
async def get_status(call: Call) -> schemas.Status:
    """The daemon's state.

    Counters of pumps count since the daemon's start (who asks more than ten times a second gets
    some that are 0.1 s old); `totals` are sums over the clients that are attached now, since each
    attached.
    """
    daemon = call.daemon
    counters = await daemon.counters.read()
    doctor = verdict(call.request.app[EXAMINATION])
    return _status(daemon, counters, doctor)


def _status(
    daemon: Daemon, counters: list[dict[str, Any]], doctor: schemas.Verdict
) -> schemas.Status:
    plane, clients = daemon.plane, daemon.attach.clients.values()
    return schemas.Status(
        name=daemon.settings.daemon.name,
        version=__version__,
        pid=os.getpid(),
        boot_id=daemon.identity.boot_id,
        started_at=moment(daemon.identity.started),
        uptime_s=round(daemon.identity.uptime_s, 3),
        devices=[device_answer(store) for store in plane.stores],
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
        scrub=schemas.Scrub(**daemon.scrubber.status()),
        dram=[_in_memory(held) for held in daemon.attach.dram.listing()],
        exports=len(daemon.exports.listing()),
        exports_fault=daemon.exports.fault,
        peers=[
            schemas.Peer(
                name=peer.name,
                up=peer.up,
                reason=peer.reason,
                transport=peer.transport,
                connects=peer.connects,
                images=plane.read_from(peer.name),
            )
            for peer in daemon.peers
        ],
        session_faults=daemon.attach.faults,
        lossy=[
            schemas.LossyTable(image=one.name, seen_set=str(one.path), seen_share=one.share)
            for one in daemon.attach.lossy_tables()
        ],
        refusals=[
            schemas.Refusal(pid=r.pid, at=moment(r.at), reason=r.reason)
            for r in daemon.attach.refusals
        ],
        doctor=doctor,
    )


def _in_memory(held: Held) -> schemas.DramImage:
    memory = held.memory
    return schemas.DramImage(
        image=held.image.info.name,
        state=held.state,
        reason=held.reason,
        pages=held.image.info.pages,
        loaded_pages=held.loaded,
        size_bytes=0 if memory is None else memory.size,
        memory="" if memory is None else memory.page_kind,
    )


def _totals(daemon: Daemon) -> schemas.Totals:
    views = [client.view for client in daemon.attach.clients.values()]
    stats = [view.stats(ring) for view in views for ring in range(len(view.rings))]
    names = ("lookups", "hits", "misses", "steps", "late_steps", "stall_ns", "failed")
    sums = {name: sum(ring[name] for ring in stats) for name in names}
    ratio = sums["hits"] / sums["lookups"] if sums["lookups"] else None
    return schemas.Totals(**sums, hit_ratio=ratio)

"""/v1/overview and /v1/history: what the dashboard draws, made once for all who watch."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from tierd import __version__
from tierd.api import schemas  # noqa: TC001 - pydantic reads the annotations
from tierd.api.common import moment
from tierd.api.doctor import EXAMINATION, verdict
from tierd.api.jobs import job_answer
from tierd.api.parse import NUMBER, Query
from tierd.api.routing import Call, Routes
from tierd.api.streams import stream
from tierd.daemon.jobs import FINISHED
from tierd.daemon.recent import (
    HISTORY_MAX,
    HISTORY_S,
    LATENCY_BOUNDS_US,
    LIVE_S,
    RATES_S,
    READ_TIME_BOUNDS_US,
    TIMES_S,
    gained,
    quantile_us,
    ratio,
)

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncGenerator

    from aiohttp import web

    from tierd.api.streams import Item
    from tierd.daemon.attach import AttachedClient
    from tierd.daemon.recent import Sums
    from tierd.daemon.served import ServedImage
    from tierd.daemon.service import Daemon
    from tierd.io.store import Store

PAGE_BYTES = 4096
ENDED_JOBS_MAX = 8
LOOK_MAX_S = 1.5  # a pump that stands still may answer late: the last look is shown meanwhile

routes = Routes("overview", "Everything at a glance, and how it was: what the dashboard shows.")


class TableNow(BaseModel):
    """A table: rates over 10 s, shares and read times over 60 s; null where nothing was counted."""

    name: str
    layer: int
    window_us: float
    window_source: Literal["placement", "probe", "assumed"]
    clients: int
    steps_per_s: float
    lookups_per_s: float
    misses_per_s: float
    hit_ratio: float | None
    late_ratio: float | None
    stall_us: float | None  # per step
    reads: int  # requests answered
    read_p50_us: float | None  # upper bounds of their buckets
    read_p99_us: float | None
    read_times: list[int]  # counts from bucket read_first on; bounds are 8 us * sqrt(2)^i
    read_first: int
    slack_us: float | None  # window less p99; null while the window is assumed
    failed: int  # since the daemon's start
    tag_errors: int


class DeviceNow(BaseModel):
    """A device; reads over 60 s."""

    path: str
    uuid: str
    size_bytes: int
    free_bytes: int
    images: int
    direct: bool
    note: str
    reads_per_s: float
    in_flight: int
    read_p50_us: float | None
    read_p99_us: float | None
    errors: int  # since the daemon's start
    absent: str  # why it is not there; ""


class PumpNow(BaseModel):
    """A pump; rates over 10 s."""

    transport: str
    transport_reason: str
    requests_per_s: float
    reads_per_s: float
    in_flight: int
    cpu: float  # of one core


class ClientNow(BaseModel):
    """An attached rank; rates over 10 s, shares over 60 s."""

    client: str
    engine: str
    pid: int
    rank: int
    world: int
    attached_at: str
    tables: int
    guardian: int  # rings that its guardian serves
    outstanding: int
    steps_per_s: float  # of its busiest table
    late_ratio: float | None
    stall_us: float | None  # per table and step
    hit_ratio: float | None


class KvNow(BaseModel):
    """The host KV pool."""

    pool_bytes: int
    free_bytes: int
    leases: int
    resident_ratio: float | None


class Overview(BaseModel):
    """GET /v1/overview."""

    at: str
    age_s: float | None  # of the counters that rates are made from
    name: str
    version: str
    pid: int
    boot_id: str
    started_at: str
    uptime_s: float
    still: str  # what stands still; "" while every thread turns
    doctor: schemas.Verdict
    problems: list[str]
    mode: str  # of the controller
    frozen: str
    images: int
    last_event: int
    tables: list[TableNow]
    devices: list[DeviceNow]
    pumps: list[PumpNow]
    clients: list[ClientNow]
    jobs: list[schemas.Job]  # those that have not ended, and the last that have
    kv: KvNow


class Past(BaseModel):
    """GET /v1/history: one list entry a point, oldest first; null where nothing happened."""

    seconds: float  # between two points
    times: list[float]  # Unix time, seconds
    steps_per_s: list[float]
    late_ratio: list[float | None]
    stall_ms_per_s: list[float]
    lookups_per_s: list[float]
    hit_ratio: list[float | None]
    reads_per_s: list[float]
    read_p99_us: list[float | None]
    in_flight: list[int]


class HistoryQuery(Query):
    """How much of it."""

    points: Annotated[int, Field(ge=1, le=HISTORY_MAX), NUMBER] = Field(
        HISTORY_MAX, description="The newest, as many at most; they are 10 s apart."
    )


@routes.get("/v1/overview", Overview, stream=Overview)
async def get_overview(call: Call) -> Overview | web.StreamResponse:
    """Everything at a glance: tables, devices, pumps, clients, jobs.

    With `Accept: text/event-stream`, the same again every second.
    """
    if call.wants_stream:
        return await stream(call.request, _follow(call))
    return await _look(call)


@routes.get("/v1/history", Past, query=HistoryQuery)
async def get_history(call: Call) -> Past:
    """Rates and shares of the last hours, since the daemon's start at most."""
    points = list(call.daemon.recent.history)[-call.query.points :]
    # From the monotonic clock, so that a step of the wall clock bends no curve.
    offset = time.time() - time.monotonic()
    columns: dict[str, list[Any]] = {
        name: [_short(getattr(point, name)) for point in points]
        for name in Past.model_fields
        if name not in {"seconds", "times"}
    }
    times = [round(point.at + offset, 1) for point in points]
    return Past(seconds=HISTORY_S, times=times, **columns)


async def _follow(call: Call) -> AsyncGenerator[Item, None]:
    due = time.monotonic()
    while True:
        yield "overview", None, (await _look(call)).model_dump_json()
        due = max(due + LIVE_S, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


async def _look(call: Call) -> Overview:
    daemon = call.daemon
    look = daemon.recent.look()
    still, _ = await asyncio.gather(daemon.vitals(), asyncio.wait({look}, timeout=LOOK_MAX_S))
    if look.done():
        look.result()
    return overview(daemon, still, verdict(call.request.app[EXAMINATION]))


def overview(daemon: Daemon, still: str, doctor: schemas.Verdict) -> Overview:
    """Return what is to be seen now."""
    recent, plane, kv = daemon.recent, daemon.plane, daemon.attach.kv
    totals = kv.totals()
    rates, times = recent.since(RATES_S), recent.since(TIMES_S)
    windows = _windows(daemon)
    jobs = daemon.jobs.list()
    ended = [job for job in jobs if job.state in FINISHED][:ENDED_JOBS_MAX]
    return Overview(
        at=moment(time.time()),
        age_s=None if recent.age_s is None else round(recent.age_s, 2),
        name=daemon.settings.daemon.name,
        version=__version__,
        pid=os.getpid(),
        boot_id=daemon.identity.boot_id,
        started_at=moment(daemon.identity.started),
        uptime_s=round(daemon.identity.uptime_s, 1),
        still=still,
        doctor=doctor,
        problems=_problems(daemon),
        mode=daemon.settings.controller.mode,
        frozen=daemon.steering.frozen,
        images=len(plane.images),
        last_event=daemon.hub.last_id,
        tables=[
            _table(image, windows, rates, times)
            for image in sorted(
                plane.images.values(), key=lambda one: (one.info.table.layer, one.info.name)
            )
        ],
        devices=[_device(store, times) for store in plane.stores]
        + [_absent(name, why) for name, why in plane.absent.items()],
        pumps=_pumps(rates),
        clients=[_client(one, rates, times) for one in daemon.attach.clients.values()],
        jobs=[job_answer(job) for job in jobs if job.state not in FINISHED or job in ended],
        kv=KvNow(
            pool_bytes=kv.pool_bytes,
            free_bytes=kv.free_bytes,
            leases=len(kv.leases()),
            resident_ratio=ratio(totals["hit"], totals["wanted"]),
        ),
    )


def _problems(daemon: Daemon) -> list[str]:
    """Return what an operator should know, one line each."""
    plane, attach = daemon.plane, daemon.attach
    found = [f"device {name} is not there: {why}" for name, why in plane.absent.items()]
    found += [f"{one.name} is not served: {one.fault}" for one in plane.incomplete]
    found += [f"{name}: damaged: {'; '.join(what)}" for name, what in _damaged(daemon).items()]
    if daemon.catalog.degraded:
        found.append(f"history is not being kept: {daemon.catalog.degraded}")
    if attach.faults:
        found.append(f"{attach.faults} sessions ended by a fault of the daemon's own: see its log")
    found += [f"pid {refusal.pid} was refused: {refusal.reason}" for refusal in attach.refusals]
    found += [f"{one.name}: rows that no trace saw are zero" for one in attach.lossy_tables()]
    unused = attach.lossy.keys() - {one.name for one in attach.lossy_tables()}
    found += [
        f"lossy.seen_sets names {name}, which is not served as traced" for name in sorted(unused)
    ]
    return found


def _damaged(daemon: Daemon) -> dict[str, list[str]]:
    damaged: dict[str, list[str]] = daemon.scrubber.status()["damaged"]
    return damaged


def _windows(daemon: Daemon) -> dict[str, float]:
    """Return image name -> the probe's window in us, of the first client that has one."""
    found: dict[str, float] = {}
    for one in daemon.steering.clients.values():
        images = one.watch.client.attached.images
        for image, window in zip(images, one.windows_ms, strict=False):
            if window is not None:
                found.setdefault(image.info.name, window * 1000)
    return found


def _table(
    image: ServedImage,
    windows: dict[str, float],
    rates: tuple[Sums, Sums] | None,
    times: tuple[Sums, Sums] | None,
) -> TableNow:
    name = image.info.name
    window_us, source = _window(image, windows)
    quick, quick_s = _gained(name, rates)
    slow, _ = _gained(name, times)
    counts = _times(name, times)
    p99 = quantile_us(counts, 0.99)
    filled = np.flatnonzero(counts)
    first, last = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
    since_start = rates[1].tables.get(name) if rates else None
    return TableNow(
        name=name,
        layer=image.info.table.layer,
        window_us=window_us,
        window_source=source,
        clients=image.clients,
        steps_per_s=_short(quick["steps"] / quick_s),
        lookups_per_s=_short(quick["lookups"] / quick_s),
        misses_per_s=_short(quick["misses"] / quick_s),
        hit_ratio=_short(ratio(slow["hits"], slow["lookups"])),
        late_ratio=_short(ratio(slow["late_steps"], slow["steps"])),
        stall_us=_short(ratio(slow["stall_ns"] / 1000, slow["steps"])),
        reads=int(counts.sum()),
        read_p50_us=_short(quantile_us(counts, 0.5)),
        read_p99_us=_short(p99),
        read_times=counts[first:last].tolist(),
        read_first=first,
        slack_us=_short(window_us - p99) if p99 is not None and source != "assumed" else None,
        failed=since_start["failed"] if since_start else 0,
        tag_errors=since_start["tag_errors"] if since_start else 0,
    )


def _window(
    image: ServedImage, windows: dict[str, float]
) -> tuple[float, Literal["placement", "probe", "assumed"]]:
    """Return a table's window and where it is from: the operator's word goes first."""
    if image.window_us is not None:
        return image.window_us, "placement"
    if image.info.name in windows:
        return windows[image.info.name], "probe"
    return image.window_ns / 1000, "assumed"


_COUNTED = ("steps", "late_steps", "stall_ns", "lookups", "hits", "misses")


def _gained(name: str, span: tuple[Sums, Sums] | None) -> tuple[dict[str, int], float]:
    """Return what a table's counters gained, and in how many seconds."""
    if span is None or name not in span[1].tables:
        return dict.fromkeys(_COUNTED, 0), 1.0
    before, now = span
    old, new = before.tables.get(name), now.tables[name]
    return {one: gained(old, new, one) for one in _COUNTED}, max(now.at - before.at, 1e-3)


def _times(name: str, span: tuple[Sums, Sums] | None) -> np.ndarray[Any, np.dtype[np.uint64]]:
    nothing = np.zeros(len(READ_TIME_BOUNDS_US) + 1, np.uint64)
    if span is None or name not in span[1].times:
        return nothing
    before, now = span
    return now.times[name] - before.times.get(name, nothing)


def _device(store: Store, span: tuple[Sums, Sums] | None) -> DeviceNow:
    device = store.device
    seconds, reads, errors, in_flight = 1.0, 0, 0, 0
    counts = np.zeros(len(LATENCY_BOUNDS_US) + 1, np.uint64)
    if span is not None and store.uuid in span[1].devices:
        before, now = span[0].devices.get(store.uuid), span[1].devices[store.uuid]
        seconds = max(span[1].at - span[0].at, 1e-3)
        reads = now.reads - (before.reads if before else 0)
        counts = now.times - before.times if before else now.times
        errors, in_flight = now.errors, now.in_flight
    return DeviceNow(
        path=device.path,
        uuid=store.uuid,
        size_bytes=device.size,
        free_bytes=store.free_pages * PAGE_BYTES,
        images=len(store.images),
        direct=device.direct,
        note=store.note or device.direct_reason,
        reads_per_s=_short(reads / seconds),
        in_flight=in_flight,
        read_p50_us=quantile_us(counts, 0.5, LATENCY_BOUNDS_US),
        read_p99_us=quantile_us(counts, 0.99, LATENCY_BOUNDS_US),
        errors=errors,
        absent="",
    )


def _absent(name: str, why: str) -> DeviceNow:
    return DeviceNow(
        path=name, uuid="", size_bytes=0, free_bytes=0, images=0, direct=False, note="",
        reads_per_s=0, in_flight=0, read_p50_us=None, read_p99_us=None, errors=0, absent=why,
    )  # fmt: skip


def _pumps(span: tuple[Sums, Sums] | None) -> list[PumpNow]:
    if span is None:
        return []
    seconds = max(span[1].at - span[0].at, 1e-3)
    return [
        PumpNow(
            transport=now["transport"],
            transport_reason=now["transport_reason"],
            requests_per_s=_short((now["requests"] - old["requests"]) / seconds),
            reads_per_s=_short((now["reads"] - old["reads"]) / seconds),
            in_flight=now["in_flight"],
            cpu=_short((_cpu_ns(now) - _cpu_ns(old)) / seconds / 1e9),
        )
        for old, now in zip(span[0].pumps, span[1].pumps, strict=False)
    ]


def _cpu_ns(pump: dict[str, Any]) -> int:
    return int(pump["cpu_user_ns"] + pump["cpu_system_ns"])


def _client(
    client: AttachedClient, rates: tuple[Sums, Sums] | None, times: tuple[Sums, Sums] | None
) -> ClientNow:
    name, rings = client.client_id, range(len(client.view.rings))
    quick, slow = _client_gained(name, rates), _client_gained(name, times)
    seconds = max(rates[1].at - rates[0].at, 1e-3) if rates else 1.0
    return ClientNow(
        client=name,
        engine=client.engine,
        pid=client.pid,
        rank=client.rank,
        world=client.world,
        attached_at=moment(client.since),
        tables=len(rings),
        guardian=sum(client.view.server(ring) == "guardian" for ring in rings),
        outstanding=sum(client.view.outstanding(ring) for ring in rings),
        # Every table counts the same steps.
        steps_per_s=_short(quick["steps"] / max(len(rings), 1) / seconds),
        late_ratio=_short(ratio(slow["late_steps"], slow["steps"])),
        stall_us=_short(ratio(slow["stall_ns"] / 1000, slow["steps"])),
        hit_ratio=_short(ratio(slow["hits"], slow["lookups"])),
    )


def _client_gained(name: str, span: tuple[Sums, Sums] | None) -> dict[str, int]:
    if span is None or name not in span[1].clients:
        return dict.fromkeys(_COUNTED, 0)
    old: Counter[str] | None = span[0].clients.get(name)
    return {one: gained(old, span[1].clients[name], one) for one in _COUNTED}


def _short(value: Any) -> Any:
    """Return a number with as many digits as anybody reads, so that it is sent in few bytes."""
    return float(f"{value:.4g}") if isinstance(value, float) else value

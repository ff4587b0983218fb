"""/v1/controller, /v1/windows, /v1/curves: what the controller sees, and the operator's word."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, Field

from tierd.api import schemas
from tierd.api.common import moment
from tierd.api.jobs import ChangeQuery
from tierd.api.parse import Body
from tierd.api.routing import Call, Routes
from tierd.controller.curves import Phase

if TYPE_CHECKING:
    from tierd.daemon.observed import RingState
    from tierd.daemon.steering import CacheView, Steering, Watched

POINTS_MAX = 48

routes = Routes("controller", "The cache split: what is seen, what is decided and why.")


class ControlledTable(BaseModel):
    """One table of a client; null where nothing is known yet."""

    name: str
    layer: int
    window_ms: float | None  # time from step start until the layer reads
    ways: int | None  # in force, of 32
    advised_ways: int | None
    lookups_per_step: float
    hit_ratio: float | None  # measured, recent steps
    predicted_hit_ratio: float | None  # of an LRU cache of as many rows
    pages: float  # read per step, recent mean
    predicted_pages: float | None
    read_ms: float | None  # measured, at the last looks
    predicted_read_ms: float | None
    stall_ms: float  # per step, measured on the GPU
    predicted_stall_ms: float | None
    samples: float  # what the curve stands on


class ControlledCache(BaseModel):
    """One row cache of a client."""

    row_bytes: int
    sets: int
    ways: list[int]  # in force, in the order of `tables`
    advised_ways: list[int]  # what the controller wants
    follows: bool  # whether the engine is told, and takes it over
    tables: list[str]
    decision: str  # the last one, with its reason
    predicted_ms: float | None
    size: str  # what more or less cache would do
    next_mib_us: float | None  # what each of the next MiB would take off a step
    pays: bool | None


class ControlledClient(BaseModel):
    """One attached rank."""

    client: str
    engine: str
    pid: int
    rank: int
    steps: int  # seen
    stall_ms: float | None  # per step, all tables
    predicted_ms: float | None
    problem: str
    tables: list[ControlledTable]
    caches: list[ControlledCache]


class ReadModel(BaseModel):
    """What the reads of one pump take: base + page x own and earlier + later x later pages."""

    pump: int
    base_ms: float
    page_us: float
    later_us: float
    seen: int
    slowness: float  # recent reads over what they took at first
    slow: bool


class Decision(BaseModel):
    """Something that was decided, or that the operator said."""

    time: str
    action: str
    subject: str
    reason: str
    ways: list[int]


class Controller(BaseModel):
    """GET /v1/controller."""

    mode: str
    frozen: str  # why nothing moves; ""
    problems: list[str]
    clients: list[ControlledClient]
    devices: list[ReadModel]
    decisions: list[Decision]  # newest first


class Windows(BaseModel):
    """GET /v1/windows: what the probe measured."""

    path: str
    problem: str  # why there are none; ""
    gpu: str
    engine: str
    model: str
    date: str
    versions: dict[str, str]
    step_ms: dict[int, float]  # by batch size
    layers: dict[int, dict[int, float]]  # ms, by layer and batch size


class Curve(BaseModel):
    """One table's live miss curve for one phase."""

    client: str
    table: str
    phase: str  # decode or prefill
    samples: float
    rows: list[float]  # cache sizes
    miss: list[float]
    error: list[float]  # one standard error


class Curves(BaseModel):
    """GET /v1/curves."""

    curves: list[Curve]


class FreezeRequest(Body):
    """Keep the split as it is."""

    reason: str = Field("by the operator", max_length=200, pattern=r"^[ -~]+$")


class Undone(BaseModel):
    """POST /v1/controller/undo."""

    splits: int  # that went back
    frozen: str


@routes.get("/v1/controller", Controller)
async def get_controller(call: Call) -> Controller:
    """What is seen and decided, measured beside predicted."""
    async with call.daemon.steering.lock:
        return answer(call.daemon.steering)


@routes.add("POST", "/v1/controller/freeze", Controller, query=ChangeQuery, body=FreezeRequest)
async def post_freeze(call: Call) -> Controller | schemas.DryRun:
    """Freeze every split, also of clients to come."""
    steering = call.daemon.steering
    if call.query.dry_run:
        return schemas.DryRun(changes=[f"every split stays: {call.body.reason}"])
    await steering.freeze(call.body.reason)
    return answer(steering)


@routes.add("POST", "/v1/controller/thaw", Controller, query=ChangeQuery)
async def post_thaw(call: Call) -> Controller | schemas.DryRun:
    """Let splits move again."""
    steering = call.daemon.steering
    if call.query.dry_run:
        return schemas.DryRun(changes=["splits may move again"] if steering.frozen else [])
    await steering.thaw()
    return answer(steering)


@routes.add("POST", "/v1/controller/undo", Undone, query=ChangeQuery)
async def post_undo(call: Call) -> Undone | schemas.DryRun:
    """Return to the splits before the last changes, and freeze there."""
    steering = call.daemon.steering
    if call.query.dry_run:
        changes = [
            f"{one.watch.client.engine} rank {one.watch.client.rank}: "
            f"{view.state.ways} becomes {view.state.previous}"
            for one in steering.clients.values()
            for view in one.caches
            if view.state.previous
        ]
        return schemas.DryRun(changes=changes)
    return Undone(splits=await steering.undo(), frozen=steering.frozen)


@routes.get("/v1/windows", Windows)
async def get_windows(call: Call) -> Windows:
    """The probe's windows."""
    steering = call.daemon.steering
    probed = steering.windows
    if probed is None:
        return Windows(
            path=steering.settings.windows, problem=steering.problem, gpu="", engine="", model="",
            date="", versions={}, step_ms={}, layers={},
        )  # fmt: skip
    return Windows(
        path=steering.settings.windows,
        problem="",
        gpu=probed.gpu,
        engine=probed.engine,
        model=probed.model,
        date=probed.date,
        versions=probed.versions,
        step_ms={batch: step * 1000 for batch, step in probed.step_s.items()},
        layers={
            layer: {batch: window * 1000 for batch, window in windows.items()}
            for layer, windows in probed.layers.items()
        },
    )


@routes.get("/v1/curves", Curves)
async def get_curves(call: Call) -> Curves:
    """Live miss curves of every attached table, decode and prefill apart."""
    found = []
    async with call.daemon.steering.lock:
        for name, one in call.daemon.steering.clients.items():
            for ring, state in enumerate(one.watch.rings):
                table = one.watch.client.attached.images[ring].info.name
                found += [_curve(name, table, state, phase) for phase in Phase]
    return Curves(curves=[curve for curve in found if curve.samples > 0])


def _curve(client: str, table: str, state: RingState, phase: Phase) -> Curve:
    curve = state.sampler.curve(phase)
    top = max(len(curve.rows) - 1, 1)
    chosen = np.unique(np.linspace(0, top, min(POINTS_MAX, top + 1)).astype(int))
    return Curve(
        client=client,
        table=table,
        phase=phase.name.lower(),
        samples=curve.samples,
        rows=curve.rows[chosen].tolist(),
        miss=curve.miss[chosen].tolist(),
        error=curve.error[chosen].tolist(),
    )


def answer(steering: Steering) -> Controller:
    """Return what REST says of the controller."""
    problems = [steering.problem] if steering.problem else []
    problems += sorted({one.problem for one in steering.clients.values() if one.problem})
    return Controller(
        mode=steering.settings.mode,
        frozen=steering.frozen,
        problems=list(dict.fromkeys(problems)),
        clients=[_client(steering, name, one) for name, one in steering.clients.items()],
        devices=[
            ReadModel(
                pump=number, base_ms=fit.model.base_ms, page_us=fit.model.page_us,
                later_us=fit.model.later_us, seen=fit.seen, slowness=fit.slowness, slow=fit.slow,
            )
            for number, fit in enumerate(steering.fits)
        ],
        decisions=[
            Decision(
                time=moment(one.time), action=one.action, subject=one.subject,
                reason=one.reason, ways=list(one.ways),
            )
            for one in steering.decisions
        ],
    )  # fmt: skip


def _client(steering: Steering, name: str, one: Watched) -> ControlledClient:
    client = one.watch.client
    seen = {ring: (view, at) for view in one.caches for at, ring in enumerate(view.order)}
    rings = range(len(one.watch.rings))
    predicted = [float(view.now.growth_ms) for view in one.caches if view.now is not None]
    return ControlledClient(
        client=name,
        engine=client.engine,
        pid=client.pid,
        rank=client.rank,
        steps=max((ring.steps for ring in one.watch.rings), default=0),
        stall_ms=sum(ring.stall_ms for ring in one.watch.rings),
        predicted_ms=sum(predicted) if predicted else None,
        problem=one.problem,
        tables=[_table(steering, one, ring, *seen.get(ring, (None, 0))) for ring in rings],
        caches=[_cache(one, view) for view in one.caches],
    )


def _table(
    steering: Steering, one: Watched, ring: int, view: CacheView | None, at: int
) -> ControlledTable:
    info, state = one.watch.client.attached.images[ring].info, one.watch.rings[ring]
    ways = None if view is None else view.in_force[at]
    now = None if view is None else view.now
    curve = state.sampler.curve()
    known = view is not None and ways is not None and curve.samples > 0
    hits = 1 - state.misses / state.lookups if state.lookups else None
    return ControlledTable(
        name=info.table.name,
        layer=info.table.layer,
        window_ms=one.windows_ms[ring],
        ways=ways,
        advised_ways=None if view is None else view.state.ways[at],
        lookups_per_step=state.lookups,
        hit_ratio=hits,
        predicted_hit_ratio=(
            1 - float(curve.at((ways or 0) * view.cache.sets)) if known and view else None
        ),
        pages=state.misses,
        predicted_pages=None if now is None else float(now.pages[at]),
        read_ms=steering.read_ms(one.watch.client, ring),
        predicted_read_ms=None if now is None else float(now.reads_ms[at]),
        stall_ms=state.stall_ms,
        predicted_stall_ms=None if now is None else float(now.stalls_ms[at]),
        samples=curve.samples,
    )


def _cache(one: Watched, view: CacheView) -> ControlledCache:
    images = one.watch.client.attached.images
    predicted = view.decision.predicted_ms
    return ControlledCache(
        row_bytes=view.cache.row_bytes,
        sets=view.cache.sets,
        ways=list(view.in_force),
        advised_ways=list(view.state.ways),
        follows=view.follows,
        tables=[images[ring].info.table.name for ring in view.order],
        decision=f"{view.decision.action}: {view.decision.reason}",
        predicted_ms=None if math.isnan(predicted) else predicted,
        size="" if view.size is None else view.size.text,
        next_mib_us=None if view.size is None else view.size.next_mib_us,
        pays=None if view.size is None else view.size.pays,
    )

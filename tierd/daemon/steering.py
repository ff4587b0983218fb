"""Feeds the controller and passes on what it decides.

Quotas are words in an engine's own memory. A daemon that steers writes its **wish** into the
channel, one word a ring, and the engine follows within some steps; what is in force comes back in
its counters. A daemon that only advises, or whose engine takes no wishes, goes on from its own
advice: freezing and undoing work on that, and nothing measured can veto it. Each change is an event
with its reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tierd.controller import split as climber
from tierd.controller.load import NodeLoad, Prediction, TableLoad, predict
from tierd.controller.readtime import PAPER_DISK, ReadFit
from tierd.controller.size import advise
from tierd.daemon.observed import ClientWatch
from tierd.daemon.windows import load_windows, window_ms_of
from tierd.errors import TierdError, WindowsForeignError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.catalog import Catalog
    from tierd.config import ControllerSection
    from tierd.controller.size import SizeAdvice
    from tierd.daemon.attach import AttachedClient, AttachServer, CacheOf
    from tierd.daemon.observed import RingLook
    from tierd.daemon.plane import DataPlane
    from tierd.types import ProbedWindows

log = structlog.get_logger("tierd.daemon.steering")

DECISIONS_MAX = 100
FAULT_REST_S = 30.0
STEPS_MIN = 30  # between two decisions: fewer say more about chance than about traffic


@dataclasses.dataclass(frozen=True, slots=True)
class Remembered:
    """A decision that changed something, or a word of the operator's."""

    time: float
    action: str
    subject: str
    reason: str
    ways: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CacheView:
    """One row cache of a client, as the controller sees it.

    Attributes:
        cache: what the client said at attach.
        in_force: ways of each table now, in the order of ``order``.
        follows: whether the client takes wishes and is given them.
        order: rings by window, shortest first; quotas and predictions follow it.
        state: of the climber.
        decision: the last one.
        now: predicted for the quotas in force; None where nothing can be.
        size: what more or less cache would do; None likewise.
    """

    cache: CacheOf
    order: tuple[int, ...]
    in_force: tuple[int, ...]
    follows: bool
    state: climber.SplitState
    decision: climber.Decision
    now: Prediction | None = None
    size: SizeAdvice | None = None
    load: NodeLoad | None = None
    waiting: float = 0.0  # steps since the last decision
    stalled_ms: float = 0.0  # in them, all tables together


@dataclasses.dataclass
class Watched:
    """A client and its caches."""

    watch: ClientWatch
    windows_ms: tuple[float | None, ...]
    problem: str
    caches: list[CacheView]


class Steering:
    """Looks at every client in turn and decides.

    Attributes:
        windows: of the probe; None: there are none.
        problem: why there are none, for people.
        clients: by client id.
        fits: read-time models, one a pump.
        decisions: newest first.
        reads_ms: (pump, channel, ring) -> mean read time, measured between the last looks that
            saw any.
        frozen: the operator's reason; "" while the climber may move.
        faults: looks that ended by a fault of ours; each is in the log with its traceback.
        lock: held while any of this changes.
    """

    def __init__(
        self,
        settings: ControllerSection,
        plane: DataPlane,
        attach: AttachServer,
        catalog: Catalog,
    ) -> None:
        self.settings = settings
        self._plane = plane
        self._attach = attach
        self._catalog = catalog
        self.lock = asyncio.Lock()
        self._last = time.monotonic()
        self._pumps: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self.reads_ms: dict[tuple[int, int, int], float] = {}
        self.windows: ProbedWindows | None = None
        self.problem = ""
        self.clients: dict[str, Watched] = {}
        self.fits = [ReadFit.start(PAPER_DISK) for _ in plane.pumps]
        self.decisions: deque[Remembered] = deque(maxlen=DECISIONS_MAX)
        self.frozen = ""
        self.faults = 0
        self._read_windows()

    def _read_windows(self) -> None:
        """Read the windows file; one that cannot be used is said so, and serving goes on."""
        path = self.settings.windows
        if not path:
            self.problem = (
                "no windows: set controller.windows to the probe's file, measured on this GPU with "
                "this engine; until then there are no decisions; run: tierd probe"
            )
            return
        try:
            self.windows = load_windows(Path(path))
        except TierdError as error:
            self.problem = str(error)
            log.warning("windows cannot be used", reason=self.problem)

    async def run(self) -> None:
        """Look again and again; ends only when cancelled.

        Serving needs no controller, so a fault of ours in it ends neither the daemon nor the looks:
        it is said, what was known of the clients is forgotten, and after a rest they are as new.
        """
        while True:
            await asyncio.sleep(self.settings.interval_ms / 1000)
            if not (self._attach.clients or self.clients):
                self._last = time.monotonic()
                continue
            try:
                await self.look()
            except Exception as error:
                self.faults += 1
                log.exception("controller failed", rest_s=FAULT_REST_S)
                async with self.lock:
                    self.clients.clear()
                self._remember("fault", "", f"{type(error).__name__}: {error}"[:200], ())
                await asyncio.sleep(FAULT_REST_S)

    async def look(self) -> None:
        """Look at every client once and decide."""
        async with self.lock:
            now = time.monotonic()
            seconds, self._last = now - self._last, now
            attached = dict(self._attach.clients)
            for gone in set(self.clients) - set(attached):
                del self.clients[gone]
            for name, client in attached.items():
                if name not in self.clients:
                    self.clients[name] = self._begin(client)
            looks = {name: one.watch.look() for name, one in self.clients.items()}
            await asyncio.to_thread(self._think, looks, seconds)
            self._wish()

    def _begin(self, client: AttachedClient) -> Watched:
        windows, problem = self._windows_of(client, None)
        caches = []
        for cache in client.caches:
            rings = [ring for ring in cache.ways if ring < len(client.attached.images)]
            known = {ring: windows[ring] or 0.0 for ring in rings}
            order = tuple(sorted(rings, key=lambda ring: (known[ring], self._layer(client, ring))))
            says = {ring: client.view.ways(ring) for ring in order}
            in_force = tuple(
                cache.ways[ring] if (ways := says[ring]) is None else ways for ring in order
            )
            state = climber.SplitState.start(in_force)
            if self.frozen:
                state = climber.freeze(state, self.frozen)
            decision = climber.Decision("hold", state.ways, "nothing seen yet")
            caches.append(CacheView(cache, order, in_force, self._leads(says), state, decision))
        if not client.caches:
            problem = problem or "this client does not say its caches: install this tierd there"
        return Watched(ClientWatch(client), windows, problem, caches)

    def _leads(self, says: dict[int, int | None]) -> bool:
        return self.settings.mode == "steer" and None not in says.values()

    def _wish(self) -> None:
        """Tell the clients that are still there; on the event loop, which takes them away."""
        for name, one in self.clients.items():
            if name not in self._attach.clients:
                continue
            for view in one.caches:
                if view.follows and view.in_force != view.state.ways:
                    for ring, ways in zip(view.order, view.state.ways, strict=True):
                        one.watch.client.view.wish(ring, ways)

    @staticmethod
    def _layer(client: AttachedClient, ring: int) -> int:
        return client.attached.images[ring].info.table.layer

    def _windows_of(
        self, client: AttachedClient, step_ms: float | None
    ) -> tuple[tuple[float | None, ...], str]:
        """Return each ring's window in ms, and what is wrong with them."""
        images = [image.info for image in client.attached.images]
        nothing: tuple[float | None, ...] = (None,) * len(images)
        probed = self.windows
        if probed is None:
            return nothing, self.problem
        try:
            self._check_origin(probed, client)
            batch = _nearest_batch(probed, step_ms)
            where = self.settings.windows
            return tuple(
                0.0
                if image.table.layer == 0 and 0 not in probed.layers
                else window_ms_of(probed, image.table.layer, batch, where)
                for image in images
            ), ""
        except TierdError as error:
            return nothing, str(error)

    def _check_origin(self, probed: ProbedWindows, client: AttachedClient) -> None:
        models = {image.info.model for image in client.attached.images}
        for what, measured, found in (
            ("model", probed.model, ", ".join(sorted(models))),
            ("engine", probed.engine, client.engine),
        ):
            if measured and measured != found:
                raise WindowsForeignError(
                    f"{self.settings.windows}: measured for {what} {measured}, not {found}: no "
                    "decisions for this client; run: tierd probe"
                )

    # --- in a worker thread ----------------------------------------------------------------------

    def _think(self, looks: dict[str, list[RingLook]], seconds: float) -> None:
        self._fit_reads()
        for name, rings in looks.items():
            one = self.clients[name]
            steps = one.watch.take(rings, seconds=seconds, half_life_s=self.settings.half_life_s)
            if steps:
                windows, trouble = self._windows_of(one.watch.client, seconds / steps * 1000)
                one.windows_ms = windows
                one.problem = trouble or ("" if one.watch.client.caches else one.problem)
            for number, view in enumerate(one.caches):
                one.caches[number] = self._decide(one, view, steps)

    def _fit_reads(self) -> None:
        """Feed each pump's model with the mean reads of each ring since the last look."""
        gained: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}
        seen = {}
        tables = {
            (one.watch.client.attached.pump, one.watch.client.attached.channel, ring)
            for one in self.clients.values()
            for ring in range(len(one.watch.rings))
        }
        for pump, stats in enumerate(self._plane.stats()):
            for ring in stats["rings"]:
                key = (pump, ring["channel"], ring["ring"])
                if key not in tables:
                    continue
                now = (ring["requests"], ring["pages"], ring.get("read_ns", 0))
                seen[key] = now
                before = self._pumps.get(key, (0, 0, 0))
                requests, pages, spent = (a - b for a, b in zip(now, before, strict=True))
                if requests > 0 and pages > 0 and spent > 0:
                    own = pages / requests, spent / requests / 1e6
                    gained.setdefault((pump, ring["channel"]), {})[ring["ring"]] = own
                    self.reads_ms[key] = own[1]
        self._pumps = seen
        self.reads_ms = {key: read for key, read in self.reads_ms.items() if key in seen}
        for (pump, channel), rings in gained.items():
            images = self._images_of(pump, channel)  # rings behind theirs carry hints
            order = [ring for ring in rings if ring < images]
            order.sort(key=lambda ring: (self._window(pump, channel, ring), ring))
            pages = [rings[ring][0] for ring in order]
            for at, ring in enumerate(order):
                fit = self.fits[pump].observed(
                    own=pages[at],
                    before=sum(pages[:at]),
                    later=sum(pages[at + 1 :]),
                    read_ms=rings[ring][1],
                )
                if fit.slow != self.fits[pump].slow:
                    self._note_slow(pump, fit)
                self.fits[pump] = fit

    def _images_of(self, pump: int, channel: int) -> int:
        for one in self.clients.values():
            attached = one.watch.client.attached
            if (attached.pump, attached.channel) == (pump, channel):
                return len(attached.images)
        return 0

    def _window(self, pump: int, channel: int, ring: int) -> float:
        for one in self.clients.values():
            attached = one.watch.client.attached
            if (attached.pump, attached.channel) == (pump, channel):
                return one.windows_ms[ring] or float(self._layer(one.watch.client, ring))
        return 0.0

    def _note_slow(self, pump: int, fit: ReadFit) -> None:
        action = "slow" if fit.slow else "well"
        text = f"pump {pump}: reads take {fit.slowness:.1f} times what they took at first"
        text += "; run: tierd top" if fit.slow else ""
        self._remember(action, f"pump {pump}", text, ())

    def _decide(self, one: Watched, view: CacheView, steps: int) -> CacheView:
        says = {ring: one.watch.ways[ring] for ring in view.order}
        in_force = tuple(
            before if (ways := says[ring]) is None else ways
            for ring, before in zip(view.order, view.in_force, strict=True)
        )
        view = dataclasses.replace(view, in_force=in_force, follows=self._leads(says))
        load, trouble = self._load(one, view)
        if load is None:
            decision = climber.Decision("hold", view.state.ways, trouble)
            return dataclasses.replace(view, decision=decision, now=None, size=None)
        sets = view.cache.sets
        waiting = view.waiting + steps
        stalled_ms = view.stalled_ms + sum(one.watch.rings[ring].stalled_ms for ring in view.order)
        state, decision = view.state, view.decision
        if view.follows and in_force != state.ways:
            # What was measured is of neither split alone.
            decision = climber.Decision(
                "hold", state.ways, "the engine is taking the last split over"
            )
            waiting = stalled_ms = 0.0
        elif waiting >= STEPS_MIN:
            # Where nobody follows, what is measured says nothing about the advice: no veto from it.
            measured = stalled_ms / waiting if view.follows else None
            seen = climber.Observation(load, sets, waiting, measured)
            decision, state = climber.decide(seen, view.state)
            waiting = stalled_ms = 0.0
            if decision.action != "hold":
                client = one.watch.client
                subject = f"{client.engine} rank {client.rank}"
                action = decision.action if view.follows else "advise"
                self._remember(action, subject, decision.reason, decision.ways)
        rows = [ways * float(sets) for ways in in_force]
        now = predict(load, rows) if not load.problem() else None
        size = None
        if now is not None:
            size = advise(load, in_force, sets, view.cache.row_bytes, 0.0)
        return dataclasses.replace(
            view, state=state, decision=decision, now=now, size=size, load=load, waiting=waiting,
            stalled_ms=stalled_ms,
        )  # fmt: skip

    def _load(self, one: Watched, view: CacheView) -> tuple[NodeLoad | None, str]:
        if one.problem:
            return None, one.problem
        client = one.watch.client
        tables = []
        for ring in view.order:
            info, state, window = (
                client.attached.images[ring].info,
                one.watch.rings[ring],
                one.windows_ms[ring],
            )
            if window is None:
                return None, f"{info.name}: no window"
            curve = state.sampler.curve()
            tables.append(
                TableLoad(info.table.name, window, state.lookups, curve, float(info.pages))
            )
        model = self.fits[client.attached.pump].model
        return NodeLoad(tuple(tables), (model,)), ""

    def _remember(self, action: str, subject: str, reason: str, ways: tuple[int, ...]) -> None:
        self.decisions.appendleft(Remembered(time.time(), action, subject, reason, ways))
        log.info("controller", action=action, subject=subject, reason=reason, ways=list(ways))
        self._catalog.record("controller", subject, action=action, reason=reason, ways=list(ways))

    def read_ms(self, client: AttachedClient, ring: int) -> float | None:
        """Return a ring's measured read time, None before any."""
        attached = client.attached
        return self.reads_ms.get((attached.pump, attached.channel, ring))

    # --- the operator ----------------------------------------------------------------------------

    async def freeze(self, reason: str) -> None:
        """Let nothing move, for every client, those to come too."""
        async with self.lock:
            self.frozen = reason or "by the operator"
            self._change(lambda state: climber.freeze(state, self.frozen))
            self._remember("freeze", "", self.frozen, ())

    async def thaw(self) -> None:
        """Let the climber move again."""
        async with self.lock:
            self.frozen = ""
            self._change(climber.thaw)
            self._remember("thaw", "", "by the operator", ())

    async def undo(self) -> int:
        """Return to the splits before the last changes and freeze there; returns how many."""
        async with self.lock:
            states = [view.state for one in self.clients.values() for view in one.caches]
            count = sum(bool(state.previous) for state in states)
            if count:
                self.frozen = "undone by the operator"
                self._change(climber.undo)
                self._change(lambda state: climber.freeze(state, self.frozen))
                self._remember("undo", "", f"{count} splits are as they were before", ())
                self._wish()
            return count

    def _change(self, change: Callable[[climber.SplitState], climber.SplitState]) -> None:
        for one in self.clients.values():
            one.caches = [
                dataclasses.replace(view, state=change(view.state)) for view in one.caches
            ]


def _nearest_batch(probed: ProbedWindows, step_ms: float | None) -> int | None:
    """Return the probed batch size whose step is nearest to what steps take now."""
    if step_ms is None or not probed.step_s:
        return None
    return min(probed.step_s, key=lambda batch: abs(probed.step_s[batch] * 1000 - step_ms))

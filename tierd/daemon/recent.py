"""What has just happened: counters of the last minute for rates and read times, hours of history.

Looks are cheap (some counters of every ring), so they are taken every second while somebody
watches and every ten seconds otherwise. A pump that stands still makes a look late, never wrong:
who shows it says how old it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierd.daemon.attach import AttachServer
    from tierd.daemon.counters import Counters
    from tierd.daemon.plane import DataPlane

LIVE_S = 1.0
HISTORY_S = 10.0
HISTORY_MAX = 2160  # looks, which is six hours
RATES_S = 10.0  # what rates are taken over
TIMES_S = 60.0  # what shares and distributions are taken over
READ_TIME_BUCKETS = 40
# Bucket 0 counts what took less than the first bound; the last bucket has no bound.
READ_TIME_BOUNDS_US = np.array([8.0 * 2.0 ** (i / 2) for i in range(READ_TIME_BUCKETS - 1)])
LATENCY_BOUNDS_US = np.array([2.0**i for i in range(31)])


@dataclasses.dataclass(frozen=True)
class Sums:
    """Counters since the daemon's start, at one moment.

    Attributes:
        at: monotonic clock, seconds.
        tables: image name -> ring counters of all clients, those that have gone included.
        times: image name -> read times of its requests, counts by bucket.
        devices: uuid -> reads, errors, reads in flight and their times.
        pumps: of each, what the core counts.
        clients: client id -> counters of all its rings.
    """

    at: float
    tables: dict[str, Counter[str]]
    times: dict[str, NDArray[np.uint64]]
    devices: dict[str, DeviceSums]
    pumps: list[dict[str, Any]]
    clients: dict[str, Counter[str]]


@dataclasses.dataclass
class DeviceSums:
    """One device's reads, by all pumps."""

    reads: int = 0
    errors: int = 0
    in_flight: int = 0
    times: NDArray[np.uint64] = dataclasses.field(
        default_factory=lambda: np.zeros(len(LATENCY_BOUNDS_US) + 1, np.uint64)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One entry of history; None where nothing happened that it could be said of."""

    at: float
    steps_per_s: float
    late_ratio: float | None
    stall_ms_per_s: float
    lookups_per_s: float
    hit_ratio: float | None
    reads_per_s: float
    read_p99_us: float | None
    in_flight: int


class Recent:
    """Looks at the counters of one daemon.

    Attributes:
        looks: of the last minute, oldest first.
        history: points, oldest first.
    """

    def __init__(self, plane: DataPlane, attach: AttachServer, counters: Counters) -> None:
        self._plane = plane
        self._attach = attach
        self._counters = counters
        self._task: asyncio.Task[None] | None = None
        self._times: dict[str, NDArray[np.uint64]] = {}
        self._seen: dict[tuple[int, int, int], NDArray[np.uint64]] = {}
        self._kept: Sums | None = None
        self.looks: deque[Sums] = deque()
        self.history: deque[Point] = deque(maxlen=HISTORY_MAX)

    @property
    def age_s(self) -> float | None:
        """How old the last look is; None before the first."""
        return time.monotonic() - self.looks[-1].at if self.looks else None

    async def run(self) -> None:
        """Look for the sake of history; ends only when cancelled."""
        while True:
            await self.look(HISTORY_S)
            await asyncio.sleep(HISTORY_S)

    def look(self, age_max_s: float = 0.9 * LIVE_S) -> asyncio.Task[None]:
        """Take a look unless there is one that is young enough; all who ask share it."""
        if self._task is None or self._task.done():
            age = self.age_s
            old = age is None or age >= age_max_s
            looking = self._look() if old else asyncio.sleep(0)
            self._task = asyncio.get_running_loop().create_task(looking)
        return self._task

    async def _look(self) -> None:
        self._take(await self._counters.read())

    def _take(self, pumps: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        self._add_times(pumps)
        views = {
            name: [client.view.stats(ring) for ring in range(len(client.view.rings))]
            for name, client in self._attach.clients.items()
        }
        sums = Sums(
            at=now,
            tables=ring_sums(self._attach),
            times={name: times.copy() for name, times in self._times.items()},
            devices=self._device_sums(pumps),
            pumps=pumps,
            clients={name: _added(rings) for name, rings in views.items()},
        )
        self.looks.append(sums)
        # One that is older than what is asked for stays, so that the span is always whole.
        while len(self.looks) > 2 and self.looks[1].at <= now - TIMES_S:
            self.looks.popleft()
        if self._kept is None or now - self._kept.at >= 0.95 * HISTORY_S:
            if self._kept is not None:
                self.history.append(_point(self._kept, sums))
            self._kept = sums

    def _add_times(self, pumps: list[dict[str, Any]]) -> None:
        """Add what each ring has read since the last look to its image's times."""
        images = {
            (client.attached.pump, client.attached.channel): client.attached.images
            for client in self._attach.clients.values()
        }
        seen = {}
        for number, pump in enumerate(pumps):
            for ring in pump["rings"]:
                served = images.get((number, ring["channel"]), ())
                if ring["ring"] >= len(served):  # rings of hints; or its client has just gone
                    continue
                key = (number, ring["channel"], ring["ring"])
                now = np.frombuffer(ring["read_times"], np.uint64)
                before = self._seen.get(key)
                # A channel's number is given again; then its counters begin at 0.
                if before is None or bool((now < before).any()):
                    before = np.zeros_like(now)
                gained = now - before
                name = served[ring["ring"]].info.name
                self._times[name] = self._times.get(name, np.zeros_like(now)) + gained
                seen[key] = now
        self._seen = seen

    def _device_sums(self, pumps: list[dict[str, Any]]) -> dict[str, DeviceSums]:
        found = {store.uuid: DeviceSums() for store in self._plane.stores}
        for number, pump in enumerate(pumps):
            names = self._plane.device_names(number)
            for counted in pump["devices"]:
                sums = found.get(names.get(counted["device"], ""))
                if sums is not None:
                    sums.reads += counted["reads"]
                    sums.errors += counted["errors"]
                    sums.in_flight += counted["in_flight"]
                    sums.times = sums.times + np.array(counted["latency_us"], np.uint64)
        return found

    def since(self, seconds: float) -> tuple[Sums, Sums] | None:
        """Return the last look and one about ``seconds`` older; None before there are two."""
        if len(self.looks) < 2:
            return None
        now = self.looks[-1]
        for before in reversed(self.looks):
            if now.at - before.at >= seconds:
                break
        return before, now


def ring_sums(attach: AttachServer) -> dict[str, Counter[str]]:
    """Return image name -> ring counters of all clients, those that have gone included."""
    sums = {name: Counter(counts) for name, counts in attach.departed.items()}
    for client in list(attach.clients.values()):
        for ring, image in enumerate(client.attached.images):
            sums.setdefault(image.info.name, Counter()).update(client.view.stats(ring))
    return sums


def quantile_us(
    counts: NDArray[np.uint64], share: float, bounds: NDArray[np.float64] = READ_TIME_BOUNDS_US
) -> float | None:
    """Return the bound below which this share of the counts lies; None where nothing is counted.

    What lies beyond the last bound is said to be there.
    """
    total = int(counts.sum())
    if not total:
        return None
    at = int(np.searchsorted(np.cumsum(counts), share * total))
    return float(bounds[min(at, len(bounds) - 1)])


def gained(before: Counter[str] | None, now: Counter[str], name: str) -> int:
    """Return what a counter gained; a client that writes nonsense there gains nothing by it."""
    return max(0, now[name] - (before[name] if before else 0))


def ratio(part: float, whole: float) -> float | None:
    """Return a share, None of nothing."""
    return part / whole if whole else None


def _added(rings: list[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for ring in rings:
        total.update(ring)
    return total


def _point(before: Sums, now: Sums) -> Point:
    seconds = max(now.at - before.at, 1e-3)
    sums: Counter[str] = Counter()
    for table, counts in now.tables.items():
        old = before.tables.get(table)
        for name in ("steps", "late_steps", "stall_ns", "lookups", "hits"):
            sums[name] += gained(old, counts, name)
    times = np.zeros(READ_TIME_BUCKETS, np.uint64)
    for table, counted in now.times.items():
        times += counted - before.times.get(table, np.zeros_like(counted))
    reads = [
        pump["reads"] - old["reads"] for pump, old in zip(now.pumps, before.pumps, strict=False)
    ]
    return Point(
        at=now.at,
        steps_per_s=sums["steps"] / seconds,
        late_ratio=ratio(sums["late_steps"], sums["steps"]),
        stall_ms_per_s=sums["stall_ns"] / 1e6 / seconds,
        lookups_per_s=sums["lookups"] / seconds,
        hit_ratio=ratio(sums["hits"], sums["lookups"]),
        reads_per_s=sum(reads) / seconds,
        read_p99_us=quantile_us(times, 0.99),
        in_flight=sum(pump["in_flight"] for pump in now.pumps),
    )

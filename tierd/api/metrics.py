"""/metrics: few numbers, each with one sentence of meaning and label values that are bounded.

The list below is all there is; docs/metrics.md and the checks of the alert rules come from it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from tierd import __version__
from tierd.api.doctor import EXAMINATION, verdict
from tierd.api.limits import LIMITS
from tierd.api.routing import Call, Routes
from tierd.api.streams import PLACES
from tierd.daemon.jobs import JobState
from tierd.daemon.recent import ring_sums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tierd.daemon.service import Daemon

    Sample = tuple[tuple[str, ...], float]

TABLES_MAX = 128  # label values; the rest are added up as "other"
PAGE_BYTES = 4096
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

routes = Routes("metrics", "Numbers for Prometheus. The metrics listener has these too.")


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Everything that one scrape looks at."""

    daemon: Daemon
    app: web.Application
    pumps: list[dict[str, Any]]
    rings: dict[str, dict[str, int]]

    def per_ring(self, counter: str, scale: float = 1.0) -> Iterable[Sample]:
        """One sample a table."""
        return [((table,), counts[counter] * scale) for table, counts in self.rings.items()]

    def per_pump(self, counter: str, scale: float = 1.0) -> Iterable[Sample]:
        """One sample a pump."""
        return [((str(n),), pump[counter] * scale) for n, pump in enumerate(self.pumps)]


class Labels(NamedTuple):
    """Names of labels, and how many values they take together at most, in words."""

    names: tuple[str, ...] = ()
    values: str = "1"


_NO_LABELS = Labels()


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One family of numbers.

    Attributes:
        name: with its unit; a counter's ends in ``_total``.
        kind: counter or gauge.
        meaning: one sentence.
        read: samples out of a look.
    """

    name: str
    kind: str
    meaning: str
    read: Callable[[Look], Iterable[Sample]]
    labels: Labels = _NO_LABELS


_PER_TABLE = Labels(("table",), f"images, {TABLES_MAX} at most and `other`")
_PER_PUMP = Labels(("pump",), "`pump.count`, 64 at most")
_PER_PEER = Labels(("peer",), "`remote.peers`")
_PER_DEVICE = Labels(("device",), "`devices.paths`, 64 at most")


def _one(value: float) -> list[Sample]:
    return [((), float(value))]


def _ratio(part: str, whole: str) -> Callable[[Look], Iterable[Sample]]:
    return lambda look: [
        ((table,), counts[part] / counts[whole])
        for table, counts in look.rings.items()
        if counts[whole]
    ]


def _failures(look: Look) -> list[Sample]:
    statuses = sorted({status for pump in look.pumps for status in pump["failed"]})
    return [
        ((status,), float(sum(pump["failed"].get(status, 0) for pump in look.pumps)))
        for status in statuses
    ]


def _devices(value: Callable[[Any], float]) -> Callable[[Look], Iterable[Sample]]:
    return lambda look: [
        ((store.device.path,), float(value(store))) for store in look.daemon.plane.stores
    ]


def _peers(value: Callable[[Any], float]) -> Callable[[Look], Iterable[Sample]]:
    return lambda look: [((peer.name,), float(value(peer))) for peer in look.daemon.peers]


def _kv(name: str, scale: float = 1.0) -> Callable[[Look], Iterable[Sample]]:
    return lambda look: _one(look.daemon.attach.kv.totals()[name] * scale)


def _kv_agreement(look: Look) -> list[Sample]:
    totals = look.daemon.attach.kv.totals()
    return _one(totals["agreed"] / totals["judged"]) if totals["judged"] else []


def _jobs(look: Look) -> list[Sample]:
    states = [job.state for job in look.daemon.jobs.list()]
    return [((state.value,), float(states.count(state))) for state in JobState]


def _doctor(look: Look) -> list[Sample]:
    seen = verdict(look.app[EXAMINATION])
    return [(("problem",), float(seen.problems)), (("warning",), float(seen.warnings))]


METRICS: tuple[Metric, ...] = (
    Metric(
        "tierd_lossy_tables",
        "gauge",
        "Tables of which rows that no trace saw are served as zero, because lossy.seen_sets says "
        "so; anything but 0 changes what models compute.",
        lambda look: _one(len(look.daemon.attach.lossy_tables())),
    ),
    Metric(
        "tierd_late_steps_ratio",
        "gauge",
        "Share of all steps since the daemon's start that waited more than 20 us for rows of the "
        "table.",
        _ratio("late_steps", "steps"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_stall_seconds_total",
        "counter",
        "Time that steps waited for rows of the table, in all.",
        lambda look: look.per_ring("stall_ns", 1e-9),
        _PER_TABLE,
    ),
    Metric(
        "tierd_steps_total",
        "counter",
        "Steps that looked rows of the table up.",
        lambda look: look.per_ring("steps"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_late_steps_total",
        "counter",
        "Steps that waited more than 20 us for rows of the table.",
        lambda look: look.per_ring("late_steps"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_lookups_total",
        "counter",
        "Rows of the table that were asked for.",
        lambda look: look.per_ring("lookups"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_hits_total",
        "counter",
        "Rows of the table that were in a cache.",
        lambda look: look.per_ring("hits"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_misses_total",
        "counter",
        "Rows of the table that had to be read.",
        lambda look: look.per_ring("misses"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_tag_errors_total",
        "counter",
        "Rows of the table whose tag was wrong where they were used; each ended its engine's "
        "request.",
        lambda look: look.per_ring("tag_errors"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_ring_full_total",
        "counter",
        "Requests for rows of the table that had to wait for a place in their ring.",
        lambda look: look.per_ring("ring_full"),
        _PER_TABLE,
    ),
    Metric(
        "tierd_failed_requests_total",
        "counter",
        "Requests that were answered with a failure, by its status.",
        _failures,
        Labels(("status",), "8"),
    ),
    Metric(
        "tierd_requests_total",
        "counter",
        "Requests that the pump answered.",
        lambda look: look.per_pump("requests"),
        _PER_PUMP,
    ),
    Metric(
        "tierd_pages_read_total",
        "counter",
        "Pages of 4 KiB that the pump read.",
        lambda look: look.per_pump("reads"),
        _PER_PUMP,
    ),
    Metric(
        "tierd_read_retries_total",
        "counter",
        "Pages that the pump had to read twice because the first reading failed or was no such "
        "page.",
        lambda look: look.per_pump("retries"),
        _PER_PUMP,
    ),
    Metric(
        "tierd_pump_cpu_seconds_total",
        "counter",
        "CPU time of the pump's thread.",
        lambda look: [
            ((str(n),), (pump["cpu_user_ns"] + pump["cpu_system_ns"]) * 1e-9)
            for n, pump in enumerate(look.pumps)
        ],
        _PER_PUMP,
    ),
    Metric(
        "tierd_reads_in_flight",
        "gauge",
        "Pages that the pump is reading now.",
        lambda look: look.per_pump("in_flight"),
        _PER_PUMP,
    ),
    Metric(
        "tierd_clients",
        "gauge",
        "Engine ranks that are attached now.",
        lambda look: _one(len(look.daemon.attach.clients)),
    ),
    Metric(
        "tierd_images",
        "gauge",
        "Images that are served.",
        lambda look: _one(len(look.daemon.plane.images)),
    ),
    Metric(
        "tierd_device_size_bytes",
        "gauge",
        "Size of the device.",
        _devices(lambda store: store.device.size),
        _PER_DEVICE,
    ),
    Metric(
        "tierd_device_free_bytes",
        "gauge",
        "Room on the device that no image takes.",
        _devices(lambda store: store.free_pages * PAGE_BYTES),
        _PER_DEVICE,
    ),
    Metric(
        "tierd_kv_pool_bytes",
        "gauge",
        "Size of the host KV pool.",
        lambda look: _one(look.daemon.attach.kv.pool_bytes),
    ),
    Metric(
        "tierd_kv_pool_free_bytes",
        "gauge",
        "Room in the host KV pool that no engine has leased.",
        lambda look: _one(look.daemon.attach.kv.free_bytes),
    ),
    Metric(
        "tierd_kv_steps_total",
        "counter",
        "Decode steps of engines with a KV lease.",
        _kv("steps"),
    ),
    Metric(
        "tierd_kv_fetched_bytes_total",
        "counter",
        "KV that was fetched from the host pool into HBM.",
        _kv("bytes"),
    ),
    Metric(
        "tierd_kv_admitted_total",
        "counter",
        "Block-head entries of KV that were admitted to working sets.",
        _kv("admitted"),
    ),
    Metric(
        "tierd_kv_evicted_total",
        "counter",
        "Block-head entries of KV that gave way to others.",
        _kv("evicted"),
    ),
    Metric(
        "tierd_kv_wrong_owner_total",
        "counter",
        "KV entries that carried another owner's header; none was used.",
        _kv("wrong_owner"),
    ),
    Metric(
        "tierd_kv_stall_seconds_total",
        "counter",
        "Time that steps waited for KV.",
        _kv("stall_ns", 1e-9),
    ),
    Metric(
        "tierd_kv_agreement_ratio",
        "gauge",
        "Share of the exact block sets that had been predicted, where engines compare.",
        _kv_agreement,
    ),
    Metric(
        "tierd_jobs",
        "gauge",
        "Jobs that are remembered, by their state.",
        _jobs,
        Labels(("state",), "5"),
    ),
    Metric(
        "tierd_events_lost_total",
        "counter",
        "Events that history could not keep.",
        lambda look: _one(look.daemon.catalog.lost),
    ),
    Metric(
        "tierd_history_degraded",
        "gauge",
        "1 while history cannot be kept, else 0.",
        lambda look: _one(bool(look.daemon.catalog.degraded)),
    ),
    Metric(
        "tierd_session_faults_total",
        "counter",
        "Sessions of engines that ended by a fault of the daemon's own.",
        lambda look: _one(look.daemon.attach.faults),
    ),
    Metric(
        "tierd_doctor_findings",
        "gauge",
        "What the examination at the start found amiss, by severity.",
        _doctor,
        Labels(("severity",), "2"),
    ),
    Metric(
        "tierd_peer_up",
        "gauge",
        "1 while tables can be read from the peer's memory, 0 while it is away.",
        _peers(lambda peer: peer.up),
        _PER_PEER,
    ),
    Metric(
        "tierd_peer_connects_total",
        "counter",
        "Times that the peer was connected; each but the first follows a break.",
        _peers(lambda peer: peer.connects),
        _PER_PEER,
    ),
    Metric(
        "tierd_exported_images",
        "gauge",
        "Images in this node's memory that peers may read.",
        lambda look: _one(len(look.daemon.exports.listing())),
    ),
    Metric(
        "tierd_export_sessions",
        "gauge",
        "Sessions of peers that read from this node's memory.",
        lambda look: _one(len(look.daemon.exports.sessions())),
    ),
    Metric(
        "tierd_api_answers_total",
        "counter",
        "Answers of the REST interface, by class of status.",
        lambda look: [((k,), float(v)) for k, v in look.app[LIMITS].answered.items()],
        Labels(("status",), "5"),
    ),
    Metric(
        "tierd_api_refused_total",
        "counter",
        "Requests, connections and readers that the REST interface turned away, by the limit that "
        "did.",
        lambda look: [((k,), float(v)) for k, v in look.app[LIMITS].refused.items()],
        Labels(("limit",), "3"),
    ),
    Metric(
        "tierd_api_streams",
        "gauge",
        "Readers of server-sent events that are there now.",
        lambda look: _one(look.app[PLACES].taken),
    ),
    Metric(
        "tierd_uptime_seconds",
        "gauge",
        "Time since the daemon's start.",
        lambda look: _one(look.daemon.identity.uptime_s),
    ),
    Metric(
        "tierd_build_info",
        "gauge",
        "Always 1; the version is in the label.",
        lambda _: [((__version__,), 1.0)],
        Labels(("version",), "1"),
    ),
)


@routes.get("/metrics", None, text=True)
async def get_metrics(call: Call) -> web.Response:
    """All numbers in Prometheus' text format."""
    daemon = call.daemon
    pumps = await daemon.counters.read()
    rings = _bounded(ring_sums(daemon.attach))
    text = render(Look(daemon, call.request.app, pumps, rings))
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


def render(look: Look) -> bytes:
    """Return the text of one scrape."""
    # Imported at the first scrape: a daemon that nobody scrapes does not pay for it.
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    class Once:
        def collect(self) -> Iterable[Any]:
            for metric in METRICS:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = kind(metric.name, metric.meaning, labels=metric.labels.names)
                for labels, value in metric.read(look):
                    family.add_metric(labels, value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry)


def _bounded(rings: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Keep the busiest tables; add the rest up."""
    ordered = sorted(rings, key=lambda name: rings[name]["lookups"], reverse=True)
    kept = {name: rings[name] for name in sorted(ordered[:TABLES_MAX])}
    for name in ordered[TABLES_MAX:]:
        kept.setdefault("other", type(rings[name])()).update(rings[name])
    return kept


_PAGE_HEAD = """\
# Metrics

Generated by `tierd reference metrics`; a test fails when it differs from the code. What to watch,
and when to be woken up: [monitoring](operating/monitoring.md). The fourth column says how many
time series a metric has at most. Counters count since the daemon's start, clients that have gone
included.

| metric | kind | labels | series | meaning |
| --- | --- | --- | --- | --- |"""


def markdown() -> str:
    """Return the reference page."""
    lines = [_PAGE_HEAD]
    for metric in METRICS:
        labels = ", ".join(f"`{name}`" for name in metric.labels.names)
        cells = (f"`{metric.name}`", metric.kind, labels, metric.labels.values, metric.meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"

"""Placement: each table on the cheapest tier whose predicted read time fits its window.

Tiers are weighed from the cheapest: disk, then disk behind the row cache, remote memory, remote
memory behind the cache, and last host DRAM, which always is in time (the GPU reads rows over PCIe
itself) and always costs memory. Tables choose in the order of their windows, the shortest first:
it has the fewest choices, and its pages are submitted first, so what it reads weighs on the others
and not the other way round.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.curves import MissCurve
from tierd.controller.load import NodeLoad, Prediction, TableLoad, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.controller.readtime import ReadTime

PAGE_BYTES = 4096
DIRECTORY_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """Where tables may go.

    Attributes:
        kind: "disk", "remote" or "dram".
        devices: models of its devices; a table is striped over all of them. Empty for dram.
        bytes_free: room for images; infinite where nobody said.
    """

    kind: str
    devices: tuple[ReadTime, ...] = ()
    bytes_free: float = float("inf")


@dataclasses.dataclass(frozen=True)
class TableNeed:
    """What one table asks of a tier.

    Attributes:
        name, layer, rows, row_bytes, pages: of the image.
        window_ms: W at the batch in question; 0 for what is read at step start.
        lookups: rows per step of one rank, distinct.
        curve: miss curve, None where nobody recorded one.
    """

    name: str
    layer: int
    rows: int
    row_bytes: int
    pages: int
    window_ms: float
    lookups: float
    curve: MissCurve | None = None

    @property
    def image_bytes(self) -> int:
        """Bytes of the table's pages."""
        return self.pages * PAGE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A cheaper choice and what speaks against it."""

    choice: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """What was chosen for a table.

    Attributes:
        table: what was to be placed.
        choice: such as "disk" or "disk + cache"; "" when nothing fits.
        cache_rows: its share of the row cache.
        refused: the cheaper choices.
        warnings: what the operator should know.
        read_ms: predicted read time with everything in its place; 0 in dram.
        stall_ms: what it then still makes a step wait.
    """

    table: TableNeed
    choice: str
    cache_rows: int
    refused: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    read_ms: float = 0.0
    stall_ms: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All tables placed, and the memory that takes.

    Attributes:
        tables: in the order of their windows.
        growth_ms: predicted growth of the step.
        host_bytes, hbm_bytes, disk_bytes, remote_bytes: memory of one node's images and one rank's
            cache.
        problem: why this plan cannot be carried out; "" when it can.
    """

    tables: tuple[Placed, ...]
    growth_ms: float
    host_bytes: int
    hbm_bytes: int
    disk_bytes: int
    remote_bytes: int
    problem: str


def place(
    tables: Sequence[TableNeed],
    tiers: Sequence[Tier],
    *,
    cache_rows: int = 0,
    allowed_ms: float = 0.05,
    resolve_ms: float = 0.005,
) -> Plan:
    """Choose a tier for every table.

    Args:
        tables: what is to be placed.
        tiers: what there is, at most one of a kind.
        cache_rows: rows of cache that one rank may use, for all tables together.
        allowed_ms: a choice that lets the step grow by no more than this is in time; what it does
            to the tables before it counts.
        resolve_ms: s.
    """
    order = sorted(tables, key=lambda table: (table.window_ms, table.layer))
    placing = _Placing(
        {tier.kind: tier for tier in tiers},
        {tier.kind: tier.bytes_free for tier in tiers},
        cache_rows,
        allowed_ms,
        resolve_ms,
    )
    placed = [placing.place(table, order[n + 1 :]) for n, table in enumerate(order)]
    return _sum_up(placed, placing.chosen, resolve_ms)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    table: TableNeed
    tier: Tier
    cache_rows: int

    @property
    def choice(self) -> str:
        return self.tier.kind + (" + cache" if self.cache_rows else "")


@dataclasses.dataclass
class _Placing:
    """What is left while one table after the other chooses."""

    tiers: dict[str, Tier]
    room: dict[str, float]
    cache_rows: int
    allowed_ms: float
    resolve_ms: float
    chosen: list[_Chosen] = dataclasses.field(default_factory=list)
    growth_ms: float = 0.0

    def place(self, table: TableNeed, waiting: Sequence[TableNeed]) -> Placed:
        """Take the cheapest choice that is in time."""
        refused: list[Refusal] = []
        for kind, cached in (("disk", 0), ("disk", 1), ("remote", 0), ("remote", 1), ("dram", 0)):
            choice = kind + (" + cache" if cached else "")
            if why := _no_room(table, kind, self.room):
                if not cached:  # said once
                    refused.append(Refusal(choice, why))
                continue
            if cached and (why := _no_cache(table, self.cache_rows)):
                refused.append(Refusal(choice, why))
                continue
            rows = _cache_share(table, waiting, self.cache_rows) if cached else 0
            trial = _Chosen(table, self.tiers[kind], rows)
            found = _predict([*self.chosen, trial], self.resolve_ms)
            added = float(found.growth_ms) - self.growth_ms
            if kind == "dram" or added <= self.allowed_ms:
                self._take(trial, float(found.growth_ms))
                return Placed(table, trial.choice, rows, tuple(refused), _warnings(table))
            refused.append(Refusal(choice, _late(table, found, added)))
        return Placed(table, "", 0, tuple(refused), _warnings(table))

    def _take(self, one: _Chosen, growth_ms: float) -> None:
        self.chosen.append(one)
        self.growth_ms = growth_ms
        self.cache_rows -= one.cache_rows
        self.room[one.tier.kind] -= one.table.image_bytes


def _warnings(table: TableNeed) -> tuple[str, ...]:
    if table.layer == 0:
        text = "layer 0 reads at step start and has no window: every miss stalls for its whole read"
        return (text + "; keep it in dram",)
    if table.window_ms <= 0:
        return ("its window is 0: every miss stalls the step for the whole read",)
    return ()


def _no_room(table: TableNeed, kind: str, room: dict[str, float]) -> str:
    if kind not in room:
        return "there is none"
    if table.image_bytes > room[kind]:
        short = _size(table.image_bytes - room[kind])
        return f"{_size(table.image_bytes)}: {short} too large"
    return ""


def _no_cache(table: TableNeed, cache_rows: int) -> str:
    if cache_rows <= 0:
        return "no cache rows are left"
    if table.curve is None:
        return "no miss curve says what a cache would hit"
    return ""


def _cache_share(table: TableNeed, waiting: Sequence[TableNeed], cache_rows: int) -> int:
    """Return what is left to one table: all of it, or half while another may want the rest."""
    wanted = any(other.curve is not None for other in waiting)
    return min(table.rows, cache_rows // 2 if wanted else cache_rows)


def _late(table: TableNeed, found: Prediction, added: float) -> str:
    read, stall = float(found.reads_ms[-1]), float(found.stalls_ms[-1])
    text = f"reads {read:.2f} ms, window {table.window_ms:.2f} ms"
    if stall > 0:
        return f"{text}: {stall:.2f} ms late"
    return f"{text}: in time itself, but it makes the tables before it {added:.2f} ms late"


def _predict(chosen: list[_Chosen], resolve_ms: float) -> Prediction:
    load, rows = _load(chosen, resolve_ms)
    return predict(load, rows)


_ALL_MISS = MissCurve.of([0.0, 1.0], [1.0, 1.0])


def _load(chosen: list[_Chosen], resolve_ms: float) -> tuple[NodeLoad, list[float]]:
    devices: list[ReadTime] = []
    first: dict[str, int] = {}
    for one in chosen:
        if one.tier.kind not in first:
            first[one.tier.kind] = len(devices)
            devices += one.tier.devices
    loads, rows = [], []
    for one in chosen:
        shares = np.zeros(len(devices))
        if one.tier.devices:
            at = first[one.tier.kind]
            shares[at : at + len(one.tier.devices)] = 1 / len(one.tier.devices)
        curve = one.table.curve if one.cache_rows and one.table.curve is not None else _ALL_MISS
        loads.append(
            TableLoad(
                one.table.name,
                one.table.window_ms,
                one.table.lookups,
                curve,
                float(one.table.pages),
                tuple(shares),
            )
        )
        rows.append(float(one.cache_rows))
    return NodeLoad(tuple(loads), tuple(devices), resolve_ms), rows


def _sum_up(placed: list[Placed], chosen: list[_Chosen], resolve_ms: float) -> Plan:
    used = dict.fromkeys(("disk", "remote", "dram"), 0)
    hbm = 0
    for one in chosen:
        used[one.tier.kind] += one.table.image_bytes
        hbm += one.cache_rows * (one.table.row_bytes + DIRECTORY_BYTES)
    growth = 0.0
    if chosen:
        found = _predict(chosen, resolve_ms)
        growth = float(found.growth_ms)
        final = {
            id(one.table): (float(found.reads_ms[n]), float(found.stalls_ms[n]))
            for n, one in enumerate(chosen)
        }
        placed = [
            dataclasses.replace(
                one, read_ms=final[id(one.table)][0], stall_ms=final[id(one.table)][1]
            )
            if id(one.table) in final
            else one
            for one in placed
        ]
    nowhere = [one.table.name for one in placed if not one.choice]
    problem = ""
    if nowhere:
        last = next(one for one in placed if not one.choice)
        why = "; ".join(f"{refusal.choice}: {refusal.why}" for refusal in last.refused)
        problem = f"no tier takes {', '.join(nowhere)} ({why})"
    return Plan(tuple(placed), growth, used["dram"], hbm, used["disk"], used["remote"], problem)


def _size(count: float) -> str:
    """Write bytes for people."""
    if not np.isfinite(count):
        return "unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

"""How an engine's tables share row caches: pure arithmetic, decided once at attach.

Tables of equal row size share a cache, which is 32-way set-associative; a table's **quota** is
the number of ways of each set that it may hold. Quotas add up to the ways, so every table can
always claim a slot of its own:

- the ways are split evenly between the groups of a cache (tables of one group are read at the
  same point of a step, so they have one claim together), and a group's ways evenly between its
  tables; what does not divide goes to the first ones;
- a cache serves at most 8 tables, so that each has a way at the least; more tables of one row size
  (Gemma has 30 and more) get several caches, which divide the rows.

Example: V4.1's layers.1.engram and layers.14.engram (264 B, two groups) have 16 ways each.
Thirty Gemma tables of one group make four caches of 8, 8, 7 and 7 tables, each table 4 or 5 ways.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.types import TableSpec

WAYS = 32
TABLES_PER_CACHE_MAX = 8


@dataclasses.dataclass(frozen=True, slots=True)
class CachePlan:
    """One row cache.

    Attributes:
        sets: sets of 32 slots.
        quotas: index of a table -> its ways; they add up to 32.
    """

    row_bytes: int
    sets: int
    quotas: dict[int, int]


def plan(tables: Sequence[TableSpec], cache_rows: int) -> list[CachePlan]:
    """Divide ``cache_rows`` slots between the tables.

    Args:
        tables: in ring order; quotas name them by index.
        cache_rows: slots for the tables of each row size together, rounded up to whole sets.
    """
    by_size: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        by_size.setdefault(table.row_bytes, []).append(index)
    plans = []
    for row_bytes, members in by_size.items():
        # Stable: groups keep their order and stay together as far as caches allow.
        members.sort(key=lambda index: tables[index].group)
        caches = math.ceil(len(members) / TABLES_PER_CACHE_MAX)
        for part in _divide(members, caches):
            rows = cache_rows * len(part) / len(members)
            sets = max(1, math.ceil(rows / WAYS))
            quotas = _quotas({index: tables[index].group for index in part})
            plans.append(CachePlan(row_bytes=row_bytes, sets=sets, quotas=quotas))
    return plans


def _quotas(group_of: dict[int, str]) -> dict[int, int]:
    """Split the ways between groups, then within each; no table gets none."""
    groups: dict[str, list[int]] = {}
    for index, group in group_of.items():
        groups.setdefault(group, []).append(index)
    quotas: dict[int, int] = {}
    for members, ways in zip(groups.values(), _shares(WAYS, len(groups)), strict=True):
        quotas.update(zip(members, _shares(ways, len(members)), strict=True))
    return dict(sorted(quotas.items()))


def _shares(total: int, parts: int) -> list[int]:
    """Split a whole number evenly; the first parts take the remainder."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _divide(members: list[int], parts: int) -> list[list[int]]:
    divided, start = [], 0
    for size in _shares(len(members), parts):
        divided.append(members[start : start + size])
        start += size
    return divided

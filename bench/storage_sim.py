"""What simulator, mutants, flipped bits and layouts show: counts, the same on every machine."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import checkpoints, layouts
from tests.daemons import make_node, running
from tests.sim import flips, mutants
from tests.sim.runner import Summary, run_many

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS, QUICK_SEEDS = 10_000, 40
JOBS = 2


def soak(*, quick: bool, summaries: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Many seeds: how many held, what did not, how rare the rarest fault was."""
    if summaries:
        found = _joined([Summary(**json.loads(path.read_text())) for path in summaries])
    else:
        found = run_many(range(QUICK_SEEDS if quick else SEEDS), JOBS)
    kinds = list(found.failed.values())
    common = {"repeats": found.run, "spread": f"one run of seeds 0 to {found.run - 1}"}

    def failed(*which: str) -> int:
        return sum(kind in which for kind in kinds)

    detail = {"run": found.run, "failed": found.failed, "seconds": found.seconds}
    shares = {kind: round(share, 4) for kind, share in found.shares.items()}
    sound = {"name": "sim_seeds", "value": found.run - len(kinds), "unit": "seeds"}
    return [
        {**sound, "detail": detail, **common},
        {"name": "sim_wrong_rows", "value": failed("wrong_row"), "unit": "seeds", **common},
        {"name": "sim_hangs", "value": failed("hang"), "unit": "seeds", **common},
        {"name": "sim_leaks", "value": failed("leak"), "unit": "seeds", **common},
        {
            "name": "rarest_fault_share",
            "value": round(min(shares.values()), 4),
            "unit": "of seeds",
            "detail": shares,
            **common,
        },
    ]


def _joined(parts: list[Summary]) -> Summary:
    """Summaries of consecutive seeds from 0 as one."""
    parts.sort(key=lambda part: part.first)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if following is not None and part.first + part.run != following.first:
            raise SystemExit(f"seeds are missing behind {part.first + part.run - 1}")
    whole = parts[0]
    for part in parts[1:]:
        run = whole.run + part.run
        shares = {
            kind: (share * whole.run + part.shares[kind] * part.run) / run
            for kind, share in whole.shares.items()
        }
        whole = dataclasses.replace(
            whole,
            run=run,
            failed={**whole.failed, **part.failed},
            shares=shares,
            seconds=whole.seconds + part.seconds,
        )
    return whole


def mutants_found(*, quick: bool) -> list[dict[str, Any]]:
    """Planted bugs: how many were found within 200 seeds, and the most that one needed."""
    names = mutants.names()[:3] if quick else mutants.names()
    needed: dict[str, int | None] = {}
    for answer in mutants.run_all(names, jobs=JOBS):
        needed[answer["name"]] = answer["seeds"]
    found = sorted(seeds for seeds in needed.values() if seeds is not None)
    median = found[len(found) // 2]
    spread = f"{len(found)} of {len(needed)} found; median {median} seeds"
    common = {"repeats": 1, "spread": spread, "detail": {"seeds": needed}}
    worst = max(found) if len(found) == len(needed) else mutants.SEEDS_MAX + 1
    return [
        {"name": "mutants_found", "value": len(found), "unit": "mutants", **common},
        {"name": "mutant_seeds_max", "value": worst, "unit": "seeds", **common},
    ]


def flips_undetected(*, quick: bool) -> list[dict[str, Any]]:
    """Every bit of every byte of a page, a root and an extent table."""
    places = flips.undetected([3] if quick else list(range(8)))
    tried = sum(number for number, _ in places.values())
    return [
        {
            "name": "flips_undetected",
            "value": sum(number for _, number in places.values()),
            "unit": "flips",
            "repeats": tried,
            "spread": "one bit of every byte" if quick else "every bit of every byte",
            "detail": {name: {"flips": a, "undetected": b} for name, (a, b) in places.items()},
        }
    ]


def layout_mismatches(*, quick: bool) -> list[dict[str, Any]]:
    """Every row of three models' tables through every split of every world, by a real daemon."""
    rows = 1009 if quick else 20_011
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as name:
        work = Path(name)
        models = {
            "v41": checkpoints.engram(work / "v41", rows=rows),
            "qwen": checkpoints.ple(work / "qwen", rows=rows + 4, dim=160, scale=0.5),
            "gemma": checkpoints.per_layer(work / "gemma", layers=2, vocab=rows // 4),
        }
        node = make_node(work, models, size=64 << 20)
        with running(node):
            served = layouts.read_every_layout(node)
            imported = layouts.read_by_importer(node)
    return [
        {
            "name": "layout_mismatches",
            "value": served.mismatches + imported.mismatches,
            "unit": "rows",
            "repeats": served.layouts,
            "spread": f"{served.rows:,} rows by clients, {imported.rows:,} by the importer",
            "detail": {"worlds": list(layouts.WORLDS), "splits": list(layouts.SPLITS)},
        }
    ]

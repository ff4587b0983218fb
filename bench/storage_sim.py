"""What the simulator shows: seeds run and what they found, planted bugs, flipped bits."""

from __future__ import annotations

from typing import Any

from bench.record import OPERATORS, bars
from tests.sim import flips, mutants
from tests.sim.runner import print_failure, print_shares, run_seeds

SEEDS, QUICK_SEEDS = 10_000, 60
JOBS = 2


def run(quick: bool) -> list[dict[str, Any]]:
    """Measure; a quick run takes few seeds, few mutants and one bit a byte."""
    return [
        *_soak(QUICK_SEEDS if quick else SEEDS),
        *_mutants(mutants.names()[:3] if quick else mutants.names()),
        _flips([3] if quick else list(range(8))),
    ]


def _soak(seeds: int) -> list[dict[str, Any]]:
    outcomes = []
    kinds: dict[str, int] = {}
    for outcome in run_seeds(range(seeds), JOBS):
        if outcome.kind:
            kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1
            print_failure(outcome)
        outcome.events = []
        outcomes.append(outcome)
    rarest = print_shares(outcomes, seeds)
    sound = seeds - sum(kinds.values())
    detail = {"run": seeds, "failed": kinds}
    spread = f"one run of {seeds} seeds"
    return [
        _found("storage.sim_seeds", sound, "seeds", seeds, spread, detail=detail),
        _found("storage.sim_wrong_rows", kinds.get("wrong_row", 0), "seeds", seeds, spread),
        _found("storage.sim_hangs", kinds.get("hang", 0), "seeds", seeds, spread),
        _found("storage.sim_leaks", kinds.get("leak", 0), "seeds", seeds, spread),
        _found("storage.rarest_fault_share", rarest, "of seeds", seeds, spread),
    ]


def _mutants(names: list[str]) -> list[dict[str, Any]]:
    needed: dict[str, int | None] = {}
    for answer in mutants.run_all(names, jobs=JOBS):
        needed[answer["name"]] = answer["seeds"]
    found = [seeds for seeds in needed.values() if seeds is not None]
    spread = f"{len(found)} of {len(needed)} found; median {sorted(found)[len(found) // 2]} seeds"
    return [
        _found("storage.mutants_found", len(found), "mutants", 1, spread, detail={"seeds": needed}),
        _found("storage.mutant_seeds_max", max(found), "seeds", 1, spread),
    ]


def _flips(bits: list[int]) -> dict[str, Any]:
    places = flips.undetected(bits)
    tried = sum(number for number, _ in places.values())
    missed = sum(number for _, number in places.values())
    detail = {name: {"flips": a, "undetected": b} for name, (a, b) in places.items()}
    return _found("storage.flips_undetected", missed, "flips", tried, "every byte", detail=detail)


def _found(
    measure: str, value: float, unit: str, repeats: int, spread: str, *, detail: Any = None
) -> dict[str, Any]:
    sign, number = bars()[measure]
    return {
        "id": measure,
        "value": value,
        "unit": unit,
        "bar": [sign, number],
        "met": bool(OPERATORS[sign](value, number)),
        "repeats": repeats,
        "spread": spread,
        "detail": detail,
    }

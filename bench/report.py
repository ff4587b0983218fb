"""`make bench-report`: every record, worst first."""

from __future__ import annotations

import json
from typing import Any

from bench.record import RESULTS


def shortfall(record: dict[str, Any]) -> float:
    """How far a value stands from its bar, as a share of the bar; above 0 is missed."""
    sign, bar = record["bar"]
    value = float(record["value"])
    if sign == "==":
        return 0.0 if value == bar else float("inf")
    gap = value - bar if sign == "<=" else bar - value
    return gap / abs(bar) if bar else gap


def main() -> None:
    """Print a table of all records."""
    records = [r for path in sorted(RESULTS.glob("*.json")) for r in json.loads(path.read_text())]
    if not records:
        print("no records yet; run: make bench")
        return
    records.sort(key=shortfall, reverse=True)
    wide = max(len(r["id"]) for r in records)
    print(f"{'measure':{wide}}  {'value':>12}  {'bar':>14}  met  date        spread")
    for r in records:
        bar = f"{r['bar'][0]} {r['bar'][1]:g}"
        met = "yes" if r["met"] else "NO "
        value = f"{r['value']:.4g}"
        print(f"{r['id']:{wide}}  {value:>12}  {bar:>14}  {met}  {r['date']}  {r['spread']}")
        if not r["met"]:
            print(f"{'':{wide}}  limit: {r['limit']}")
    missed = sum(not r["met"] for r in records)
    print(f"{len(records)} measures, {len(records) - missed} met, {missed} missed")


if __name__ == "__main__":
    main()

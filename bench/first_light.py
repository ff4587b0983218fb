"""`make bench`: the measures of first light, into bench/results/first_light.json.

Each part is a module with ``run(quick)``; ``--quick`` is a smoke run that writes nothing, ``--only
NAME`` runs one part. The fresh demo clones the checkout and installs it with empty caches.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from bench.record import record, save

PARTS = ("pump", "twin", "staging", "first_rows", "fresh_demo")
PACKAGES = ("numpy", "torch", "transformers")


def to_record(part: str, found: dict[str, Any]) -> dict[str, Any]:
    """Turn what a part measured into a record."""
    return record(
        found["id"],
        found["value"],
        unit=found["unit"],
        command=f"python -m bench.first_light --only {part}",
        repeats=found["repeats"],
        spread=found["spread"],
        detail=found.get("detail"),
        limit=found.get("limit"),
        packages=PACKAGES,
    )


def main() -> int:
    """Run the parts and save their records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smoke run; nothing is saved")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, repeatable")
    args = parser.parse_args()
    missed = 0
    for part in args.only or PARTS:
        print(f"--- {part}", flush=True)
        module = importlib.import_module(f"bench.{part}")
        records = [to_record(part, found) for found in module.run(args.quick)]
        for r in records:
            verdict = "met" if r["met"] else "MISSED"
            bar = f"{r['bar'][0]} {r['bar'][1]:g}"
            print(
                f"{r['id']:40} {r['value']:>12.4g} {r['unit']:10} {bar:>12} {verdict}", flush=True
            )
            missed += not r["met"]
        if not args.quick:
            save("first_light", records)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

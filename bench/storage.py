"""`make bench-storage`: the storage measures, into bench/results/storage.json.

    python -m bench.storage                          all parts
    python -m bench.storage --only checks restart    these
    python -m bench.storage --only soak --summary a.json b.json

``--quick`` is a smoke run that saves nothing. ``--summary`` takes what ``python -m tests.sim
--summary`` wrote for consecutive seeds, in place of running the soak's 10,000 again. ``checks``
needs root and a loop device.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.record import record, save

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = {
    "soak": "bench.storage_sim:soak",
    "mutants": "bench.storage_sim:mutants_found",
    "flips": "bench.storage_sim:flips_undetected",
    "layouts": "bench.storage_sim:layout_mismatches",
    "checks": "bench.storage_rates:verified_vs_unverified",
    "verify": "bench.storage_rates:full_verify_vs_device",
    "restart": "bench.storage_restart:restart_200gb",
}


def run_part(part: str, *, quick: bool, summaries: Sequence[Path]) -> list[dict[str, Any]]:
    """Measure one part; each of its findings becomes a record."""
    module, _, function = PARTS[part].partition(":")
    options = {"summaries": summaries} if part == "soak" else {}
    found = getattr(importlib.import_module(module), function)(quick=quick, **options)
    command = f"python -m bench.storage --only {part}"
    return [record(f"storage.{one.pop('name')}", command=command, **one) for one in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and save their records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="The storage measures.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; nothing is saved")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--summary", nargs="+", type=Path, default=[], help="of a soak")
    options = parser.parse_args(arguments)
    missed = 0
    for part in options.only:
        print(f"--- {part}", flush=True)
        records = run_part(part, quick=options.quick, summaries=options.summary)
        for one in records:
            bar = f"{one['bar'][0]} {one['bar'][1]:g}"
            verdict = "met" if one["met"] else "MISSED"
            print(
                f"{one['id']:34}{one['value']:>12.4g} {one['unit']:10} {bar:>9} {verdict:7}"
                f" {one['spread']}",
                flush=True,
            )
            missed += not one["met"]
        if not options.quick:
            save("storage", records)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

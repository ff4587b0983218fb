"""Turns the raw lines of ``python -m bench.gpu --out RAW`` into bench/results/gpu.json.

    python -m bench.gpu_records RAW --machine "NVIDIA H200, driver ..." --versions torch=2.11.0 ...

The GPU runs on a machine that is lent for minutes; its raw lines come back and are recorded here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.record import record, save


def spread(values: list[float]) -> str:
    """Two ends of a spread, in words."""
    return f"{values[0]:.2f} to {values[1]:.2f}"


def measures(stage: str, raw: dict[str, Any]) -> list[tuple[str, float, str, str]]:
    """(id, value, unit, spread) of what one stage measured."""
    name = stage.partition(":")[2]
    if name in {"hits(128)", "hits(8)"}:
        batch = name[5:-1]
        found = [(f"gpu.hit_main_us_b{batch}", raw["main_extra"], "us", spread(raw["main_spread"]))]
        if batch == "128":
            chain = ("gpu.hit_chain_us_b128", raw["chain_extra"], "us", spread(raw["chain_spread"]))
            found.append(chain)
        return found
    if name == "tag_check(300)":
        return [("gpu.tag_check_us_300_misses", raw["extra"], "us", spread(raw["spread"]))]
    if name == "replayed()":
        slot = ("gpu.directory_bytes_per_slot", raw["directory_bytes_per_slot"], "B", "a size")
        return [("gpu.replays_wrong_rows", raw["wrong"], "rows", "a count"), slot]
    if name == "stress()":
        wrong = ("gpu.stress_wrong_rows", raw["wrong"], "rows", "a count")
        return [("gpu.stress_lookups", raw["lookups"], "lookups", "a count"), wrong]
    return []


def main() -> None:
    """Read raw lines, write records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("raw", type=Path)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--versions", nargs="*", default=[])
    options = parser.parse_args()
    records = []
    for line in options.raw.read_text().splitlines():
        raw = json.loads(line)
        if "failed" in raw and isinstance(raw["failed"], str):
            continue
        for measure, value, unit, how in measures(raw["stage"], raw):
            made = record(
                measure,
                round(float(value), 3),
                unit=unit,
                command="python -m bench.gpu",
                repeats=1,
                spread=how,
                machine_name=options.machine,
            )
            made["versions"] |= dict(pair.split("=", 1) for pair in options.versions)
            records.append(made)
    print(save("gpu", records))


if __name__ == "__main__":
    main()

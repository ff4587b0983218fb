"""Turn the raw results of `python -m bench.gpu --out FILE` into records of bench/results/gpu.json.

    python -m bench.gpu_records FILE... --commit HASH --machine TEXT --torch V --triton V --date D

The GPU machine has neither the repository's history nor, as a rule, this environment, so what a
record says of them is given here.
"""  # fmt: skip

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench import record as records

PLAYED = (
    "the disk is played by a Python process that answers 40-140 us later than the model it plays"
)


def load(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """The last successful result of every stage."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            result = json.loads(line)
            if "failed" not in result or not isinstance(result["failed"], str):
                found[result["stage"].removeprefix("bench.")] = result
    return found


def pick(found: dict[str, dict[str, Any]], prefix: str) -> dict[str, Any] | None:
    return next((r for name, r in found.items() if name.startswith(prefix)), None)


def spread(pair: list[float]) -> str:
    return f"p10 {pair[0]:.2f}, p90 {pair[1]:.2f} us"


def hits(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for batch in (128, 8):
        one = pick(found, f"gpu_hits:hits({batch})")
        if one is None:
            continue
        times = {k: round(one[k], 2) for k in ("bare", "consume", "kick", "wait_fill", "gather")}
        out.append(
            {
                "measure": f"gpu.hit_main_us_b{batch}", "value": one["main_extra"], "unit": "us",
                "repeats": 300, "spread": spread(one["main_spread"]), "stage": "hits",
                "detail": {**times, "rows": one["count"]},
            }
        )  # fmt: skip
        if batch == 128:
            out.append(
                {
                    "measure": "gpu.hit_chain_us_b128", "value": one["chain_extra"], "unit": "us",
                    "repeats": 300, "spread": spread(one["chain_spread"]), "stage": "hits",
                    "detail": {"path": round(one["path"], 2), **times},
                }
            )  # fmt: skip
    tags = pick(found, "gpu_hits:tag_check")
    if tags:
        out.append(
            {
                "measure": "gpu.tag_check_us_300_misses", "value": tags["extra"], "unit": "us",
                "repeats": 200, "spread": spread(tags["spread"]), "stage": "tags",
                "detail": {k: round(tags[k], 2) for k in ("checked", "unchecked", "reset")},
            }
        )  # fmt: skip
    return out


def rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []

    def add(measure: str, value: float, unit: str, stage: str, **detail: Any) -> None:
        out.append(
            {
                "measure": measure, "value": value, "unit": unit, "repeats": 1, "spread": "exact",
                "stage": stage, "detail": detail,
            }
        )  # fmt: skip

    if one := pick(found, "gpu_rows:compared"):
        add("gpu.rows_compared", one["rows"], "rows", "rows", oracle=one["oracle"])
        add("gpu.rows_differing", one["differing"], "rows", "rows", oracle=one["oracle"])
    if one := pick(found, "gpu_rows:replayed"):
        add("gpu.replays_wrong_rows", one["wrong"], "rows", "replays", replays=one["replays"])
        slot = one["directory_bytes_per_slot"]
        add("gpu.directory_bytes_per_slot", slot, "bytes", "replays")
    if one := pick(found, "gpu_rows:stress"):
        seconds = round(one["seconds"], 1)
        add("gpu.stress_lookups", one["lookups"], "lookups", "stress", seconds=seconds)
        add("gpu.stress_wrong_rows", one["wrong"], "rows", "stress")
    if one := pick(found, "gpu_dram:dram_vs_stock"):
        detail = {k: v for k, v in one.items() if k.startswith("b") or k.endswith("pages")}
        add("gpu.dram_vs_stock_us_max", one["worst_extra"], "us", "dram", **detail)
    return out


def steps(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []

    def add(measure: str, one: dict[str, Any], value: float, unit: str, **more: Any) -> None:
        keys = ("base_us", "growth_us", "stall_us", "read_us", "hit_share", "distinct")
        detail = {k: one[k] for k in keys if k in one}
        out.append(
            {
                "measure": measure, "value": value, "unit": unit,
                "repeats": one.get("steps", 40), "spread": "mean over the steps",
                "detail": {**detail, **more.pop("detail", {})}, **more,
            }
        )  # fmt: skip

    if one := pick(found, "gpu_step:table2"):
        cases = {k: v for k, v in one.items() if isinstance(v, dict)}
        wanted = ("growth_us", "predicted_us", "excess_us", "stall_us", "read_us", "hit_share")
        detail = {name: {k: v[k] for k in wanted} for name, v in cases.items()}
        add("gpu.table2_excess_us_max", {}, one["worst"], "us", stage="table2",
            detail={"kappa_us": one["kappa_us"], **detail})  # fmt: skip
    if one := pick(found, "gpu_step:traced('agent'"):
        plain = one["uncached"]["growth_pct"]
        split = {"uncached_growth_pct": plain, "paper_uncached_growth_pct": 6.4}
        for measure, name in (
            ("gpu.l14_disk_growth_pct", "dram + one disk"),
            ("gpu.one_disk_split_growth_pct", "one"),
            ("gpu.four_disks_split_growth_pct", "four"),
        ):
            case = one[name]
            limit = (
                f"layer 1 misses {1 - case['hit_share'][0]:.0%} of 768 rows, so the model's own "
                f"read of 0.30 ms + 3.05 us a page ends after W1 = 0.30 ms; {PLAYED}"
            )
            add(measure, case, case["growth_pct"], "%", stage="traced", detail=split, limit=limit)
    if one := pick(found, "gpu_step:remote"):
        add("gpu.remote_emulated_b8_growth_pct", one, one["growth_pct"], "%", stage="remote",
            limit=f"the model's read takes 31 us, the measured one {one['read_us'][0]:.0f}: "
            "the far node is played by a Python process; a native one is wanted")  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    for name in ("commit", "machine", "torch", "triton", "date"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    found = load(options.files)
    made = []
    for given in hits(found) + rows(found) + steps(found):
        stage = given.pop("stage")
        one = records.record(
            given.pop("measure"), given.pop("value"), command=f"python -m bench.gpu {stage}",
            machine_name=options.machine, **given,
        )  # fmt: skip
        one["versions"] |= {
            "commit": options.commit,
            "torch": options.torch,
            "triton": options.triton,
            "python": "3.12",
        }
        one["date"] = options.date
        made.append(one)
    print(records.save("gpu", made))
    for one in made:
        print(one["id"], one["value"], one["bar"], "met" if one["met"] else "MISSED")


if __name__ == "__main__":
    main()

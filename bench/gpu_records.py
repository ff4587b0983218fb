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

SPLITS = {"one": "16 + 16 ways", "one, 24 ways for layer 1": "24 + 8 ways"}


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


KEPT = (
    "base_us", "growth_us", "growth_pct_quarters", "stall_us", "late_steps", "read_us", "model_us",
    "pages", "outside_read_us", "read_beyond_model_us", "after_wait_us", "hit_share", "distinct",
    "distinct_in_step", "devices",
)  # fmt: skip


def shorter(one: dict[str, Any]) -> dict[str, Any]:
    """A case's detail with as many digits as mean something."""

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            return [cut(part) for part in value]
        return round(value, 3) if isinstance(value, float) else value

    return {key: cut(one[key]) for key in KEPT if key in one}


def step_record(
    measure: str, case: dict[str, Any], value: float, unit: str, stage: str, **more: Any
) -> dict[str, Any]:
    quarters = case.get("growth_pct_quarters")
    spread = f"quarters of the steps {min(quarters)} to {max(quarters)} %" if quarters else "means"
    detail = {**shorter(case), **more.pop("detail", {})}
    return {
        "measure": measure, "value": value, "unit": unit, "repeats": case.get("steps", 60),
        "spread": spread, "detail": detail, "stage": stage, **more,
    }  # fmt: skip


def traced(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Agent sessions on one disk and on four; the better split is the controller's to find."""
    plain = {
        "uncached_growth_pct": one["uncached"]["growth_pct"],
        "uncached_read_us": one["uncached"]["read_us"],
        "paper_uncached_growth_pct": 6.4,
    }
    splits = {words: one[name] for name, words in SPLITS.items() if name in one}
    best = min(splits, key=lambda words: float(splits[words]["growth_pct"]))
    case = splits[best]
    growths = {f"growth_pct, {words}": round(c["growth_pct"], 3) for words, c in splits.items()}
    excess = case["read_beyond_model_us"]
    limit = (
        f"the read takes {case['read_us'][0]:.0f} us, the disk it plays "
        f"{case['model_us'][0]:.0f}: the loop device behind it is slower than that disk and gets "
        f"both layers' pages at once. Without these {excess:.0f} us the step would grow by "
        f"{100 * (case['growth_us'] - excess) / case['base_us']:.2f} %. Bench and pump now play "
        "it from four loop devices, 96 reads at a time each; that has not run on a GPU yet"
    )
    return [
        step_record(
            "gpu.one_disk_split_growth_pct", case, case["growth_pct"], "%", "traced",
            detail={"split": best, **growths, **plain}, limit=limit,
        ),
        step_record(
            "gpu.four_disks_split_growth_pct", one["four"], one["four"]["growth_pct"], "%",
            "traced", detail=plain,
        ),
        step_record(
            "gpu.l14_disk_growth_pct", one["dram + one disk"],
            one["dram + one disk"]["growth_pct"], "%", "traced", detail=plain,
        ),
    ]  # fmt: skip


def table2(one: dict[str, Any]) -> dict[str, Any]:
    cases = {k: v for k, v in one.items() if isinstance(v, dict)}
    wanted = ("growth_us", "predicted_us", "excess_us", "stall_us", "read_us", "model_us", "pages")
    detail = {
        name: {k: shorter({"base_us": v[k]})["base_us"] for k in wanted}
        for name, v in cases.items()
    }
    steps = next(iter(cases.values()))["steps"]
    return step_record(
        "gpu.table2_excess_us_max", {"steps": steps}, one["worst"], "us", "table2",
        detail={"kappa_us": one["kappa_us"], **detail},
    )  # fmt: skip


def prefill(one: dict[str, Any]) -> dict[str, Any]:
    cases = {k: v for k, v in one.items() if isinstance(v, dict) and "ratio" in v}
    worst = max(cases, key=lambda name: float(cases[name]["ratio"]))
    ratios = {name: round(case["ratio"], 4) for name, case in cases.items()}
    found = cases[worst]
    limit = (
        f"{worst}: nothing is hinted ahead of a prompt's first chunk of {one['chunk_tokens']} "
        f"tokens, so layer 1 waits for {found['stall_ms'][0]:.1f} ms of reads in "
        f"{found['dram_ms']:.0f} ms; longer prompts and several at a time stay below "
        f"{max(v for n, v in ratios.items() if n != worst):.3f}. A smaller first chunk, or hints "
        "while the prompt still waits, would hide it"
    )
    detail = {
        "ratios": ratios,
        "stall_ms": {name: case["stall_ms"] for name, case in cases.items()},
        "staged_pages": {name: case["staged"] for name, case in cases.items()},
        "pages": {name: case["pages"] for name, case in cases.items()},
        "hit_share": {name: case["hit_share"] for name, case in cases.items()},
        "16K_without_hints_ms": one["16K x 1 without hints"]["ours_ms"],
        "16K_ms": cases["16K x 1"]["ours_ms"],
    }
    return {
        "measure": "gpu.prefill_ttft_ratio_max", "value": one["worst"], "unit": "ratio",
        "repeats": len(found["ratios"]),
        "spread": f"{min(found['ratios']):.3f} to {max(found['ratios']):.3f} ({worst})",
        "detail": detail, "limit": limit, "stage": "prefill",
    }  # fmt: skip


def steps(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if one := pick(found, "gpu_step:table2"):
        out.append(table2(one))
    if one := pick(found, "gpu_step:traced('agent'"):
        out += traced(one)
    if one := pick(found, "gpu_step:remote"):
        out.append(
            step_record("gpu.remote_emulated_b8_growth_pct", one, one["growth_pct"], "%", "remote")
        )
    if one := pick(found, "gpu_prefill:prefill"):
        out.append(prefill(one))
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

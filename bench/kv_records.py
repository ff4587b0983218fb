"""Turn raw results of `python -m bench.kv_gpu --out FILE` into records of bench/results/kv.json.

    python -m bench.kv_records FILE... --commit HASH --machine TEXT --torch V --triton V --date D

The GPU machine has neither the repository's history nor, as a rule, this environment, so what a
record says of them is given here.
"""  # fmt: skip

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench import record as records

CAP = "0.05"
Made = list[dict[str, Any]]


def load(paths: list[Path]) -> dict[str, Any]:
    """The last successful result of every stage, parts of a stage together."""
    found: dict[str, Any] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            result = json.loads(line)
            if "failed" not in result:
                found.setdefault(result["stage"], {}).update(result)
    return found


def row(rows: Made, share: float, method: str) -> dict[str, Any]:
    return next(r for r in rows if abs(r["share"] - share) < 1e-9 and r["method"] == method)


def growth_pct(one: dict[str, Any]) -> float:
    return 100 * (one["loss_sparse"] / one["loss_full"] - 1)


def models(found: dict[str, Any]) -> Made:
    """Recall on the kept model; agreement and loss on both."""
    one = found["model"]
    small, text = one["small records"], one["small text"]
    recall = row(small, 1 / 16, "lookup")
    by_method = {m: row(small, 1 / 16, m)["recall_sparse"] for m in ("true", "lookup", "previous")}
    made: Made = [
        {
            "measure": "kv.recall_full_pct", "value": recall["recall_full"], "unit": "%",
            "detail": {"model": "kept, 1.86 M", "context": 4096, "questions": 24 * 32},
        },
        {
            "measure": "kv.recall_loss_points",
            "value": recall["recall_full"] - recall["recall_sparse"], "unit": "points",
            "detail": {"draft": "prompt lookup", "by_draft_pct": by_method, "budget": "1/16"},
        },
    ]  # fmt: skip
    growth = {
        f"{name}, {method} draft": round(growth_pct(row(rows, 1 / 8, method)), 2)
        for name, rows in (("kept", text), ("24 M", one.get("medium text", [])))
        for method in ("true", "lookup", "previous")
        if rows
    }
    made.append(
        {
            "measure": "kv.lm_loss_growth_eighth_pct",
            "value": max(v for k, v in growth.items() if "lookup" in k), "unit": "%",
            "detail": {"by_model_and_draft": growth, "value_is": "the worse model, prompt lookup"},
        }
    )  # fmt: skip
    if "medium records" in one:
        made += agreements(one)
    return made


def agreements(one: dict[str, Any]) -> Made:
    rows = one["medium records"]
    true, quarter = row(rows, 1 / 16, "true"), row(rows, 1 / 4, "true")
    lookup, previous = row(rows, 1 / 16, "lookup"), row(rows, 1 / 16, "previous")
    text = {
        f"{r['method']} 1/{round(1 / r['share'])}": round(100 * r["agreement_mean"], 2)
        for r in one.get("medium text", [])
    }
    limit = "a run of a few minutes; longer training moves it by about a point"
    note = {"note": one["medium_note"]} if "medium_note" in one else {}
    return [
        {
            "measure": "kv.agreement_true_draft_pct", "value": 100 * true["agreement_mean"],
            "unit": "%", "limit": limit,
            "detail": {
                "layers": true["agreement"], "union_over_heads": true["union_mean"],
                "new_of_k": true["new_mean"], "text_alone": text, **note,
            },
        },
        {
            "measure": "kv.agreement_true_draft_quarter_pct",
            "value": 100 * quarter["agreement_mean"], "unit": "%", "limit": limit,
            "detail": {"layers": quarter["agreement"], **note},
        },
        {
            "measure": "kv.draft_over_previous_query_points",
            "value": 100 * (lookup["agreement_mean"] - previous["agreement_mean"]),
            "unit": "points",
            "detail": {
                "draft": "prompt lookup, else the previous query",
                "acceptance": lookup["acceptance"], "drafted": lookup["drafted"],
                "agreement_accepted": lookup["agreement_accepted_mean"],
                "agreement_rejected": lookup["agreement_rejected_mean"],
                "previous_query": previous["agreement_mean"], **note,
            },
        },
    ]  # fmt: skip


def decodes(found: dict[str, Any], limits: dict[str, str]) -> Made:
    one = found["decode"]
    ours = one["caps"][CAP]
    made: Made = []
    for card in ("80", "141"):
        dense = one["dense_rows"][card] / one[f"dense_{card}_ms"] * 1e3
        made.append(
            {
                "measure": f"kv.decode_ratio_{card}gb", "value": ours["tokens_s"] / dense,
                "unit": "x", "repeats": 14,
                "spread": f"ours {ours['spread'][0]:.1f} to {ours['spread'][1]:.1f} ms a step",
                "limit": limits.get("decode"),
                "detail": {
                    "dense_batch": one["dense_rows"][card], "dense_tokens_s": dense,
                    "dense_ms": one[f"dense_{card}_ms"], "our_batch": one["sparse_rows"],
                    "our_tokens_s": ours["tokens_s"], "our_ms": ours["ms"],
                    "background_off_ms": one["off_ms"], "host_gib": one["host_gib"],
                    "link_gb_s": one["link_gb_s"], "caps": one["caps"],
                    "previous_query": one.get("previous"), "on_demand": one.get("demand"),
                    "form": "a step in one graph", "in_pieces": one.get("pieces"),
                },
            }
        )  # fmt: skip
    made.append(
        {
            "measure": "kv.dense_hbm_share", "value": one["dense_hbm_share"], "unit": "share",
            "detail": {"copy_tb_s": one["copy_tb_s"], "kv_bytes": one["dense_kv_bytes"]},
        }
    )  # fmt: skip
    made.append(
        {
            "measure": "kv.bytes_over_cap", "unit": "bytes",
            "value": sum(cap["bytes_over_cap"] for cap in one["caps"].values()),
            "detail": {cap: v["gb_step"] for cap, v in one["caps"].items()},
        }
    )  # fmt: skip
    parts = [one, one.get("previous", {}), one.get("demand", {})]
    parts += [part for part in found.get("small", {}).values() if isinstance(part, dict)]
    wrong = sum(part.get("wrong_entries", 0) for part in parts)
    wrong += sum(cap["wrong_owner"] for cap in one["caps"].values())
    made.append({"measure": "kv.wrong_owner", "value": wrong, "unit": "entries"})
    return made


def small(found: dict[str, Any], limits: dict[str, str]) -> Made:
    one = found["small"]
    detail = {name: part for name, part in one.items() if isinstance(part, dict)}
    return [
        {
            "measure": "kv.background_cost_pct_small_batch", "value": one["one_graph"]["cost_pct"],
            "unit": "%", "repeats": 40, "limit": limits.get("small"),
            "spread": "medians, on and off in turn", "detail": detail,
        }
    ]  # fmt: skip


def scans(found: dict[str, Any]) -> Made:
    one = found["scan"]
    detail = {name: one[name] for name in ("score_us", "select_us", "summary_bytes")}
    return [
        {
            "measure": "kv.scan_select_us", "value": one["scan_select_us"], "unit": "us",
            "repeats": 12, "spread": "median", "detail": detail,
        }
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    for name in ("commit", "machine", "torch", "triton", "date"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--limit", action="append", default=[], help="STAGE=what stands in the way")
    options = parser.parse_args()
    found = load(options.files)
    limits = dict(text.split("=", 1) for text in options.limit)
    stages: dict[str, Made] = {}
    if "model" in found:
        stages["model"] = models(found)
    if "decode" in found:
        stages["decode"] = decodes(found, limits)
    if "small" in found:
        stages["small"] = small(found, limits)
    if "scan" in found:
        stages["scan"] = scans(found)
    made = []
    for stage, given in stages.items():
        for each in given:
            one = records.record(
                each.pop("measure"), each.pop("value"), command=f"python -m bench.kv_gpu {stage}",
                machine_name=options.machine, repeats=each.pop("repeats", 1),
                spread=each.pop("spread", "one run"), **each,
            )  # fmt: skip
            one["versions"] |= {
                "commit": options.commit, "torch": options.torch, "triton": options.triton,
                "python": "3.12",
            }  # fmt: skip
            one["date"] = options.date
            made.append(one)
    print(records.save("kv", made))
    for one in made:
        print(one["id"], one["value"], one["bar"], "met" if one["met"] else "MISSED")


if __name__ == "__main__":
    main()

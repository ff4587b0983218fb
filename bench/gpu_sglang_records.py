r"""Turn the line of `python -m bench.gpu_sglang --out FILE` into records of sglang.json.

python -m bench.gpu_sglang_records FILE --release 0.5.23 \
    --commit HASH --machine TEXT --torch V --triton V --date D
"""  # fmt: skip

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench import record as records

COMMAND = "TIERD_SGLANG_KERNELS=DIR python -m bench.gpu_sglang"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    for name in ("commit", "machine", "torch", "triton", "date"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--release", default="0.5.23", help="of the kernels it was held against")
    options = parser.parse_args()
    found = json.loads(options.file.read_text())
    assert not found["rehearsal"], "a rehearsal times nothing"
    dram, served = found["dram"], found["served"]
    low, high = dram["extra_spread"]

    def record(measure: str, value: float, unit: str, spread: str, **more: Any) -> dict[str, Any]:
        return records.record(
            measure, value, unit=unit, command=COMMAND, repeats=more.pop("repeats", 1),
            spread=spread, machine_name=options.machine, **more,
        )  # fmt: skip

    checked = dram["rows"] + served["rows"]
    wrong = dram["differing"] + served["differing"]
    detail = {key: dram[key] for key in ("ours_us", "stock_us", "unsorted_us", "hash_us", "gib")}
    made = [
        record(
            "sglang.gpu_rows_checked", checked, "rows",
            f"{served['rows']} from a pump through the cache, {dram['rows']} on the dram tier, "
            f"against engram_gather of {options.release} in the same graph",
            detail={"stats": served["stats"]},
        ),
        record("sglang.gpu_rows_differing", wrong, "rows", f"of {checked}"),
        record(
            "sglang.gpu_step_vs_stock_us", round(dram["extra_us"], 2), "us",
            f"p10 {low:.2f}, p90 {high:.2f} us; hash and both layers, B={found['batch']}, "
            "new ids every step",
            repeats=60, detail=detail,
            limit="the gather checks a tag of every row, which the stock one does not",
        ),
    ]  # fmt: skip
    for one in made:
        one["date"] = options.date
        one["versions"] = {
            "python": "3.12", "commit": options.commit, "tierd": "not installed",
            "torch": options.torch, "triton": options.triton, "sglang": options.release,
        }  # fmt: skip
    records.save("sglang", made)
    for one in made:
        print(f"{one['id']}: {one['value']} {one['unit']} ({one['spread']})")


if __name__ == "__main__":
    main()

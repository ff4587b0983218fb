"""Transformers on one GPU: a model whose table lies in HBM against the same one served by tierd.

    python -m bench.gpu_hf --models DIR [--out FILE]     prints one raw line of JSON

The tables of ``q4`` and of a tiny Gemma 4, made here, are staged on a loop device behind a running
daemon. Greedy tokens of both models are compared, and one decode step's lookup, warm, captured in
a CUDA graph: the table's module as the model calls it, with 8 sequences. Where the whole forward
of a model can be captured with a static cache, it is, and its tokens are compared as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu_vllm import Daemon, loop_device, machine, stage

MODELS = {"q4": 2, "gemma4": 4}  # and their tables
PROMPTS, TOKENS, BATCH = 24, 24, 8
REPEATS, CHAIN = 200, 20
STEPS = 24


def make_gemma(folder: Path) -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    from bench.vllm_on_gpu.checkpoints import TOKENS as SPECIAL
    from bench.vllm_on_gpu.checkpoints import spread

    config = Gemma4TextConfig(
        vocab_size=512, vocab_size_per_layer_input=512, hidden_size=256,
        hidden_size_per_layer_input=64, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, global_head_dim=64,
        sliding_window=64, num_kv_shared_layers=0,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], max_position_embeddings=4096,
        initializer_range=0.1, tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip
    model = Gemma4ForCausalLM(config)
    spread(model, 5, "embed_tokens_per_layer")
    model.to(torch.bfloat16).save_pretrained(folder)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # Grouped products want sizes that this model has not, and the stock loop fits no graph.
    experts = {"experts_implementation": "batched_mm"} if folder.name == "q4" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **experts)
    return model.to("cuda:0").eval()


def tokens_of(model: Any) -> list[list[int]]:
    """Greedy tokens of random prompts, one at a time."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(PROMPTS):
        length = int(torch.randint(4, 60, (1,), generator=generator))
        ids = torch.randint(3, 512, (1, length), generator=generator).to("cuda:0")
        out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        made.append(out[0, length:].tolist())
    return made


def table_of(model: Any) -> tuple[torch.nn.Module, int, int]:
    """(the module that holds a table, its rows, row numbers a token reads)."""
    for name, module in model.named_modules():
        if name.endswith("ple_embedding.ngram_embedding"):
            return module, 8216, 8
        if name.endswith("embed_tokens_per_layer"):
            return module, 512, 1
    raise SystemExit("the model has no table")


class Lookup:
    """One step's lookup of every table of a model, captured; new ids are written in place."""

    def __init__(self, model: Any) -> None:
        self.modules = []
        for name, module in model.named_modules():
            if name.endswith(("ple_embedding.ngram_embedding", "embed_tokens_per_layer")):
                self.modules.append(module)
        _, self.rows, columns = table_of(model)
        self.ids = torch.zeros(BATCH, 1, columns, dtype=torch.int64, device="cuda:0")
        if columns == 1:
            self.ids = self.ids[..., 0]
        self.refresh()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            for _ in range(CHAIN):
                self.outputs = self.step()

    def refresh(self) -> None:
        self.ids.random_(0, 512)  # rows that the cache holds after a while

    def step(self) -> list[torch.Tensor]:
        return [module(self.ids) for module in self.modules]

    def replay_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / CHAIN


def lookups(stock: Any, served: Any) -> dict[str, Any]:
    """Both lookups in turn, on the same ids; their rows compared."""
    mine, theirs = Lookup(served), Lookup(stock)
    for warm in range(512):
        numbers = torch.arange(mine.ids.numel(), device="cuda:0") + warm
        mine.ids.copy_(numbers.view_as(mine.ids) % 512)
        mine.graph.replay()
    times: dict[str, list[float]] = {"served": [], "stock": []}
    differing = 0
    for _ in range(REPEATS):
        mine.refresh()
        theirs.ids.copy_(mine.ids)
        times["served"].append(mine.replay_us())
        times["stock"].append(theirs.replay_us())
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            differing += int((a.view(torch.int16) != b.view(torch.int16)).any(dim=-1).sum())
    extra = [a - b for a, b in zip(times["served"], times["stock"], strict=True)]
    return {
        "tables": len(mine.modules),
        "extra_us": statistics.median(extra),
        "extra_quartiles": statistics.quantiles(extra, n=4),
        "served_us": statistics.median(times["served"]),
        "stock_us": statistics.median(times["stock"]),
        "rows_differing": differing,
    }


def captured(model: Any) -> list[int]:
    """Tokens of a decode whose whole step, static cache and all, is one graph.

    Raises:
        Exception: whatever this model does in a step that no graph can hold.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=128)
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(3, 512, (1, 24), generator=generator).to("cuda:0")
    token = torch.zeros(1, 1, dtype=torch.int64, device="cuda:0")
    position = torch.zeros(1, 1, dtype=torch.int64, device="cuda:0")

    def step() -> None:
        out = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True)
        token.copy_(out.logits[:, -1:].argmax(-1))
        position.add_(1)

    with torch.no_grad():
        out = model(input_ids=prompt, past_key_values=cache, use_cache=True)
        token.copy_(out.logits[:, -1:].argmax(-1))
        position.fill_(prompt.shape[1])
        made = [int(token)]
        for _ in range(2):
            step()
            made.append(int(token))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(STEPS):
            graph.replay()
            made.append(int(token))
    return made


def compare(stock: Any, served: Any) -> dict[str, Any]:
    right, made = tokens_of(stock), tokens_of(served)
    found: dict[str, Any] = {
        "prompts": len(made),
        "tokens_differing": sum(
            a != b for x, y in zip(made, right, strict=True) for a, b in zip(x, y, strict=True)
        ),
        "distinct": len({token for one in right for token in one}),
        "lookup": lookups(stock, served),
    }
    try:
        pair = [captured(model) for model in (stock, served)]
        found["captured"] = {
            "tokens": len(pair[0]),
            "tokens_differing": sum(a != b for a, b in zip(*pair, strict=True)),
        }
    except Exception as error:  # noqa: BLE001 - what a model may raise
        found["captured"] = f"{type(error).__name__}: {error}"[:300]
    return found


def play(asked: argparse.Namespace, directory: Path) -> dict[str, Any]:
    import tierd.hook

    began = time.monotonic()
    if "gemma4" in asked.only:
        make_gemma(asked.models / "gemma4")
    names = asked.only
    stock = {name: load(asked.models / name) for name in names}
    image = directory / "device.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    found: dict[str, Any] = {"machine": machine()}
    with contextlib.ExitStack() as stack:
        device, found["device"] = stack.enter_context(loop_device(image))
        stage(device, asked.models, names)
        daemon = Daemon(directory, device, os.sched_getaffinity(0))
        stack.callback(daemon.kill)
        daemon.wait(images=sum(MODELS[name] for name in names))
        tierd.hook.activate("transformers", socket=str(daemon.socket))
        for name in names:
            try:
                served = load(asked.models / name)
                found[name] = compare(stock[name], served)
            except Exception as error:  # noqa: BLE001 - what a model may raise
                found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            print(name, found[name], round(time.monotonic() - began, 1), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_hf")
    parser.add_argument("--models", type=Path, required=True, help="by vllm_on_gpu.checkpoints")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TIERD_WAIT_S", "60")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        line = json.dumps(play(asked, Path(name)))
    print(line)
    if asked.out:
        asked.out.write_text(line + "\n")


if __name__ == "__main__":
    main()

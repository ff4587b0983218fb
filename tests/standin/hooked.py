"""The hooked side of test_transformers.py, in one process, since starting the engine takes seconds:

    tierd run -- python -m tests.standin.hooked CHECKPOINTS SCRATCH > found.json

CHECKPOINTS is a directory of the checkpoints of models.py, SCRATCH one for changed copies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from tests.oracle import INDEX, Shards, per_layer_bits, ple_bits
from tests.standin import models, scenarios
from tierd import hook
from tierd.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AutoModel = transformers.AutoModelForCausalLM
found: dict[str, Any] = {}


def refused(name: str, call: Callable[[], Any]) -> None:
    """Note the refusal of a call; anything else is noted as what it is."""
    try:
        call()
    except HookError as error:
        found[name] = str(error)
    except Exception as error:  # noqa: BLE001 - the test shows it
        found[name] = f"{type(error).__name__}: {error}"
    else:
        found[name] = "not refused"


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def tables_are_gone(checkpoints: Path) -> None:
    """Nothing of a table is in a model: not a parameter, not a key, not a row."""
    for name, module in {
        "qwen4_exp": "model.layers.2.ple.ple_embedding.ngram_embedding",
        "gemma4": "model.embed_tokens_per_layer",
    }.items():
        model = AutoModel.from_pretrained(checkpoints / name)
        stand_in = model.get_submodule(module)
        found[f"{name} rows in memory"] = stand_in.weight.shape[0]
        found[f"{name} keys"] = [key for key in model.state_dict() if key.startswith(module)]
        found[f"{name} class"] = type(model).__name__


def rows_equal_the_oracle(checkpoints: Path) -> None:
    """Every row of every table, through the module that the model calls."""
    wrong = 0
    shards = Shards(checkpoints / "qwen4_exp")
    model = AutoModel.from_pretrained(checkpoints / "qwen4_exp")
    for layer in (0, 2):
        expected = ple_bits(shards, layer)
        ids = torch.arange(len(expected)).view(2, -1)
        served = model.model.layers[layer].ple.ple_embedding.ngram_embedding(ids)
        wrong += int((bits(served).reshape(expected.shape) != expected).sum())
    shards = Shards(checkpoints / "gemma3n")
    model = AutoModel.from_pretrained(checkpoints / "gemma3n")
    module = model.model.embed_tokens_per_layer
    module.embed_scale.fill_(1.0)
    served = bits(module(torch.arange(512)))
    for layer in range(4):
        columns = slice(24 * layer, 24 * layer + 24)
        wrong += int((served[:, columns] != per_layer_bits(shards, layer, 24)).sum())
    found["values that differ from the oracle"] = wrong


def casts_are_done_one_by_one(checkpoints: Path) -> None:
    """A stock table that was cast to fp16 and then to fp32 has lost bits on the way."""
    model = AutoModel.from_pretrained(checkpoints / "gemma3n").to(torch.float16).float()
    module = model.model.embed_tokens_per_layer
    module.embed_scale.fill_(1.0)
    served = module(torch.tensor([models.SMALL_ROW]))[0, :24]
    stored = per_layer_bits(Shards(checkpoints / "gemma3n"), 0, 24)[models.SMALL_ROW]
    exact = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
    found["cast at once"] = bool((served == exact.float()).all())
    found["cast one by one"] = bool((served == exact.to(torch.float16).float()).all())


def copies_are_cast_alone(checkpoints: Path) -> None:
    """What is done to a copy of a model does not round the rows of the original."""
    model = AutoModel.from_pretrained(checkpoints / "gemma3n")
    row = torch.tensor([models.SMALL_ROW])
    before = model.model.embed_tokens_per_layer(row)
    copied = copy.deepcopy(model).to(torch.float16).to(torch.bfloat16)
    found["original kept"] = torch.equal(model.model.embed_tokens_per_layer(row), before)
    found["copy cast"] = not torch.equal(copied.model.embed_tokens_per_layer(row), before)


def bits(values: torch.Tensor) -> np.ndarray:
    assert values.dtype == torch.bfloat16
    return values.view(torch.int16).numpy().view(np.uint16)


def kicks_are_used(checkpoints: Path) -> None:
    """Every gather meets its kick, in prefill with padding and in decode."""
    model = AutoModel.from_pretrained(checkpoints / "qwen4_exp")
    scenarios.demo_generate.generate_with(model, vocabulary=512)
    stand_in = model.model.layers[0].ple.ple_embedding.ngram_embedding.tierd
    (table,) = stand_in._tables
    found["counters"] = table.stats()


def threads_share_a_model(checkpoints: Path) -> None:
    """While one thread kicks, another one's lookup is not taken for a kick."""
    model = AutoModel.from_pretrained(checkpoints / "qwen4_exp")
    module = model.model.layers[0].ple.ple_embedding.ngram_embedding
    stand_in, kick = module.tierd, module.tierd.kick
    kicking, go_on = threading.Event(), threading.Event()

    def held_kick(ids: torch.Tensor, like: torch.Tensor) -> None:
        del stand_in.kick  # the next kick is an ordinary one
        kicking.set()
        go_on.wait(20)
        kick(ids, like)

    prompt = torch.randint(3, 512, (1, 12), generator=seeded(1))
    ids = torch.randint(0, 8000, (5, 8), generator=seeded(2))
    alone = [model(prompt).logits, module(ids)]
    stand_in.kick = held_kick
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: model(prompt).logits)
        kicking.wait(20)
        mine = module(ids)
        go_on.set()
        together = [other.result(), mine]
    found["threads"] = all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def refusals(checkpoints: Path, scratch: Path) -> None:
    gemma = checkpoints / "gemma4"
    config = transformers.AutoConfig.from_pretrained(gemma)
    refused("from config", lambda: AutoModel.from_config(config))
    refused("disable_mmap", lambda: AutoModel.from_pretrained(gemma, disable_mmap=True))
    with environment("TIERD_MODEL", "gemma3n"):
        refused("other model", lambda: AutoModel.from_pretrained(gemma))
    with environment("TIERD_MODEL", "gemma4"):
        given = {"model.embed_tokens_per_layer.weight": torch.zeros(512, 96)}
        gemma_class = transformers.Gemma4ForCausalLM
        load = functools.partial(gemma_class.from_pretrained, None, config=config)
        refused("state_dict", lambda: load(state_dict=given))
    with environment("TIERD_CACHE_ROWS", "many"):
        refused("cache rows", lambda: AutoModel.from_pretrained(gemma))
    refused("changed", lambda: AutoModel.from_pretrained(changed(gemma, scratch / "changed")))
    qwen = changed(checkpoints / "qwen4_exp", scratch / "qwen-not-staged")
    with environment("TIERD_MODEL", "v41"):
        refused("not staged", lambda: AutoModel.from_pretrained(qwen))
    refused("variant", lambda: AutoModel.from_pretrained(variant(gemma, scratch), variant="b"))

    model = AutoModel.from_pretrained(gemma)
    ids = torch.arange(3, 9).view(1, -1)
    refused("save", lambda: model.save_pretrained(scratch / "saved"))
    refused("resize", lambda: model.resize_token_embeddings(600))
    refused("training", lambda: model.train()(ids))
    model.eval()
    refused("fork", lambda: in_child(lambda: model(ids)))
    found["copied"] = scenarios.logits(copy.deepcopy(model)) == scenarios.logits(model)

    with environment("TIERD_MODEL", "gemma4"):
        named = AutoModel.from_config(config).eval()
        table = named.model.embed_tokens_per_layer
        found["named"] = bool((table(ids) == model.model.embed_tokens_per_layer(ids)).all())
    with environment("TIERD_MODEL", "wide"):
        refused("named but other", lambda: AutoModel.from_config(config).eval()(ids))
    refused("engine", lambda: hook.activate("tgi"))


def changed(checkpoint: Path, target: Path) -> Path:
    """Copy a checkpoint and change one byte of its first table."""
    shutil.copytree(checkpoint, target)
    index = json.loads((target / INDEX).read_text())["weight_map"]
    name = next(n for n in index if "ngram_embedding.shard_0" in n or "per_layer.weight" in n)
    path = target / index[name]
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    data[start + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    return target


def variant(checkpoint: Path, scratch: Path) -> Path:
    """Copy a checkpoint and give it a second set of shards, in the place of a variant."""
    target = scratch / "variant"
    shutil.copytree(checkpoint, target)
    index = json.loads((target / INDEX).read_text())
    for key, file in index["weight_map"].items():
        index["weight_map"][key] = file.replace("model-", "model.b-")
    for file in checkpoint.glob("model-*.safetensors"):
        shutil.copy(file, target / file.name.replace("model-", "model.b-"))
    (target / "model.safetensors.index.b.json").write_text(json.dumps(index))
    return target


def in_child(call: Callable[[], Any]) -> None:
    """Make a call in a forked child and raise what it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os.write(writer, b"done")
        except HookError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = os.read(reader, 4096).decode()
    os.waitpid(pid, 0)
    raise HookError(text)


def main(checkpoints: Path, scratch: Path) -> None:
    for name in models.FAMILIES:
        found[name] = scenarios.outcomes(checkpoints / name)
    with environment("TIERD_CACHE_ROWS", "256"):
        found["wide"] = scenarios.load_peak_bytes(checkpoints / "wide")
    with torch.no_grad():
        tables_are_gone(checkpoints)
        rows_equal_the_oracle(checkpoints)
        casts_are_done_one_by_one(checkpoints)
        copies_are_cast_alone(checkpoints)
        kicks_are_used(checkpoints)
    threads_share_a_model(checkpoints)
    refusals(checkpoints, scratch)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The transformers hook against the stock engine: same checkpoints, same prompts, same bits.

One hooked process, under ``tierd run``, does everything that needs the hook (standin/hooked.py)
while this process does the same without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from tests.daemons import ROOT, Node, running
from tests.standin import models, scenarios

if TYPE_CHECKING:
    from pathlib import Path

HOOKED_TIMEOUT_S = 240
pytestmark = pytest.mark.timeout(300)


class Hooked:
    """The hooked process; it starts at once and is waited for when its findings are wanted."""

    def __init__(self, node: Node, scratch: Path) -> None:
        self.node = node
        checkpoints = models.checkpoints()["gemma4"].parent
        module = [sys.executable, "-m", "tests.standin.hooked", checkpoints, scratch]
        run = [sys.executable, "-m", "tierd.cli", "run", "--socket", node.engine_socket, "--"]
        self._process = subprocess.Popen(
            list(map(str, [*run, *module])),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._found: dict[str, Any] | None = None
        self.stderr = ""

    @property
    def found(self) -> dict[str, Any]:
        if self._found is None:
            if self._process.returncode is not None:
                pytest.fail("the hooked process failed, as the first test shows")
            output, self.stderr = self._process.communicate(timeout=HOOKED_TIMEOUT_S)
            assert self._process.returncode == 0, self.stderr[-3000:]
            self._found = json.loads(output)
        return self._found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("hooked")
    node = models.staged(directory)
    with running(node):
        process = Hooked(node, directory)
        yield process
        process.close()


@pytest.fixture(scope="module")
def stock(hooked: Hooked) -> dict[str, Any]:
    """The same without tierd, in this process, while the hooked one is at work."""
    model_class = transformers.Qwen4ExpForCausalLM
    stock_module = sys.modules[model_class.__module__].Qwen4ExpTextNGramEmbedding.__module__
    assert stock_module == model_class.__module__, "this process must not be hooked"
    checkpoints = models.checkpoints()
    found: dict[str, Any] = {
        name: scenarios.outcomes(checkpoints[name]) for name in models.FAMILIES
    }
    found["wide"] = scenarios.load_peak_bytes(checkpoints["wide"])
    return found


@pytest.mark.parametrize("family", models.FAMILIES)
def test_tokens_and_logits_are_the_stock_engines(
    family: str, hooked: Hooked, stock: dict[str, Any]
) -> None:
    assert len(stock[family]["bf16 tokens"]["greedy"]) == 2
    assert stock[family]["bf16 tokens"]["greedy"] != stock[family]["bf16 tokens"]["sampled"]
    assert hooked.found[family] == stock[family]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_tokens_depend_on_the_table(family: str, stock: dict[str, Any]) -> None:
    """Without this the comparison above could not fail."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models.checkpoints()[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ngram_embedding" in name or "embed_tokens_per_layer" in name:
                parameter.zero_()
    tokens = scenarios.demo_generate.generate_with(model, vocabulary=512)
    for case, expected in stock[family]["bf16 tokens"].items():
        assert tokens[case] != expected


def test_nothing_is_reported_missing_or_unexpected(hooked: Hooked) -> None:
    for family in models.FAMILIES:
        assert not any(hooked.found[family]["bf16 loading"].values())


def test_the_table_is_neither_allocated_nor_read(hooked: Hooked, stock: dict[str, Any]) -> None:
    # The stock engine holds it as bf16 and as fp32; a channel takes 32 MiB, and a table read as
    # bf16 alone would already be too much.
    assert stock["wide"] > 2 * models.WIDE_TABLE_BYTES
    assert hooked.found["wide"] < models.WIDE_TABLE_BYTES
    for name in ("qwen4_exp", "gemma4"):
        assert hooked.found[f"{name} rows in memory"] == 0
        assert hooked.found[f"{name} keys"] == []
    assert hooked.found["gemma4 class"] == "Gemma4ForCausalLM"


def test_every_row_equals_the_oracles(hooked: Hooked) -> None:
    assert hooked.found["values that differ from the oracle"] == 0


def test_rows_are_cast_as_the_stock_table_was(hooked: Hooked) -> None:
    assert hooked.found["cast one by one"] is True
    assert hooked.found["cast at once"] is False


def test_reads_start_before_the_layer_asks(hooked: Hooked) -> None:
    counters = hooked.found["counters"]
    assert counters["demands"] == 0
    assert counters["hits"] > 0
    assert counters["misses"] > 0
    assert counters["failed"] == counters["tag_errors"] == 0


REFUSALS = {
    "from config": "built without a checkpoint.*set TIERD_MODEL=NAME.*run: tierd images",
    "disable_mmap": "disable_mmap=True reads whole shards into memory",
    "other model": r"\(model gemma3n\) has gemma3n/layers.0.per_layer, but staged from other data "
    "than .*gemma4 holds .*run: tierd stage",
    "state_dict": "state_dict holds model.embed_tokens_per_layer.weight, a table.*set TIERD_MODEL",
    "cache rows": "TIERD_CACHE_ROWS='many' is not a number of rows",
    "changed": "gemma4/layers.0.per_layer.*but staged from other data than .*changed holds",
    "not staged": r"\(model v41\) has no image of table layers.0.ple of .*qwen-not-staged; "
    "run: tierd stage .*qwen-not-staged --device DEVICE$",
    "variant": "loaded from other files than model-.*load without `variant`",
    "save": "cannot be saved: its table would be missing",
    "resize": "cannot be resized: its table is read-only",
    "training": "being trained, but a table served by tierd is read-only",
    "fork": r"attached by process \d+ and is used after a fork in \d+",
    "named but other": "wide/layers.0.per_layer has 6656 rows of 960 values, the model's table "
    "512 of 24",
    "engine": "engine 'tgi' is not one that tierd serves; there is: sglang, transformers",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case: str, hooked: Hooked) -> None:
    text = hooked.found[case]
    assert "\n" not in text
    with pytest.raises(AssertionError, match=REFUSALS[case]):
        raise AssertionError(text)


def test_copies_and_named_models_read_the_same_rows(hooked: Hooked) -> None:
    assert hooked.found["copied"] is True
    assert hooked.found["named"] is True


def test_a_copy_is_cast_alone(hooked: Hooked) -> None:
    assert hooked.found["copy cast"] is True
    assert hooked.found["original kept"] is True


def test_threads_share_a_model(hooked: Hooked) -> None:
    assert hooked.found["threads"] is True


def test_a_served_process_ends_quietly(hooked: Hooked) -> None:
    assert hooked.found
    assert "no lookup table was replaced" not in hooked.stderr
    assert "Traceback" not in hooked.stderr

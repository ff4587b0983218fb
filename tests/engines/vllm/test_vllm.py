"""vLLM with the hook against vLLM without it: the real modules of 0.33.0, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.vllm import engines

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(engines.TIMEOUT_S)


def test_the_plugin_is_found_and_replaces_the_tables(served: dict[str, Any]) -> None:
    assert served["embedding"] == "tierd.hook.vllm.engram"
    assert served["engram"]["parameters"] == 0
    for name in ("ple-bf16", "ple-fp8"):
        assert served[name]["class"] == "tierd.hook.vllm.ple"
        assert served[name]["rows held"] == 0


@pytest.mark.parametrize("name", ["engram", "sharded"])
def test_engram_rows_are_the_stock_ones(served: dict[str, Any], name: str) -> None:
    """Hash and lookup kernels of vLLM in the interpreter; dead positions; one rank of three."""
    engram = served[name]
    assert engram["rows"] > (2000 if name == "engram" else 700)
    assert engram["distinct"] > 500
    assert (engram["ids differing"], engram["differing"]) == (0, 0)
    assert engram["demands"] == 0  # everything was kicked by the hasher
    assert engram["misses"] > 0


@pytest.mark.parametrize("name", ["ple-bf16", "ple-fp8"])
def test_ple_rows_are_the_stock_ones(served: dict[str, Any], name: str) -> None:
    """Through vLLM's prefetch and its join; row numbers outside the table are rows of zeroes."""
    assert served[name]["rows"] > 500
    assert served[name]["differing"] == 0
    assert served[name]["demands"] == 0


def test_a_whole_vllm_generates_what_the_stock_one_does(
    facts: dict[str, str], tmp_path: Path
) -> None:
    """Gemma 4 on the CPU by the plugin of vLLM 0.32.0, prefix caching on; with random tokens."""
    told = {"model": facts["gemma"], "compiled": False, "tokens": 8, "requests": 6}
    switch = {"TIERD": "1", "TIERD_SOCKET": facts["socket"]}
    both = [
        engines.gemma(json.dumps(told), VLLM_CACHE_ROOT=str(tmp_path), **more)
        for more in (switch, {})
    ]
    served, stock = (one.found() for one in both)
    assert served["tokens"] == stock["tokens"]
    assert len({token for one in stock["tokens"] for token in one}) > 20
    assert served["lookups"]
    assert min(served["lookups"]) > 0


def test_what_is_let_in(refused: dict[str, Any]) -> None:
    for name in ("stock", "let in", "let in, same source", "plugins with us", "gemma on cpu"):
        assert refused[name] == "", name
    assert refused["compile key"] == "1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("release", "vllm 0.34.0 is not a release that tierd was checked with"),
        ("other plugin", "was replaced by other.patch, another plugin perhaps"),
        ("source", "is not what tierd was checked with (source digest"),
        ("plugins profiler,other", "set VLLM_PLUGINS=profiler,other,tierd"),
        ("plugins ", "set VLLM_PLUGINS=tierd"),
        ("rocm", "ROCm is not served yet"),
        ("gemma on cuda", "Gemma's table under vLLM was compared with the stock engine's on CPUs"),
        ("load_config__load_format", "--load-format dummy reads no checkpoint"),
        ("load_format", "--load-format runai_streamer may read the tables into memory"),
        ("load_config__safetensors_load_strategy", "--safetensors-load-strategy eager reads"),
        ("parallel_config__pipeline_parallel_size", "--pipeline-parallel-size 2 was not tried"),
        ("parallel_config__prefill_context_parallel_size", "--prefill-context-parallel-size 2 was"),
        ("parallel_config__enable_elastic_ep", "--enable-elastic-ep was not tried"),
        ("weight_transfer_config", "--weight-transfer-config was not tried"),
        ("across", "embedding_across_dp in --engram-config lets a rank look up"),
        ("switch", "TIERD='yes' is neither 1 nor 0"),
        ("reload", "vLLM loads weights over tables that are served"),
        ("second model", "this process has served a model's tables already"),
        ("additional_config", "decode_backend=latency_specialized reads the tables by kernels"),
        ("engram_config__cpu_offload", "cpu_offload is false in --engram-config"),
        ("model_config__enable_sleep_mode", "--enable-sleep-mode frees GPU memory"),
        ("speculative_config", "--speculative-config was not tried"),
        ("lora_config", "--enable-lora was not tried"),
        (
            "offload_config__uva",
            "--cpu-offload-gb or --offload-group-size was not tried",
        ),
        ("engram_config", "EngramConfig does not know DeepseekV41ForCausalLM"),
        ("outside", "constructed outside of vLLM's own loading"),
        ("other checkpoint", "staged from other data than"),
        ("no daemon", "systemctl start tierd"),
        ("not here", "nobody/nothing is neither a directory nor a downloaded model"),
        ("no such kind", "holds no engram table"),
        ("self-test", "is served otherwise than vLLM reads it"),
        ("no table", "Linear has no lookup table that tierd serves"),
    ],
)
def test_what_is_refused(refused: dict[str, Any], name: str, text: str) -> None:
    assert text in refused[name]
    assert "\n" not in refused[name]


def test_the_check_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [engines.python_of(engines.SOURCES), "-m", "tierd.cli", "hook", "check", "vllm", "--json"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = {one["what"]: one["problem"] for one in json.loads(done.stdout)["findings"]}
    assert found["entry point tierd of vllm.general_plugins"] is None
    wrong = {what: problem for what, problem in found.items() if problem is not None}
    # A runner for a GPU imports what is compiled for one.
    assert all("cannot be imported" in problem for problem in wrong.values()), wrong

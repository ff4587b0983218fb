"""SGLang with the hook against SGLang without it: the real modules of both releases, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.sglang import engines

if TYPE_CHECKING:
    from tests.engines.sglang.conftest import Scenarios

pytestmark = pytest.mark.timeout(engines.TIMEOUT_S)


def test_the_plugin_is_found_and_replaces_the_table(scenarios: Scenarios) -> None:
    found = scenarios["served"]
    assert found["embedding"] == "tierd.hook.sglang.engram"
    assert found["load_model wrapped"] is True
    assert found["engram"]["parameters of the table"] == 0
    for name in ("ple-bf16", "ple-fp8"):
        assert found[name]["weight"] == "meta"
        assert found[name]["state"] == ["weight_scale"]  # what dummy loading would fill
    assert found["ple-fp8"]["scale"] == 0.0625


def test_rows_and_outputs_are_the_stock_ones(scenarios: Scenarios) -> None:
    """Prefill in chunks, verify, decode with a graph's padding; both tables, PLE in both dtypes."""
    engram = scenarios["served"]["engram"]
    assert engram["rows"] > 50_000
    assert engram["distinct"] > 10
    assert (engram["differing"], engram["outputs differing"]) == (0, 0)
    for name in ("ple-bf16", "ple-fp8"):
        ple = scenarios["served"][name]
        assert ple["rows"] == 960
        assert ple["distinct"] > 500
        assert ple["differing"] == 0


def test_rows_are_kicked_by_the_hasher(scenarios: Scenarios) -> None:
    engram = scenarios["served"]["engram"]
    assert engram["demands"] == 0
    assert engram["hits"] > 0
    assert engram["histories"] is True


def test_a_kick_after_sampling_reads_what_the_next_step_needs(scenarios: Scenarios) -> None:
    engram = scenarios["served"]["engram"]
    first, second = engram["early misses"]
    assert first > 0
    assert second == 0
    assert engram["history kept"] is True


def test_overlap_schedule(scenarios: Scenarios) -> None:
    """The CPU knows no token of the step that it launches; the kick does not need it to."""
    assert scenarios["served"]["engram"]["modes"]["overlap"] == {"steps": 5, "differing": 0}


def test_breakable_prefill_graphs_look_up_between_segments(scenarios: Scenarios) -> None:
    found = scenarios["served"]["engram"]["modes"]["breakable"]
    assert found == {"breaks": 2, "rows": 2 * 2 * 37 * 24, "differing": 0}


def test_odd_sizes(scenarios: Scenarios) -> None:
    """No rows at all, one, and more than a request takes."""
    found = scenarios["served"]["engram"]["modes"]["odd"]
    assert found == {"sizes": [0, 1, 700], "differing": 0}


def test_a_prompts_next_chunk_is_hinted(scenarios: Scenarios) -> None:
    """Each row once, by SGLang's own hash, before its chunk is looked up."""
    found = scenarios["served"]["engram"]["modes"]["hints"]
    assert (found["tokens"], found["same"], found["differing"]) == (250, True, 0)
    assert found["calls"] == 2  # the first chunk and the next; then the one after that
    assert found["given"] > 1000
    assert found["skipped"] == 0


def test_the_probe_finds_when_layers_need_their_rows(scenarios: Scenarios) -> None:
    found = scenarios["served"]["engram"]["modes"]["probe"]
    assert found["engine"].startswith("sglang 0.5.2")
    assert found["model"] == "v41"
    assert found["step_s"]["2"] == pytest.approx(0.020)
    windows = {layer: sizes["2"]["window_s"] for layer, sizes in found["layers"].items()}
    assert windows == pytest.approx({"1": 0.010, "14": 0.020}, abs=1e-6)
    assert scenarios["served"]["ple-fp8"]["probed"] is True


def test_the_audit_compares_what_was_served(scenarios: Scenarios) -> None:
    assert scenarios["served"]["engram"]["audited"] > 100
    assert scenarios["on_gpu"]["audited"] > 30


def test_every_rank_of_a_sharded_table_has_its_rows(scenarios: Scenarios) -> None:
    """In 2 ranks (whole hash columns in 0.5.23) and 5 (equal rows); staged once for all."""
    found = scenarios["sharded"]
    assert found["rows"] > 10_000
    assert found["zeroes"] > found["rows"] // 2
    assert found["negative zeroes"] > 0  # the stock lookup keeps the sign; the addition drops it
    assert found["differing"] == 0


def test_two_ranks_add_up_to_the_stock_rows(scenarios: Scenarios) -> None:
    """With SGLang's own process groups and all-reduce."""
    found = scenarios["sharded"]["collective"]
    assert found["rows"] > 100_000
    assert (found["differing"], found["outputs differing"], found["zero rows"]) == (0, 0, 0)


def test_the_gpu_path_serves_a_ranks_rows(scenarios: Scenarios) -> None:
    """Its kernels interpreted: a kick by the hasher, rows of this rank's range, zero for others."""
    found = scenarios["on_gpu"]
    assert found["rows"] == 192
    assert 0 < found["zeroes"] < 192
    assert found["differing"] == 0
    assert found["demands"] == 0
    assert found["hits"] > 0


REFUSED = {
    "release": r"^tierd: sglang 0\.6\.0 is not a release .*\(0\.5\.22 and 0\.5\.23\)",
    "let in, nothing there": r"sglang 0\.6\.0 has no .*engram\.Engram\.nothing",
    "other plugin": r"EngramEmbedding was replaced by other_plugin\.patch, another plugin",
    "source": r"EngramEmbedding of sglang .* is not what tierd was checked with",
    "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "^tierd: SGLANG_ENABLE_.* puts the tables into host",
    "SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING": "^tierd: SGLANG_OPT_.* stages rows",
    "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": "^tierd: SGLANG_OPT_.* from the GPUs' memory",
    "plugins": "^tierd: SGLANG_PLUGINS=profiler, other leaves tierd out",
    "switch": r"^tierd: TIERD='yes' is neither 1 nor 0; set TIERD=1, or unset it",
    "early kick": r"^TIERD_EARLY_KICK='on' is neither 1 nor 0",
    "plugin after us": r"an Engram table is a later\.Later, not tierd's: .* SGLANG_PLUGINS=tierd",
    "daemon dies": r"^tierd: .*dying\.sock.*",
    "daemon dies in attach": r"^tierd: .*dying\.sock.*",
    "rocm": "ROCm is not served yet",
    "unpublished": "^tierd: .* before SGLang has published its settings",
    "enable_memory_saver": "^tierd: --enable-memory-saver frees GPU memory",
    "weight_loader_disable_mmap": "^tierd: --weight-loader-disable-mmap reads whole files",
    "weight_loader_prefetch_checkpoints": "^tierd: --weight-loader-prefetch-checkpoints reads",
    "weight_cache_mode": "^tierd: --weight-cache-mode client loads the model in another process",
    "cpu_offload_gb": "^tierd: --cpu-offload-gb was not tried",
    "load_format": "^tierd: --load-format fastsafetensors may read the tables into memory",
    "other checkpoint": "^tierd: .* but staged from other data than .*v41-other holds.*run: tierd",
    "no daemon": r"^tierd: .*none\.sock: no such socket.*\(waited 1 s\); run: systemctl start",
    "wait": "^tierd: TIERD_WAIT_S='soon' is not a number of seconds, such as 10",
    "not here": "^tierd: nobody/nothing is neither a directory nor a downloaded model",
    "no such kind": "^tierd: .*ple-bf16: holds no engram table, but the model reads one",
    "other rows": r"^tierd: v41/layers\.1\.engram has \d+ rows of 256 values, the model's table 38",
    "other layer": "^tierd: the model reads a table at layer 2, but there is none",
    "dummy": "^tierd: --load-format dummy and no weights .* set TIERD_MODEL=NAME",
    "no table": "TIERD=1, but Linear has no lookup table that tierd serves",
    "self-test": r"^tierd: row \d+ of layers\.1\.engram\.embed\.weight is served otherwise",
    "before loading": "rows of layer 1 are read before the model's tables were attached",
    "a layer is missing": "the model has 2 Engram tables, its config names 3",
    "second model": "^tierd: this process has served a model's tables already",
    "weights of a table": "^tierd: SGLang loads weights over tables that are served",
    "ple dtype": r"layers\.1\.ple is stored as bf16, but the model would hold it as torch\.float8",
    "ple on the gpu": "--no-ple-offload-embedding has it",
    "ple too early": r"Qwen4ExpPinnedHostEmbedding, not tierd's: constructed before the hook was",
    "ple file": "^tierd: --ple-offload-backend file keeps the PLE table on disk by itself",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, scenarios: Scenarios) -> None:
    text = scenarios["refused"][case]
    assert "\n" not in text
    with pytest.raises(AssertionError, match=REFUSED[case]):
        raise AssertionError(text)


def test_what_is_not_refused(scenarios: Scenarios) -> None:
    """The guards themselves pass what they should; a release let in is held to its sources."""
    found = scenarios["refused"]
    for case in ("stock", "let in", "let in, same source", "plugins with us"):
        assert found[case] == "nothing was refused"
    assert found["weights of others"] is True
    megakernel = found["enable_nvidia_megakernel"]
    assert "replaces the step" in megakernel or "no such setting" in megakernel


def test_dummy_weights_are_served_by_name(scenarios: Scenarios) -> None:
    assert scenarios["refused"]["dummy, named"] is True


def test_the_daemon_knows_how_many_ranks_to_expect(scenarios: Scenarios) -> None:
    """One of two has attached (tests/unit/test_clients.py: how they are counted)."""
    client = scenarios["refused"]["one of two"]
    assert client["engine"].startswith("sglang 0.5.2")
    assert (client["rank"], client["world"], client["expected_ranks"]) == (0, 2, 2)


@pytest.mark.parametrize("release", engines.RELEASES)
def test_hook_check(release: str) -> None:
    command = [str(engines.python_of(release)), "-m", "tierd.cli", "hook", "check", "sglang"]
    environ: dict[str, Any] = {**os.environ, "SGLANG_PLUGINS": "other"}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 1, done.stderr[-2000:]
    findings = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    problems = {what: f["problem"] for what, f in findings.items() if f["problem"]}
    assert list(problems) == ["release and environment"]
    assert "SGLANG_PLUGINS=other leaves tierd out" in problems["release and environment"]
    assert findings["values of TIERD_*"]["detail"].startswith("socket ")
    assert findings["entry point tierd of sglang.srt.plugins"]["detail"].startswith("tierd.hook")
    assert findings["sglang.srt.layers.engram"]["detail"].startswith("EngramEmbedding, Engram")


def test_tierd_run_sees_that_the_plugin_is_left_out(facts: dict[str, str]) -> None:
    """SGLang would go on without us and say nothing."""
    run = [sys.executable, "-m", "tierd.cli", "run", "--socket", facts["socket"], "--"]
    code = "import sglang.srt.plugins; print('goes on')"
    done = subprocess.run(
        [*run, str(engines.python_of("0.5.22")), "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_PLUGINS": "other"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tierd: SGLANG_PLUGINS=other leaves tierd out")


def test_a_refusal_ends_the_process_that_loads_plugins() -> None:
    """SGLang swallows what a plugin raises; this must get through."""
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); print('goes on')"
    environ = {**os.environ, "TIERD": "1", "SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING": "true"}
    done = subprocess.run(
        [str(engines.python_of("0.5.23")), "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tierd: SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING stages rows")

"""``tierd plan``: what it says, and what it refuses and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from tests import checkpoints
from tierd.cli import cli
from tierd.daemon import windows
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.checkpoints import TinyCheckpoint

V41 = {
    "text_config": {
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384_006_168, 384_016_682],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
    }
}
DISK = ("--disk", "0.30,3.05,0.37")
PROBED = ProbedWindows(
    gpu="NVIDIA H200", engine="sglang 0.5.22", model="v41", versions={}, date="2026-11-30",
    step_s={8: 0.011, 128: 0.0294}, layers={1: {8: 0.0001, 128: 0.00027}, 14: {128: 0.00935}},
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V41))
    return path


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(windows, "_NVIDIA", tmp_path / "no GPU")


def probed(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "windows.json"
    path.write_text(json.dumps({**PROBED.to_json(), **changes}))
    return path


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *(str(word) for word in words)])


def plan(*words: object) -> dict[str, Any]:
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*words: object) -> str:
    result = invoke(*words)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("tierd: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_config_alone_is_planned_as_the_paper_places_it(config: Path, tmp_path: Path) -> None:
    made = plan(
        config, "--windows", probed(tmp_path), "--batch", 128, "--ranks", 4, *DISK,
        "--dram", "256GiB",
    )  # fmt: skip
    first, second = made["tables"]
    assert (first["name"], first["rows"], first["tier"]) == ("layers.1.engram", 384_006_168, "dram")
    assert (second["layer"], second["tier"]) == (14, "disk")
    assert second["pages_per_step"] == 128 * 24 / 4
    assert "late" in first["refused"][0]["why"]
    assert made["memory"]["host_bytes"] == first["image_bytes"] == 25_600_412 * 4096
    assert made["memory"]["disk_bytes"] == second["image_bytes"]
    words = ("--ranks", 4, "--windows", probed(tmp_path), *DISK, "--dram", "256GiB")
    shown = invoke(config, *words).stdout
    assert "layers.1.engram: not disk: reads" in shown
    assert "host 97.7 GiB" in shown


def test_a_checkpoint_is_planned(tmp_path: Path) -> None:
    tiny: TinyCheckpoint = checkpoints.engram(tmp_path / "v41", rows=3000)
    made = plan(tiny.path, "--windows", probed(tmp_path), *DISK, "--dram", "1GiB")
    assert [one["rows"] for one in made["tables"]] == [3000, 3000]
    assert [one["tier"] for one in made["tables"]] == ["dram", "disk"]


def test_windows_scale_with_the_step(config: Path, tmp_path: Path) -> None:
    made = plan(config, "--windows", probed(tmp_path), "--batch", 8, *DISK, "--dram", "256GiB")
    by_layer = {one["layer"]: one["window_ms"] for one in made["tables"]}
    assert by_layer[1] == pytest.approx(0.1)
    # Not probed at 8: the window of 128 takes the same share of the shorter step.
    assert by_layer[14] == pytest.approx(9.35 * 11 / 29.4)


def test_a_curve_lets_a_cache_help(config: Path, tmp_path: Path) -> None:
    curves = tmp_path / "curves.json"
    table = {
        "name": "layers.1.engram",
        "sizes": [1000, 500_000],
        "hit_ratio": {"lru": [0.5, 0.999]},
    }
    curves.write_text(json.dumps({"tables": [table]}))
    words = (config, "--window", "1=0.4", "--window", "14=9.35", "--ranks", 4, *DISK)
    made = plan(*words, "--dram", "1TiB", "--cache", "1GiB", "--curves", curves)
    first = made["tables"][0]
    assert first["tier"] == "disk + cache"
    assert first["cache_rows"] == (1 << 30) // 272
    assert made["memory"]["hbm_bytes_per_rank"] == first["cache_rows"] * 272
    assert made["memory"]["host_bytes"] == 0


def test_layer_0_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    gemma = {
        "num_hidden_layers": 2, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    }  # fmt: skip
    path.write_text(json.dumps(gemma))
    made = plan(path, "--window", "1=0.2", *DISK, "--dram", "8GiB")
    zero = next(one for one in made["tables"] if one["layer"] == 0)
    assert "layer 0" in zero["warnings"][0]
    assert zero["tier"] == "dram"


def test_missing_probe_data_is_named_and_how_to_get_it(config: Path, tmp_path: Path) -> None:
    assert "no read times" in refusal(config, "--window", "1=1", "--window", "14=9")
    text = refusal(config, *DISK, "--window", "1=0.27")
    assert "no window for layers.14.engram" in text
    assert "--window layers.14.engram=MS" in text
    partial = probed(tmp_path, layers={"1": {"128": {"window_s": 0.0003}}})
    text = refusal(config, *DISK, "--windows", partial)
    assert "no window of layer 14 (it has: 1)" in text
    assert "run: tierd probe" in text
    assert "no windows there" in refusal(config, *DISK, "--windows", tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"gpu": "x"}')
    assert "not a windows file" in refusal(config, *DISK, "--windows", broken)
    assert "write TABLE=MS" in refusal(config, *DISK, "--window", "fourteen")


def test_windows_of_another_gpu_engine_or_model_are_refused(config: Path, tmp_path: Path) -> None:
    words = (config, *DISK, "--dram", "256GiB", "--windows", probed(tmp_path))
    assert "measured for GPU NVIDIA H200, not GB10" in refusal(*words, "--gpu", "GB10")
    assert "for engine sglang 0.5.22, not vllm" in refusal(*words, "--engine", "vllm 0.33")
    assert "for model v41, not gemma" in refusal(*words, "--model", "gemma")
    assert invoke(*words, "--gpu", "NVIDIA H200", "--engine", "sglang 0.5.22").exit_code == 0


def test_the_gpu_of_this_machine_counts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "gpus" / "0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA B200\nIRQ: 1\n")
    monkeypatch.setattr(windows, "_NVIDIA", tmp_path / "gpus")
    assert "not NVIDIA B200" in refusal(config, *DISK, "--windows", probed(tmp_path))


@pytest.mark.parametrize(
    ("hits", "word"),
    [
        ([0.5, 0.2], "more misses with more cache"),
        ([0.5, 1.5], "miss ratio of -0.5"),
        ([0.5, float("nan")], "not a number"),
        ("x", "no miss curves"),
    ],
)
def test_nonsense_curves_are_refused(config: Path, tmp_path: Path, hits: Any, word: str) -> None:
    curves = tmp_path / "curves.json"
    table = {"name": "layers.1.engram", "sizes": [1000, 500_000], "hit_ratio": {"lru": hits}}
    curves.write_text(json.dumps({"tables": [table]}))
    text = refusal(config, *DISK, "--window", "1=1", "--window", "14=9", "--curves", curves)
    assert word in text


def test_what_cannot_fit_or_be_in_time_is_refused(config: Path, tmp_path: Path) -> None:
    words = (config, "--windows", probed(tmp_path), "--ranks", 4, *DISK)
    text = refusal(*words)
    assert "no tier takes layers.1.engram" in text
    assert "late" in text
    assert "dram: there is none" in text
    text = refusal(*words, "--dram", "50GiB")
    assert "too large" in text
    assert "too large" in refusal(*words, "--dram", "98GiB", "--disk-size", "50GiB")


def test_other_refusals(tmp_path: Path) -> None:
    empty = tmp_path / "config.json"
    empty.write_text("{}")
    assert "describes no table" in refusal(empty, *DISK)
    empty.write_text("[]")
    assert "not a model's config" in refusal(empty, *DISK)
    empty.write_text("{")
    assert "not JSON" in refusal(empty, *DISK)
    assert "cannot be read" in refusal(tmp_path / "nothing.json", *DISK)
    assert invoke(empty, "--disk", "fast").exit_code == 2

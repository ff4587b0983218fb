"""``tierd demo``, smaller than by default: it passes, and it can fail."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.oracle import INDEX
from tierd.errors import TierdError
from tierd.gpu.engram import EngramHash, EngramLayout
from tierd.tools import demo as tool
from tierd.tools.deepseek_tokens import deepseek_token_map

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)
ENGRAM_VOCAB = 300


@pytest.fixture(scope="module")
def small() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "ENGRAM_VOCAB", ENGRAM_VOCAB)
        patch.setattr(tool, "TEXT_TOKENS", 2_000)
        patch.setattr(tool, "CACHE_ROWS", 1_024)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "here"


def test_everything_is_identical(
    place: Path, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.demo(json_output=True, directory=place) == 0
    result = json.loads(capsys.readouterr().out)  # one object and nothing else
    assert result["tokens_identical"] is True
    assert result["models"] == ["gemma4", "qwen4_exp", "v41"]
    assert result["tokens_compared"] == 3 * 2 * 2 * (24 + 16)
    layout = EngramLayout.make((1, 3), vocab_size=ENGRAM_VOCAB)
    assert result["rows_checked"] >= 2_000 * 48 + sum(layout.rows)
    assert result["mismatched_rows"] == 0
    assert 0 < result["cache_hit_ratio"] < 1
    assert result["bytes_moved_out_of_memory"] > 264 * sum(layout.rows)
    assert result["directory"] == str(place)
    assert (place / "device.img").is_file()
    assert not (place / "run" / "engine.sock").exists()  # the daemon has been stopped


def test_one_changed_byte_is_found(place: Path, small: None) -> None:
    """The rows are compared with what the checkpoint holds now, so this is one wrong row."""
    run = tool._Demo(place, lambda _: None)
    directory = run.checkpoints["v41"]
    name = "layers.3.engram.embed.weight"
    path = directory / json.loads((directory / INDEX).read_text())["weight_map"][name]
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    layout = EngramLayout.make((1, 3), vocab_size=ENGRAM_VOCAB)
    hasher = EngramHash(layout, deepseek_token_map())
    with tool.daemon(place, run.device, run.socket):
        result = run._check_rows(hasher)
    assert result["mismatched_rows"] >= 1
    assert not tool.passed({**result, "tokens_identical": True, "tokens_compared": 1})


def test_tokens_that_differ_are_named() -> None:
    stock = {"a": {"greedy": [[1, 2]], "sampled": [[3]]}, "b": {"greedy": [[4]]}}
    served = {"a": {"greedy": [[1, 2]], "sampled": [[5]]}}
    assert tool.compare_tokens(stock, stock) == []
    assert tool.compare_tokens(stock, served) == ["a/sampled", "b/greedy"]
    assert tool.compare_tokens(served, stock) == ["a/sampled", "b/greedy"]


def test_nothing_compared_is_not_a_pass() -> None:
    nothing = {"tokens_identical": True, "tokens_compared": 0, "rows_checked": 0}
    assert not tool.passed({**nothing, "mismatched_rows": 0})


def test_words_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        "tokens_identical": False,
        "differing": ["v41/greedy"],
        "tokens_compared": 480,
        "models": ["v41"],
        "rows_checked": 1_200_000,
        "mismatched_rows": 3,
        "cache_rows": 1024,
        "cache_hit_ratio": 0.4,
        "lookups_per_second": 60_000,
        "images": 2,
        "bytes_moved_out_of_memory": 5_000_000,
        "seconds": 50.0,
        "directory": None,
    }
    tool._show(result)
    text = capsys.readouterr().out
    assert "DIFFERENT: v41/greedy" in text
    assert "1,200,000" in text
    assert "40% of lookups hit" in text


def test_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(TierdError, match="not empty; the demo wants an empty directory or none"):
        tool.demo(json_output=True, directory=tmp_path)
    assert (tmp_path / "mine").exists()

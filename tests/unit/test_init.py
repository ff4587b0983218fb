"""``tierd init``: what it writes can be used, and nothing is lost without a yes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from tests import checkpoints
from tierd import config
from tierd.cli import cli
from tierd.io.store import Store

if TYPE_CHECKING:
    from pathlib import Path


def init(*words: object, answer: str = "") -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, words)], input=answer)


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    path = tmp_path / "blank.img"
    path.write_bytes(bytes(8 << 20))
    return path


def test_a_machine_is_set_up(tmp_path: Path, blank: Path) -> None:
    tiny = checkpoints.engram(tmp_path / "v41", rows=300)
    output = tmp_path / "etc" / "tierd.toml"
    words = ("--checkpoint", tiny.path, "--device", blank, "--output", output)
    done = init(*words, answer="y\n")
    assert done.exit_code == 0, done.output
    loaded = config.load(output, environ={})
    assert loaded.settings.devices.paths == [str(blank)]
    assert loaded.settings.metrics.listen == "127.0.0.1:9469"
    assert "table layers.14.engram: 300 rows of 264 bytes" in done.output
    assert f"tierd stage {tiny.path}" in done.output
    assert f"export TIERD_CONFIG={output}" in done.output  # or the other steps would not find it
    assert "8.0 MiB in all" in output.read_text()
    with Store.open(blank) as store:
        assert store.images == []


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_nothing_is_lost_without_a_yes(tmp_path: Path, blank: Path, answer: str) -> None:
    output = tmp_path / "tierd.toml"
    done = init("--device", blank, "--output", output, answer=answer)
    assert done.exit_code == 1
    assert "Everything on it is lost" in done.output
    assert not output.exists()
    assert blank.read_bytes() == bytes(8 << 20)
    Store.format(blank, force=str(blank)).close()
    output.write_text("# mine\n")
    done = init("--device", blank, "--output", output, answer=answer)
    assert done.exit_code == 1
    assert "overwrite it?" in done.output
    assert output.read_text() == "# mine\n"


def test_yes_asks_nothing_and_json_tells_all(tmp_path: Path, blank: Path) -> None:
    output = tmp_path / "tierd.toml"
    output.write_text("# mine\n")
    told = json.loads(init("--device", blank, "--output", output, "--yes", "--json").stdout)
    assert told["written"] == str(output)
    assert told["chosen"]["devices.paths"]["value"] == [str(blank)]
    assert "tierd" in output.read_text()


def test_tables_that_do_not_fit_are_told_of(tmp_path: Path, blank: Path) -> None:
    big = checkpoints.engram(tmp_path / "v41", rows=40_000)
    done = init("--checkpoint", big.path, "--device", blank, "--output", tmp_path / "t", "--yes")
    assert "the tables need" in done.output
    missing = init("--device", tmp_path / "none", "--output", "-")
    assert missing.exit_code == 1
    assert str(tmp_path / "none") in missing.stderr
    printed = init("--device", blank, "--output", "-")
    assert f'paths = ["{blank}"]' in printed.stdout

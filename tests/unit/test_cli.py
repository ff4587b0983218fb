"""The command line: help for everything, one line for every error, JSON where asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner, Result

from tierd.cli import cli, groups

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]


def invoke(*words: object, **environ: str) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], env=environ)


def refusal(*words: object, **environ: str) -> str:
    result = invoke(*words, **environ)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("tierd: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(commands(cli.everything())), ids=" ".join)
def test_every_command_and_option_has_help(path: tuple[str, ...]) -> None:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    assert command.help
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, f"{param.name} has no help"
    assert invoke(*path, "--help").exit_code == 0


def test_every_command_is_in_the_operators_page() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "cli.md"]
    page = "".join(path.read_text() for path in pages)
    for path in commands(cli):
        assert re.search(rf"tierd(\.cli)? {' '.join(path)}", page), path


def test_the_pages_of_commands_and_metrics_are_the_code() -> None:
    for page in ("cli", "metrics", "rest"):
        text = (ROOT / f"docs/{page}.md").read_text()
        assert text == invoke("reference", page).stdout, f"run: tierd reference {page}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_to_every_shell(shell: str) -> None:
    assert "_TIERD_COMPLETE" in invoke("completion", shell).stdout


def test_completion_completes() -> None:
    environ = {"_TIERD_COMPLETE": "bash_complete", "COMP_WORDS": "tierd jo", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tierd.cli"],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["plain,jobs"]


def test_the_table_of_commands_is_the_commands() -> None:
    found = {}
    for name, command in cli.everything().commands.items():
        assert command.callback is not None
        module = command.callback.__module__.removeprefix("tierd.cli.")
        found[name] = (module, command.get_short_help_str(limit=1000))
    assert found == groups.COMMANDS
    help_ = invoke("--help").stdout
    assert all(f"\n  {name} " in help_ for name in found)


def test_help_imports_nothing_heavy() -> None:
    heavy = ("numpy", "pydantic", "aiohttp", "rich", "structlog", "sqlite_utils", "torch")
    code = (
        "import sys; sys.argv = ['tierd', '--help']\n"
        "from tierd.cli import main\n"
        "try: main()\n"
        f"except SystemExit: sys.exit(','.join(m for m in {heavy} if m in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_format_makes_a_device_and_refuses_to_do_it_again(tmp_path: Path) -> None:
    device = tmp_path / "device.img"
    result = invoke("format", device, "--size", "8MiB", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["device"] == str(device)
    assert made["size_bytes"] == device.stat().st_size == 8 << 20
    assert str(device) in refusal("format", device)
    again = invoke("format", device, "--force", device)
    assert again.exit_code == 0, again.output
    assert "ready" in again.stdout


@pytest.mark.parametrize("size", ["4 parsecs", "-1", "1.5GiB", ""])
def test_sizes_that_are_none(tmp_path: Path, size: str) -> None:
    result = invoke("format", tmp_path / "x", "--size", size)
    assert result.exit_code == 2
    assert "write 512MiB or 4GiB" in result.stderr
    assert not (tmp_path / "x").exists()


def test_images_of_an_empty_device(tmp_path: Path) -> None:
    device = tmp_path / "device.img"
    assert invoke("format", device, "--size", "8M").exit_code == 0
    assert json.loads(invoke("images", "--device", device, "--json").stdout) == {"images": []}
    assert "run: tierd stage" in invoke("images", "--device", device).stdout


def test_errors_are_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert str(missing) in refusal("images", "--device", missing)
    assert str(missing) in refusal("stage", missing, "--device", missing)
    assert str(missing) in refusal("verify", "--device", missing)
    environ = {"TIERD__DAEMON__RUNTIME_DIR": str(tmp_path)}
    assert "no daemon listens there" in refusal("status", **environ)
    assert "no daemon listens there" in refusal("images", "--api-socket", missing)
    assert "devices.paths is empty" in refusal("serve", "--dir", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "catalog.db"] or not list(tmp_path.iterdir())


def test_config_check_and_show(tmp_path: Path) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text("[pump]\ncount = 2\n")
    assert invoke("config", "check", "--config", path).stdout == f"ok ({path})\n"
    shown = invoke("config", "show", "--origin", "--config", path, TIERD__LOG__LEVEL="debug").stdout
    lines = dict(line.split(" = ", 1) for line in shown.splitlines())
    assert lines["pump.count"].split() == ["2", "#", f"{path}:2"]
    assert lines["log.level"].endswith("# environment variable TIERD__LOG__LEVEL")
    assert lines["engine.socket_mode"].split() == ["0o660", "#", "default"]
    values = json.loads(invoke("config", "show", "--json", "--config", path).stdout)
    assert values["engine.socket"] == "/run/tierd/engine.sock"
    path.write_text("[pump]\ncuont = 2\n")
    assert f"{path}:2: unknown key pump.cuont; did you mean pump.count?" in refusal(
        "config", "check", "--config", path
    )


def test_every_command_that_a_message_names_exists() -> None:
    named = set()
    for path in (ROOT / "tierd").rglob("*.py"):
        named |= set(re.findall(r"run: tierd ([a-z]+)", path.read_text()))
    assert "stage" in named
    assert named - set(cli.commands) == set()

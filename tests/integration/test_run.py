"""``tierd run``: what a command gets, and what it does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import ROOT, Node, engram_node, running
from tierd.errors import AttachError, HookError
from tierd.tools import run as tool

if TYPE_CHECKING:
    from collections.abc import Iterator

SITE = ROOT / "tierd" / "hook" / "site"
REPORT = """
    import json, os, sys
    print(json.dumps({
        "tierd": sorted(name for name in sys.modules if name.startswith("tierd")),
        "engine": sorted({"torch", "transformers", "numpy"} & set(sys.modules)),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("TIERD")},
        "path": os.environ.get("PYTHONPATH", ""),
        "marks": getattr(sys, "marks", []),
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "pid": os.getpid(),
    }))
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = engram_node(tmp_path_factory.mktemp("run"), rows=100)
    with running(made):
        yield made


def run(node: Node, *command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    tierd = [sys.executable, "-m", "tierd.cli", "run", "--socket", str(node.engine_socket), "--"]
    return subprocess.run(
        [*tierd, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def report(completed: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(REPORT))
    return path


@pytest.fixture
def other_site(tmp_path: Path) -> Path:
    """Somebody else's sitecustomize."""
    directory = tmp_path / "other"
    directory.mkdir()
    text = "import sys\nsys.marks = [*getattr(sys, 'marks', []), __name__]\n"
    (directory / "sitecustomize.py").write_text(text)
    return directory


def test_a_python_is_hooked_and_pays_for_nothing(node: Node, script: Path) -> None:
    completed = run(node, sys.executable, script, TIERD_MODEL="v41")
    found = report(completed)
    assert found["environment"]["TIERD"] == "1"
    assert found["environment"]["TIERD_SOCKET"] == str(node.engine_socket)
    assert found["environment"]["TIERD_MODEL"] == "v41"
    assert found["environment"]["TIERD_RUN_PID"] == str(found["pid"])
    assert "tierd.hook.autostart" in found["tierd"]
    assert found["engine"] == []  # no model, no engine, nothing imported
    (line,) = completed.stderr.splitlines()
    assert line == (
        f"tierd[{found['pid']}]: TIERD=1, but no lookup table was replaced (no model loaded); "
        "see docs/engines.md"
    )


def test_another_sitecustomize_still_runs(node: Node, script: Path, other_site: Path) -> None:
    found = report(run(node, sys.executable, script, PYTHONPATH=str(other_site)))
    assert found["marks"] == ["sitecustomize"]
    assert found["sitecustomize"] == str(other_site / "sitecustomize.py")
    assert "tierd.hook.autostart" in found["tierd"]
    assert found["path"].split(os.pathsep)[0] == str(SITE)
    assert found["path"].split(os.pathsep)[-1] == str(other_site)


@pytest.mark.parametrize("switch", [None, "0", ""])
def test_without_the_switch_nothing_is_imported(
    switch: str | None, script: Path, other_site: Path
) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "TIERD"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, [SITE, other_site]))
    if switch is not None:
        environ["TIERD"] = switch
    completed = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, check=False
    )
    found = report(completed)
    assert found["tierd"] == []
    assert found["marks"] == ["sitecustomize"]
    assert completed.stderr == ""


def test_a_switch_that_is_neither_on_nor_off(script: Path) -> None:
    environ = {**os.environ, "TIERD": "yes", "PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}"}
    completed = subprocess.run(
        [sys.executable, script], env=environ, capture_output=True, text=True, check=False
    )
    assert report(completed)["engine"] == []
    assert "TIERD='yes' is neither 1 nor 0: no table is replaced" in completed.stderr


def test_a_python_without_tierd_says_so(script: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "tierd"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no tierd here')\n")
    python = getattr(sys, "_base_executable", sys.executable)  # where tierd is not installed
    environ = {**os.environ, "TIERD": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, [SITE, broken.parent]))
    completed = subprocess.run(
        [python, script], env=environ, capture_output=True, text=True, check=False
    )
    assert report(completed)["tierd"] == []
    assert "cannot import tierd (no tierd here): no table is replaced; run: " in completed.stderr


def test_exit_code_output_and_arguments_are_the_commands(node: Node) -> None:
    completed = run(node, "sh", "-c", 'echo "$1 --flag"; exit 7', "sh", "--socket")
    assert completed.returncode == 7
    assert completed.stdout == "--socket --flag\n"
    assert completed.stderr == ""


def test_signals_reach_the_command(node: Node) -> None:
    completed = run(node, "sh", "-c", "kill -TERM $$")
    assert completed.returncode == -signal.SIGTERM


def test_helpers_of_the_command_do_not_speak_up(node: Node) -> None:
    completed = run(node, "sh", "-c", f"'{sys.executable}' -c 'print(1)'; true")
    assert completed.stdout == "1\n"
    assert completed.stderr == ""


def test_no_daemon(tmp_path: Path) -> None:
    socket = tmp_path / "nowhere.sock"
    with pytest.raises(AttachError, match=rf"{socket}: no such socket.*run: systemctl start tierd"):
        tool.run(["true"], socket=str(socket), wait_s=0.1)


def test_no_such_program() -> None:
    with pytest.raises(HookError, match="no-such-program: no such program; run: tierd run -- "):
        tool.run(["no-such-program"])


def test_an_installed_tierd_adds_only_its_site_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "_PACKAGE_ROOT", tmp_path / "site-packages")
    made = tool.environment_of({"PYTHONPATH": "/a:/b"}, socket="x.sock", model="m")
    assert made["PYTHONPATH"].split(os.pathsep) == [str(SITE), "/a", "/b"]
    assert made["TIERD_SOCKET"] == str(Path("x.sock").absolute())
    assert made["TIERD_MODEL"] == "m"

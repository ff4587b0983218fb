"""Somebody who follows a page: types its commands, in order, on a node made for it.

The node is a namespace of mounts and processes of its own: /dev/nvme1n1 to /dev/nvme3n1 are loop
devices, /models holds tiny checkpoints with the real layouts, and what is written to /etc, /run,
/srv, /opt, /var/lib, /usr/local/bin or the checkout is gone with the page. Needs root. By hand,
for one page:

    python -m tests.docs docs/operating.md
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests import checkpoints
from tests.docs import commands
from tests.docs.commands import ROOT
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.docs.commands import Block, Command

OVERLAID = ("/etc", "/run", "/srv", "/opt", "/var/lib", "/usr/local/bin", str(ROOT))
DEVICES = ("/dev/nvme1n1", "/dev/nvme2n1", "/dev/nvme3n1")
DEVICE_BYTES = 64 << 20
MODELS = Path("/models")
TIMEOUT_S = 300.0
LOOK_S = 4.0  # at a command that goes on until it is killed
READY_S = 180.0
CONFIG = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384_006_168, 384_016_682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
}
WINDOWS = ProbedWindows(
    gpu="", engine="", model="", versions={}, date="2026-11-30", step_s={128: 0.0294},
    layers={1: {128: 0.00027}, 14: {128: 0.00935}},
)  # fmt: skip
SCRIPT = """\
import numpy as np
from tierd.gpu.client import Client, list_images

where = "/run/tierd/engine.sock"
images = list_images(where)
with Client.attach(where, images, engine="script", cache_rows=256, rows_max=64) as client:
    for image in images:
        out = np.empty((32, image.table.dim), np.uint16)
        for step in range(20):
            ids = np.arange(32) * (step + 1) % image.table.rows
            client.table(image.name).kick(ids)
            client.table(image.name).gather(ids, out)
"""


def shell(*words: str) -> None:
    """Run a program that must succeed."""
    subprocess.run(words, check=True, capture_output=True)


class Node:
    """The namespace's devices, checkpoints and processes."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.loops: list[str] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.made: list[Path] = []

    def build(self) -> None:
        """Make everything; this process lives in a namespace of its own."""
        shell("mount", "-t", "tmpfs", "-o", "size=2g", "none", str(self.work))
        for number, path in enumerate(OVERLAID):
            upper, scratch = self.work / f"upper{number}", self.work / f"scratch{number}"
            upper.mkdir()
            scratch.mkdir()
            options = f"lowerdir={path},upperdir={upper},workdir={scratch}"
            shell("mount", "-t", "overlay", "overlay", "-o", options, path)
        os.chdir(ROOT)
        for name in DEVICES:
            self._device(Path(name))
        if not MODELS.exists():
            MODELS.mkdir()
            self.made.append(MODELS)
        shell("mount", "-t", "tmpfs", "none", str(MODELS))
        checkpoints.engram(MODELS / "DeepSeek-V4.1", rows=2000, config=CONFIG)
        checkpoints.ple(MODELS / "Qwen4Exp")
        for script in ("script.py", "generate.py"):
            (ROOT / script).write_text(SCRIPT)
        (ROOT / "config.json").write_text(json.dumps(CONFIG))
        (ROOT / "windows.json").write_text(json.dumps(WINDOWS.to_json()))
        Path("/etc/tierd").mkdir(exist_ok=True)
        Path("/etc/tierd/tierd.toml").write_text('[devices]\npaths = ["/dev/nvme1n1"]\n')

    def _device(self, path: Path) -> None:
        image = self.work / path.name
        with image.open("wb") as file:
            file.truncate(DEVICE_BYTES)
        found = subprocess.run(
            ["losetup", "--show", "-f", str(image)], check=True, capture_output=True, text=True
        )
        self.loops.append(found.stdout.strip())
        if not path.exists():
            path.touch()
            self.made.append(path)
        shell("mount", "--bind", self.loops[-1], str(path))

    def close(self) -> None:
        """End what the page has started, and give the loop devices back."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for path in (*DEVICES, str(MODELS)):
            subprocess.run(["umount", "-l", path], check=False, capture_output=True)
        for loop in self.loops:
            subprocess.run(["losetup", "-d", loop], check=False, capture_output=True)
        for path in self.made:
            path.rmdir() if path.is_dir() else path.unlink()

    def type(self, text: str, *, endless: bool = False, code: int = 0) -> str:
        """Run a command as bash would; what went wrong, or ""."""
        behind = text.endswith("&")
        text = text.removesuffix("&").strip()
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the process may live on
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", text],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env=environment(),
        )  # fmt: skip
        self.processes.append(process)
        if behind:
            return self._until_ready(process, log)
        try:
            got = process.wait(LOOK_S if endless else TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT if endless else signal.SIGKILL)
            process.wait()
            return "" if endless else f"not done after {TIMEOUT_S:.0f} s\n{tail(log)}"
        if got == code and not endless:
            return ""
        return f"exit code {got}{' before it was killed' if endless else ''}\n{tail(log)}"

    def _until_ready(self, process: subprocess.Popen[str], log: object) -> str:
        """Wait until the daemon that was started answers."""
        deadline = time.monotonic() + READY_S
        while subprocess.run(
            ["tierd", "status"], check=False, capture_output=True, env=environment()
        ).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                return f"no daemon answers\n{tail(log)}"
        return ""


def environment() -> dict[str, str]:
    """The checkout's own commands before the system's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERD")}
    return {**kept, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "COLUMNS": "120"}


def tail(log: object) -> str:
    """The last lines that a command has printed."""
    log.seek(0)  # type: ignore[attr-defined]
    return "\n".join(log.read().splitlines()[-8:])  # type: ignore[attr-defined]


def follow(node: Node, block: Block) -> Iterator[tuple[Command, str]]:
    """Type a block; each command with what went wrong."""
    trouble = ""
    for text in block.first:
        if wrong := node.type(text):
            trouble = f"before the block, {text}: {wrong}"
    values = {}
    for name, text in block.values.items():
        found = subprocess.run(
            ["bash", "-c", text], check=False, capture_output=True, text=True, env=environment()
        )
        values[name] = found.stdout.strip()
    for command in block.commands:
        text = command.text
        for name, value in values.items():
            text = text.replace(name, value)
        if command.reason:
            yield command, ""
        else:
            yield command, trouble or node.type(text, endless=command.endless, code=command.code)


def main(page: str) -> None:
    """Follow one page; a JSON line for each command."""
    # Ended from outside, it still gives its loop devices back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Begun in the background of a shell, it would pass on that Ctrl-C means nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tierd-docs-") as name:
        node = Node(Path(name))
        try:
            node.build()
            for block in commands.blocks(ROOT / page):
                for command, wrong in follow(node, block):
                    found = {"line": command.line, "text": command.text, "reason": command.reason}
                    print(json.dumps({**found, "wrong": wrong}), flush=True)
        finally:
            node.close()
            os.chdir("/")
            for path in reversed((name, *OVERLAID)):
                subprocess.run(["umount", "-l", path], check=False, capture_output=True)


if __name__ == "__main__":
    main(sys.argv[1])

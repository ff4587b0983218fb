"""What the pages' tests look at: a daemon under load, ``tierd dashboard``, a browser."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import checkpoints, daemons
from tests.daemons import ROOT, Daemon, Node, make_node, running
from tierd.io.checkpoint import Checkpoint
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables
from tierd.types import ProbedWindows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser, ConsoleMessage, Page

daemons.START_TIMEOUT_S = 120.0  # a browser starts beside it
# A shell's background job ignores Ctrl-C, which what it starts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
CHROMIUM = "/usr/bin/chromium"
AXE = Path(__file__).with_name("axe.min.js")
ENGINE = "pages 1"
MODEL = "v41"
# A window between half of a read's time and far more than that, so that some tables are late.
FIRST_WINDOW_S, WINDOW_STEP_S = 150e-6, 40e-6


def chromium() -> str | None:
    """The browser that is there, None without one."""
    return CHROMIUM if Path(CHROMIUM).exists() else shutil.which("chromium")


def node_of(
    directory: Path, *, layers: int = 4, devices: int = 1, model: str = MODEL, rows: int = 4000
) -> Node:
    """A node with a table a layer; further devices are formatted, with one table each."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = tuple(range(1, layers + 1))
    models = {}
    if layers:
        models[model] = checkpoints.engram(directory / "checkpoint", rows=rows, layers=numbers)
    node = make_node(directory, models, size=max(16, 4 * layers) << 20)
    for number in range(1, devices):
        path = directory / f"device{number}.img"
        small = checkpoints.engram(directory / f"small{number}", rows=200, layers=(number,))
        with Store.format(path, size=8 << 20) as store:
            source = Checkpoint.open(small.path)
            stage(store, source, find_tables(source), model=f"small{number}")
    return node


def devices_of(node: Node) -> list[str]:
    """The node's further devices, as words for ``tierd serve``."""
    found = sorted(node.device.parent.glob("device[0-9].img"))
    return [word for path in found for word in ("--device", str(path))]


def windows_file(directory: Path, layers: int, engine: str = ENGINE, model: str = MODEL) -> Path:
    """A configuration that names windows as a probe would have measured them."""
    spread = {layer: {8: FIRST_WINDOW_S + layer * WINDOW_STEP_S} for layer in range(1, layers + 1)}
    probed = ProbedWindows(
        gpu="", engine=engine, model=model, versions={}, date="2026-11-30", step_s={8: 0.004},
        layers=spread,
    )  # fmt: skip
    (directory / "windows.json").write_text(json.dumps(probed.to_json()))
    path = directory / "tierd.toml"
    path.write_text(f'[controller]\ninterval_ms = 200\nwindows = "{directory}/windows.json"\n')
    return path


@contextlib.contextmanager
def engines(
    node: Node, *, ranks: int = 1, steps_per_s: float = 50, name: str = ENGINE, model: str = MODEL
) -> Iterator[None]:
    """Engines that step until the end."""
    started = []
    try:
        for rank in range(ranks):
            words = (node.engine_socket, name, model, rank, ranks, steps_per_s)
            command = [sys.executable, "-m", "tests.pages.engine", *map(str, words)]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        for engine in started:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "attached\n"
        yield
    finally:
        for engine in started:
            engine.kill()
            engine.wait()
            assert engine.stdout is not None
            engine.stdout.close()


class Door:
    """A running ``tierd dashboard``.

    Attributes:
        origin: scheme, host and port of its addresses.
    """

    origin = ""

    def __init__(self, node: Node, *, port: int = 0) -> None:
        command = [
            sys.executable, "-m", "tierd.cli", "dashboard", "--json", "--port", str(port),
            "--api-socket", str(node.api_socket),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def url(self) -> str:
        """The next address that lets one browser in."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "tierd dashboard ended"
        url = str(json.loads(line)["url"])
        self.origin = url.partition("/#")[0]
        return url

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def door(node: Node) -> Iterator[Door]:
    made = Door(node)
    try:
        yield made
    finally:
        made.close()


@dataclasses.dataclass
class Tab:
    """A page and what went wrong in it."""

    page: Page
    errors: list[str]
    received: list[int] = dataclasses.field(default_factory=list)

    def wait(self, script: str, timeout_s: float = 120.0) -> None:
        """Until a JavaScript expression is true; asked from here, for the page may not eval."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, (script, self.errors)
            self.page.wait_for_timeout(100)

    def until_live(self, tables: int) -> None:
        """Until the page serves and shows as many tables."""
        self.wait(
            "document.querySelector('#state')?.dataset.state === 'ok' && "
            f"document.querySelectorAll('#lanes tbody tr').length === {tables}"
        )

    def axe(self) -> list[str]:
        """What axe finds amiss, one line each."""
        # Through the debugger, so that the page's policy may forbid scripts of others.
        self.page.evaluate(AXE.read_text())
        found: dict[str, Any] = self.page.evaluate(
            "axe.run(document, {resultTypes: ['violations']})"
        )
        return [
            f"{one['id']}: {one['help']}: {node['target']} {node.get('failureSummary', '')}"
            for one in found["violations"]
            for node in one["nodes"]
        ]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Debian's Chromium, headless."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - not everybody has it

    flags = ["--disable-gpu", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's own sandbox does not start as root
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=chromium(), args=flags)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def tab(
    made: Browser, url: str, *, width: int = 1600, height: int = 1000, scheme: Any = "light"
) -> Iterator[Tab]:
    """A page at an address, in a profile of its own."""
    context = made.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    errors: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            errors.append(f"{message.type}: {message.text}")

    page.on("console", heard)
    page.on("pageerror", lambda error: errors.append(f"exception: {error}"))
    try:
        page.goto(url, wait_until="commit")
        yield Tab(page, errors)
    finally:
        context.close()


@contextlib.contextmanager
def served(
    node: Node, *options: object, ranks: int = 1, steps_per_s: float = 50
) -> Iterator[tuple[Daemon, Door]]:
    """A daemon under load and its door."""
    load = engines(node, ranks=ranks, steps_per_s=steps_per_s)
    with running(node, *devices_of(node), *options) as daemon, door(node) as made, load:
        yield daemon, made


def main(arguments: Sequence[str]) -> None:
    """Take screenshots of every theme and width: ``DIRECTORY [LAYERS [DEVICES]]``."""
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    layers, devices = (int(a) for a in (*arguments[1:], *("8", "2")[len(arguments) - 1 :]))
    with tempfile.TemporaryDirectory() as name, browser() as made:
        directory = Path(name)
        node = node_of(directory / "node", layers=layers, devices=devices)
        config = windows_file(directory, layers)
        with served(node, "--config", config, ranks=2) as (_, entrance):
            time.sleep(15)
            for scheme in ("light", "dark"):
                for width in (400, 900, 1600):
                    with tab(made, entrance.url(), width=width, scheme=scheme) as one:
                        one.until_live(layers + devices - 1)
                        time.sleep(12 if (scheme, width) == ("light", 400) else 3)
                        one.page.screenshot(path=out / f"{scheme}-{width}.png", full_page=True)
                        print(scheme, width, one.errors, one.axe(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

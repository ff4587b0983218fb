"""`make bench-dashboard`: the page in Chromium, into bench/results/dashboard.json.

``--docs`` runs every command of the documentation too (as root), ``--wheel`` builds the packages
and installs the wheel into an empty environment; ``--quick`` tries the page and writes nothing.
The times want a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.record import ROOT, record, save
from tests.docs.__main__ import follow_all
from tests.docs.commands import pages
from tests.pages.world import browser, node_of, served, tab, windows_file

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.pages.world import Door

LAYERS, RANKS = 16, 2
WIDTHS = (400, 900, 1600)
THEMES = ("light", "dark")
STALE = "document.querySelector('#state')?.dataset.state === 'stale'"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
PACKAGES = ("playwright",)


def look(made: Browser, entrance: Door) -> tuple[list[str], list[str]]:
    """What axe and the console say in both themes at each width."""
    violations, errors = [], []
    for theme in THEMES:
        for width in WIDTHS:
            with tab(made, entrance.url(), width=width, scheme=theme) as one:
                one.until_live(LAYERS)
                one.wait("document.querySelectorAll('#series canvas').length === 6")
                violations += [f"{theme} {width}: {line}" for line in one.axe()]
                errors += [f"{theme} {width}: {line}" for line in one.errors]
    return violations, errors


def load(made: Browser, entrance: Door) -> tuple[float, float]:
    """A load with an empty cache: KiB until everything is drawn, ms until the first paint."""
    with tab(made, "about:blank") as one:
        session = one.page.context.new_cdp_session(one.page)
        session.send("Network.enable")
        received = {"bytes": 0}

        def count(event: dict[str, Any]) -> None:
            received["bytes"] += event["encodedDataLength"]

        session.on("Network.dataReceived", count)
        one.page.goto(entrance.url(), wait_until="commit")
        one.until_live(LAYERS)
        one.wait("document.querySelectorAll('#series canvas').length === 6")
        one.wait(f"({PAINT}) !== null")
        return received["bytes"] / 1024, float(one.page.evaluate(PAINT))


def stale(made: Browser, entrance: Door, pid: int) -> float:
    """Seconds from the stop of the daemon until the page says so."""
    with tab(made, entrance.url()) as one:
        one.until_live(LAYERS)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            one.wait(STALE)
            return time.monotonic() - began
        finally:
            os.kill(pid, signal.SIGCONT)


def page(repeats: int) -> list[dict[str, Any]]:
    """Everything about the page."""
    with tempfile.TemporaryDirectory() as name, browser() as made:
        directory = Path(name)
        node = node_of(directory / "node", layers=LAYERS)
        config = windows_file(directory, LAYERS)
        with served(node, "--config", config, ranks=RANKS) as (daemon, entrance):
            violations, errors = look(made, entrance)
            loads = [load(made, entrance) for _ in range(repeats)]
            stales = [stale(made, entrance, daemon.pid) for _ in range(repeats)]
    for line in (*violations, *errors):
        print(line)
    kib, paints = [one[0] for one in loads], [one[1] for one in loads]
    rig = f"{LAYERS} tables, {RANKS} engine ranks"
    views = len(THEMES) * len(WIDTHS)
    return [
        found(
            "transfer_kib", max(kib), "KiB", len(kib),
            f"{min(kib):.1f} to {max(kib):.1f} KiB, empty cache; {rig}",
        ),
        found(
            "first_paint_ms", statistics.median(paints), "ms", len(paints),
            f"{min(paints):.0f} to {max(paints):.0f} ms, first contentful paint, empty cache",
        ),
        found(
            "axe_violations", len(violations), "violations", views,
            f"{len(THEMES)} themes at widths {WIDTHS}; {rig}",
        ),
        found("console_errors", len(errors), "lines", views, "errors and warnings, likewise"),
        found(
            "stale_after_stop_s", max(stales), "s", len(stales),
            f"{min(stales):.2f} to {max(stales):.2f} s after SIGSTOP of the daemon",
        ),
    ]  # fmt: skip


def docs() -> list[dict[str, Any]]:
    """Every command that the pages show."""
    ran, failed, left = follow_all([path.relative_to(ROOT).as_posix() for path in pages()])
    note = f"{left} more are not run, each for a reason that stands beside it"
    return [
        found("doc_commands", ran, "commands", 1, note),
        found("doc_commands_failing", failed, "commands", 1, note),
    ]


def wheel() -> list[dict[str, Any]]:
    """Install of the wheel into an empty environment, to the first rows."""
    done = subprocess.run(
        ["tools/packages.sh"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    match = re.search(r"^wheel_smoke_s ([\d.]+)", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout
    return [
        found("wheel_smoke_s", float(match[1]), "s", 1, "venv, pip install, stage, serve, read")
    ]


def found(name: str, value: float, unit: str, repeats: int, spread: str) -> dict[str, Any]:
    """One record; a miss on a busy machine says how busy it was."""
    load, cores = os.getloadavg()[1], os.cpu_count() or 1
    limit = f"other work on the machine while this ran: a load of {load:.0f} on {cores} cores"
    return record(
        f"dashboard.{name}", value, unit=unit, command="make bench-dashboard", repeats=repeats,
        spread=f"{spread}; load {load:.0f}", packages=PACKAGES,
        limit=limit if load > cores else "see what the run has printed",
    )  # fmt: skip


def main() -> None:
    """Run the parts that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--docs", "--wheel", "--quick", "--no-page"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    wanted = parser.parse_args()
    records = [] if wanted.no_page else page(1 if wanted.quick else wanted.repeats)
    records += docs() if wanted.docs else []
    records += wheel() if wanted.wheel else []
    for one in records:
        print(f"{one['id']:34} {one['value']:>10.4g} {one['unit']:10} met={one['met']}")
    if not wanted.quick:
        print(save("dashboard", records))


if __name__ == "__main__":
    main()

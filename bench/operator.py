"""`make bench-operator`: the measures of the operator's surface, into bench/results/operator.json.

``--quick`` is a smoke run that writes nothing, ``--only NAME`` runs one part. The parts that take
times want a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from bench.undocumented import undocumented
from tests import checkpoints
from tests.daemons import Daemon, Node, make_node, running
from tierd.api import rest_client

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINES, STEPS_PER_S, POLLERS = 8, 200, 50
ROWS = 20_000
IMPORTS = """
from tierd.tools.lean import lean_imports
with lean_imports():
    from tierd import config, log
    from tierd.api.server import RestApi
    from tierd.daemon import service
from tierd.tools import doctor
"""
TOKEN = "0123456789abcdef0123456789abcdef"


def node_of_four(directory: Path) -> Node:
    """A device with four images."""
    tiny = checkpoints.engram(directory / "v41", rows=ROWS, layers=(1, 2, 7, 14))
    return make_node(directory, {"v41": tiny}, size=64 << 20)


@contextlib.contextmanager
def load(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A process of bench.operator_load."""
    command = [sys.executable, "-m", "bench.operator_load", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def rows_a_second(engine: subprocess.Popen[str], seconds: int) -> float:
    """Rows an engine gathers, from its next whole second on."""
    assert engine.stdout is not None
    engine.stdout.readline()
    return statistics.median(json.loads(engine.stdout.readline())["rows"] for _ in range(seconds))


def spread(values: list[float], unit: str) -> str:
    """Quartiles in words."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"quartiles {low:.4g}, {middle:.4g}, {high:.4g} {unit}"


# --- parts ---------------------------------------------------------------------------------------


def status(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """Time to answer /v1/status while engines run."""
    node = node_of_four(directory)
    with running(node), contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(load("engine", node.engine_socket, STEPS_PER_S))
            for _ in range(ENGINES)
        ]
        for engine in engines:
            rows_a_second(engine, 1)
        times = []
        machine = stack.enter_context(load("late", "-", 1 if quick else 15))
        for _ in range(50 if quick else 1500):
            began = time.perf_counter()
            state = rest_client.get(node.api_socket, "/v1/status")
            times.append((time.perf_counter() - began) * 1000)
            assert state["clients"] == ENGINES
            time.sleep(0.01)
        assert machine.stdout is not None
        lateness = json.loads(machine.stdout.readline())
    times.sort()
    detail = {
        "machine_late_ms": lateness,
        "p50_ms": statistics.median(times),
        "max_ms": times[-1],
        "steps": state["totals"]["steps"],
    }
    value = times[int(0.99 * len(times))]
    limit = (
        "the processors themselves stop: in the same run a process of the highest priority that "
        f"sleeps 2 ms at a time woke {lateness['p99']} ms late at p99, more than 10 ms late "
        f"{lateness['over_10_ms_a_second']:.1f} times a second (machine_late_ms): the pauses of a "
        "hypervisor's quota while both vCPUs are busy, which eight engines keep them"
    )
    return [
        _found(
            "operator.status_p99_ms", value, "ms", len(times), spread(times, "ms"), detail,
            limit if lateness["p99"] > 5 else None,
        )
    ]  # fmt: skip


def lookups(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """Rows a second of one engine, with and without pollers, in turns."""
    node = node_of_four(directory)
    seconds, rounds = (2, 2) if quick else (5, 9)
    alone, polled = [], []
    with running(node), load("engine", node.engine_socket, 0) as engine:
        rows_a_second(engine, 3)
        for _ in range(rounds):
            alone.append(rows_a_second(engine, seconds))
            with load("poll", node.api_socket, POLLERS):
                time.sleep(1)
                polled.append(rows_a_second(engine, seconds))
    losses = [100 * (1 - b / a) for a, b in zip(alone, polled, strict=True)]
    detail = {"alone_rows_per_s": statistics.median(alone), "polls_per_s": POLLERS}
    value = max(0.0, statistics.median(losses))
    return [_found("operator.lookup_loss_pct", value, "%", rounds, spread(losses, "%"), detail)]


def start(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """Time until help is printed, and until a daemon with four images is ready."""
    helps, clicks, readies = [], [], []
    for _ in range(3 if quick else 25):
        helps.append(1000 * seconds_of("-m", "tierd.cli", "--help"))
        clicks.append(1000 * seconds_of("-c", "import click"))
    click_ms = statistics.median(clicks)
    node, imports = node_of_four(directory), []
    for _ in range(2 if quick else 9):
        began = time.perf_counter()
        daemon = Daemon(node)
        readies.append(time.perf_counter() - began)
        daemon.stop()
        imports.append(seconds_of("-c", IMPORTS))
    import_s = statistics.median(imports)
    limit = (
        f"an interpreter that does nothing but make the daemon's imports (aiohttp, pydantic, "
        f"numpy, our own) takes {import_s:.2f} s by itself here, in turns with the daemon"
    )
    return [
        _found(
            "operator.help_ms", statistics.median(helps), "ms", len(helps), spread(helps, "ms"),
            {"import_click_ms": round(click_ms, 1)},
            f"python and `import click` alone take {click_ms:.0f} ms of it in the same run",
        ),
        _found(
            "operator.ready_s", statistics.median(readies), "s", len(readies),
            spread(readies, "s"), {"imports_s": round(import_s, 3)}, limit,
        ),
    ]  # fmt: skip


def seconds_of(*words: str) -> float:
    """What a run of the interpreter takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


def idle(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """CPU time and memory of a daemon whose one client takes no step."""
    from tierd.gpu.client import Client, list_images

    node = node_of_four(directory)
    seconds, shares = (2.0 if quick else 10.0), []
    with running(node) as daemon:
        images = list_images(node.engine_socket)
        options = {"engine": "bench", "cache_rows": 4096, "rows_max": 256}
        with Client.attach(node.engine_socket, images, **options):
            time.sleep(1)
            for _ in range(1 if quick else 3):
                before = cpu_s(daemon.pid)
                time.sleep(seconds)
                shares.append(100 * (cpu_s(daemon.pid) - before) / seconds)
            text = Path(f"/proc/{daemon.pid}/status").read_text()
    rss = int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]
    shared = int(re.search(r"RssShmem:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]
    each = f"{min(shares):.2f} to {max(shares):.2f} %"
    return [
        _found("operator.idle_cpu_pct", statistics.median(shares), "%", len(shares), each),
        _found("operator.idle_rss_mib", rss, "MiB", 1, "none: one look", {"shared_mib": shared}),
    ]


def cpu_s(pid: int) -> float:
    """CPU time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """Schemathesis against a live daemon's own OpenAPI document."""
    found = schemathesis(directory, examples=2 if quick else 330)
    common = {"repeats": 1, "spread": "none: a count", "detail": found}
    return [
        {"id": "operator.schemathesis_cases", "value": found["cases"], "unit": "cases", **common},
        {
            "id": "operator.schemathesis_failures",
            "value": found["failures"],
            "unit": "failures",
            **common,
        },
    ]


def schemathesis(directory: Path, *, examples: int, seed: int = 1) -> dict[str, Any]:
    """Run it; return cases, failures and what it printed about them."""
    node = make_node(directory, {"v41": checkpoints.engram(directory / "v41", rows=300)})
    token, config = directory / "token", directory / "tierd.toml"
    token.write_text(TOKEN)
    token.chmod(0o600)
    config.write_text(
        f'[api]\nlisten = "127.0.0.1:0"\ntoken_file = "{token}"\nrequests_per_s = 1000000\n'
    )
    with running(node, "--config", config) as daemon:
        serving = next(e for e in daemon.events() if e["event"] == "listening on TCP")
        base = f"http://{serving['api.listen']}"
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file"),
            *(str(ROOT / "tests/data/schemathesis.toml"), "run", f"{base}/openapi.json"),
            *("-H", f"Authorization: Bearer {TOKEN}", "-n", str(examples), "--seed", str(seed)),
            *("--no-color", "--continue-on-failure"),
        ]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert daemon.process.poll() is None, "the daemon has died"
        code = daemon.stop()
    match = re.search(r"(\d+) generated(?:, (\d+) found (\d+) unique failures)?", done.stdout)
    assert match is not None, done.stdout + done.stderr
    faults = [e for e in daemon.events() if e["event"] == "request failed"]
    failures = int(match[3] or 0)
    failed = failures or done.returncode or code or faults
    return {
        "cases": int(match[1]),
        "failures": failures + len(faults) + (code != 0),
        "seed": seed,
        **({"said": done.stdout[-6000:]} if failed else {}),
    }


def security(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """What systemd thinks of the unit's hardening."""
    del quick, directory
    command = ["systemd-analyze", "security", "--offline=true", "systemd/tierd.service"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    score = float(told.rpartition("exposure level for tierd.service:")[2].split()[0])
    return [_found("operator.systemd_security_score", score, "points", 1, "none: a rating")]


def words(quick: bool, directory: Path) -> list[dict[str, Any]]:
    """What an operator can meet and no page explains."""
    del quick, directory
    missing = undocumented()
    detail = {"missing": missing} if missing else None
    return [
        _found("operator.undocumented_items", len(missing), "items", 1, "none: a count", detail)
    ]


PARTS = {
    "status": status,
    "lookups": lookups,
    "start": start,
    "idle": idle,
    "fuzz": fuzz,
    "security": security,
    "words": words,
}


def _found(
    name: str,
    value: float,
    unit: str,
    repeats: int,
    spread_: str,
    detail: Any = None,
    limit: str | None = None,
) -> dict[str, Any]:
    return {
        "id": name, "value": round(value, 4), "unit": unit, "repeats": repeats,
        "spread": spread_, "detail": detail, "limit": limit,
    }  # fmt: skip


def main() -> int:
    """Run the parts and save their records; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smoke run; nothing is saved")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one part, repeatable")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    missed = 0
    for part in args.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="tierd-operator-", dir="/var/tmp") as scratch:
            for found in PARTS[part](args.quick, Path(scratch)):
                made = record(
                    found["id"],
                    found["value"],
                    unit=found["unit"],
                    command=f"python -m bench.operator --only {part}",
                    repeats=found["repeats"],
                    spread=found["spread"],
                    detail=found.get("detail"),
                    limit=found.get("limit"),
                    packages=("aiohttp", "pydantic", "schemathesis"),
                )
                missed += not made["met"]
                print(f"{made['id']}: {made['value']:g} {made['unit']}, met: {made['met']}")
                if not args.quick:
                    save("operator", [made])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-life`: what daemon and engines cost each other when one of them dies.

    python -m bench.life                    all of it, into bench/results/life.json (40 minutes)
    python -m bench.life --only attach      one part: soak, alarms, recovery, cost, attach
    python -m bench.life --only soak --report FILE...   from soaks that were run by hand
    python -m bench.life --only gpu --report FILE       from a line of ``python -m bench.gpu_life``

The soak is tests/chaos: real daemons, engines on the CPU twin that compare every row, and a model
whose tokens are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.record import record, save
from tests.chaos.world import World
from tests.daemons import Daemon, Node, engram_node, running
from tierd.api import rest_client
from tierd.gpu.client import Client, list_images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
KILLS = 1020
ALARMS = 2050
RECOVERIES = 7
CYCLES = 10_000
STEP_ROWS = 200
BLOCK_STEPS = 300
BLOCKS = 40
ROWS = 20_000
COMMANDS = {"gpu": "python -m bench.gpu_life"}  # where a part is measured elsewhere

Found = dict[str, Any]


def found(
    name: str, value: float, unit: str, *, repeats: int = 1, spread: str = "", **detail: Any
) -> Found:
    """Return one measure, before it becomes a record."""
    return {
        "id": f"life.{name}", "value": value, "unit": unit, "repeats": repeats,
        "spread": spread or "one run", "detail": detail or None,
    }  # fmt: skip


# --- soak ----------------------------------------------------------------------------------------


def soak(asked: argparse.Namespace) -> list[Found]:
    """Kill daemons in every phase until there were enough."""
    reports = asked.report
    if not reports:
        with tempfile.TemporaryDirectory() as name:
            report = Path(name) / "report"
            words = ["--kills", str(KILLS), "--tokens", "--report", report]
            subprocess.run(
                [sys.executable, "-m", "tests.chaos", *map(str, words)], cwd=ROOT, check=True
            )
            return from_reports([report])
    return from_reports(reports)


def from_reports(paths: Sequence[Path]) -> list[Found]:
    """Add up what soaks counted."""
    counts = [json.loads(path.read_text()) for path in paths]
    total = {key: sum(one[key] for one in counts) for key in counts[0] if key != "seed"}
    seeds = ", ".join(str(one["seed"]) for one in counts)
    detail = {**total, "seeds": seeds}
    return [
        found("kills", total["kills"], "kills", **detail),
        found("kills_with_delayed_reads", total["kills_with_delayed_reads"], "kills"),
        found("wrong_rows", total["wrong_rows"], "rows", compared=total["rows"]),
        found("hangs", total["hangs"], "hangs", cases=total["cases"]),
        found("tokens_differing", total["tokens_differing"], "tokens", compared=total["tokens"]),
    ]


# --- false alarms and recovery -------------------------------------------------------------------


@contextlib.contextmanager
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="tierd-life-") as name, World(Path(name), 1) as made:
        yield made


def alarms(asked: argparse.Namespace) -> list[Found]:
    """Make the guardian think the worst of a healthy daemon, step after step."""
    del asked
    with world() as node:
        node.start_daemon()
        node.start_engine()
        node.goes_on()
        node.phase("mid-step")
        node.board.set("alarms", ALARMS)
        rings = 2
        node.until(lambda: node.board.get("takeovers") >= rings * (ALARMS - 40), "alarms")
        node.check()
        takeovers = node.board.get("takeovers") // rings
        rows = node.counts.rows
    return [found("forced_false_takeovers", takeovers, "take-overs", rows_compared=rows, wrong=0)]


class Stepper:
    """A client whose steps miss, and how long they take."""

    def __init__(self, node: Node) -> None:
        images = list_images(node.engine_socket, wait_s=60)
        self.client = Client.attach(
            node.engine_socket, images, engine="bench", cache_rows=64, rows_max=256
        )
        self.tables = [self.client.table(image.name) for image in images]
        self.out = np.zeros((STEP_ROWS, self.tables[0].info.table.dim), np.uint16)
        self.rng = np.random.default_rng(1)

    def step(self) -> float:
        ids = self.rng.integers(0, ROWS, (len(self.tables), STEP_ROWS))
        began = time.perf_counter()
        for table, wanted in zip(self.tables, ids, strict=True):
            table.kick(wanted)
        for table, wanted in zip(self.tables, ids, strict=True):
            table.gather(wanted, self.out)
        return time.perf_counter() - began

    def median(self, steps: int) -> float:
        return statistics.median(self.step() for _ in range(steps))


def recovery(asked: argparse.Namespace) -> list[Found]:
    """From a cold ``tierd serve`` until the engine's steps take their normal time again."""
    del asked
    times: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        node = engram_node(Path(name), rows=ROWS)
        daemon = Daemon(node)
        try:
            stepper = Stepper(node)
            for _ in range(RECOVERIES):
                normal = stepper.median(200)
                daemon.close()
                stepper.step()
                began = time.monotonic()
                attaches = stepper.client.keeper.attaches
                daemon = Daemon(node)
                while stepper.client.keeper.attaches == attaches:
                    stepper.step()
                while stepper.median(5) > 1.5 * normal:
                    pass
                times.append(time.monotonic() - began)
            stepper.client.close()
        finally:
            daemon.close()
    spread = f"{min(times):.2f} to {max(times):.2f} s"
    return [found("recovery_s_max", max(times), "s", repeats=len(times), spread=spread)]


# --- what a guardian costs -----------------------------------------------------------------------


def cost(asked: argparse.Namespace) -> list[Found]:
    """Blocks of steps with the guardian looking and without, in turn, in one run."""
    del asked
    with tempfile.TemporaryDirectory() as name:
        node = engram_node(Path(name), rows=ROWS)
        with running(node):
            stepper = Stepper(node)
            stepper.median(BLOCK_STEPS)
            ratios = []
            for _ in range(BLOCKS):
                with_guardian = stepper.median(BLOCK_STEPS)
                with stepper.client.keeper.paused():
                    without = stepper.median(BLOCK_STEPS)
                again = stepper.median(BLOCK_STEPS)
                ratios.append((with_guardian + again) / 2 / without)
            stepper.client.close()
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, high = np.percentile(percent, [25, 75])
    value = statistics.median(percent)
    spread = f"quartiles {low:.2f} to {high:.2f} %"
    return [found("guardian_step_cost_pct", value, "%", repeats=BLOCKS, spread=spread)]


# --- attach cycles -------------------------------------------------------------------------------


def attach(asked: argparse.Namespace) -> list[Found]:
    """Attach, read and leave, many times; then look at what is left on both sides."""
    cycles = asked.cycles
    with tempfile.TemporaryDirectory() as name:
        node = engram_node(Path(name), rows=ROWS)
        with running(node) as daemon:
            for _ in range(300):  # what is made once is there
                cycle(node)
            before = [footprint(pid) for pid in ("self", daemon.pid)]
            series = metric_series(node)
            course = []  # of the daemon's private memory, so that a leak shows from a plateau
            for number in range(cycles):
                cycle(node)
                if (number + 1) % max(cycles // 10, 1) == 0:
                    course.append(round(footprint(daemon.pid)["rss"] / 2**20, 2))
            wait_until_gone(node)
            after = [footprint(pid) for pid in ("self", daemon.pid)]
            series_after = metric_series(node)
    grown = {
        key: sum(max(0, late[key] - early[key]) for early, late in zip(before, after, strict=True))
        for key in before[0]
    }
    records = [
        found("attach_cycles", cycles, "cycles"),
        found("leaked_fds", grown["fds"], "descriptors", before=before, after=after),
        found("leaked_shm_bytes", grown["shm"], "bytes"),
        found("rss_growth_mib", grown["rss"] / 2**20, "MiB", daemon_mib_each_tenth=course),
    ]
    if series >= 0:
        records.append(found("metric_series_growth", series_after - series, "series"))
    return records


def cycle(node: Node) -> None:
    images = list_images(node.engine_socket)
    with Client.attach(
        node.engine_socket, images, engine="bench", cache_rows=64, rows_max=64
    ) as client:
        table = client.table(images[0].name)
        table.gather(np.arange(5), np.zeros((5, table.info.table.dim), np.uint16))


def wait_until_gone(node: Node) -> None:
    while rest_client.get(node.api_socket, "/v1/clients")["clients"]:
        time.sleep(0.01)


def footprint(pid: int | str) -> dict[str, int]:
    """Return a process's descriptors, private memory and mapped memory files, in bytes."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssFile", "RssShmem")):
            fields[line.split(":")[0]] = int(line.split()[1]) * 1024
    mapped = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            mapped += end - start
    return {
        "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "rss": fields["RssAnon"],
        "shm": mapped,
    }


def metric_series(node: Node) -> int:
    """Return how many series /metrics has; -1 where the daemon has none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(node.api_socket))
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: tierd\r\nConnection: close\r\n\r\n")
        with sock.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    if b" 200 " not in head.splitlines()[0]:
        return -1
    return sum(line.startswith(b"tierd_") for line in body.splitlines())


def gpu(asked: argparse.Namespace) -> list[Found]:
    """Take over what bench.gpu_life printed on a machine with a GPU."""
    seen = json.loads(asked.report[0].read_text().splitlines()[-1])
    detail = {key: seen[key] for key in ("hold_gib", "wait_ms_p50", "wait_ms_max")}
    wrong = sum(one["wrong_rows"] for one in seen["engines"])
    return [
        found("gpu_kills", seen["kills"], "kills", wrong_rows=wrong),
        found("gpu_wait_ms_p99", seen["wait_ms_p99"], "ms", repeats=seen["kills"], **detail),
    ]


PARTS: dict[str, Callable[[argparse.Namespace], list[Found]]] = {
    "alarms": alarms, "recovery": recovery, "cost": cost, "attach": attach, "soak": soak,
    "gpu": gpu,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.life")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--report", type=Path, nargs="+", default=[])
    parser.add_argument("--cycles", type=int, default=CYCLES)
    parser.add_argument("--machine", help="where the GPU's report was made")
    parser.add_argument("--limit", help="what stands in the way of a bar that is missed")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    asked = parser.parse_args()
    missed = 0
    for part in asked.only or [name for name in PARTS if name != "gpu"]:
        records = []
        for one in PARTS[part](asked):
            command = COMMANDS.get(part, f"python -m bench.life --only {part}")
            made = record(
                one.pop("id"), one.pop("value"), command=command,
                limit=asked.limit, packages=("numpy",), machine_name=asked.machine, **one,
            )  # fmt: skip
            records.append(made)
            missed += not made["met"]
            print(f"{made['id']:32} {made['value']:>12.4g} {made['unit']:12} met {made['met']}")
        if not asked.dry:
            save("life", records)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kills under a captured graph: how long a GPU waits when the daemon's process is killed.

    python -m bench.gpu_life [--kills N] [--seconds S]      prints one raw line of JSON

Two engine processes replay a graph over two tables, 10 % of the ids missing, and compare every row
on the GPU. Their daemons are plain processes that speak the attach protocol with the core's Pump
and hold 8 GiB each; ``tierd serve`` itself is not used, so that the measure runs where there is no
pydantic or aiohttp. A killed one's successor waits for the device's lock, as the daemon does; it
has been started before, because filling 8 GiB takes longer than everything else. ``--device none``
tries the script on the CPU twin.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from tierd.gpu.client import Client
from tierd.gpu.tables import TableOptions
from tierd.io import _core, wire
from tierd.types import ImageInfo, RowFormat, TableKind, TableSpec

ROOT = Path(__file__).resolve().parents[1]
ROW_BYTES, DIM, PER_PAGE = 264, 256, 15
PAGES = 16384
ROWS = PAGES * PER_PAGE
STEP_IDS = 768
HOT_ROWS = 6000
COLD_IDS = STEP_IDS // 10
CACHE_ROWS = 32768
SPARES = 3
LEAST_STEPS = 10
MS = 1_000_000


# --- the daemon --------------------------------------------------------------------------------


class Daemon:
    """Answers hello and attach on a socket, with one pump; lives until it is killed."""

    def __init__(self, directory: Path, images: list[ImageInfo], hold_bytes: int) -> None:
        self.directory = directory
        self.images = images
        self.held = self._hold(hold_bytes)

    @staticmethod
    def _hold(size: int) -> mmap.mmap:
        """Fill memory with pages of 4 KiB: the more a process holds, the longer it dies."""
        held = mmap.mmap(-1, size)
        with contextlib.suppress(OSError):
            held.madvise(15)  # MADV_NOHUGEPAGE
        address = ctypes.addressof(ctypes.c_char.from_buffer(held))
        ctypes.memset(address, 1, size)
        return held

    def serve(self) -> None:
        device = os.open(self.directory / "table", os.O_RDWR)
        fcntl.flock(device, fcntl.LOCK_EX)  # the drain fence
        pump = _core.Pump(spin_us=200, park_us=50)
        number = pump.add_device(device)
        tables = [
            pump.add_table(
                image_id=image.image_id, generation=image.generation, row_bytes=ROW_BYTES,
                rows=ROWS, window_ns=(index + 1) * MS,
                extents=np.array([[0, PAGES, number, index * PAGES]], np.uint64),
            )
            for index, image in enumerate(self.images)
        ]  # fmt: skip
        pump.start()
        path = self.directory / "engine.sock"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen()
        while True:
            sock, _ = listener.accept()
            with contextlib.suppress(ConnectionError):
                while True:
                    self._answer(sock, pump, tables)

    def _answer(self, sock: socket.socket, pump: Any, tables: list[int]) -> None:
        message, fds = wire.receive(sock)
        if message["op"] != "attach":
            wire.send(sock, {"ok": True, "abi": wire.ABI, "pid": os.getpid(), "boot_id": "bench"})
            return
        channel = pump.add_channel(fds[0])
        wire.close_all(fds)
        for ring, table in enumerate(tables):
            pump.add_ring(channel, ring, table)
        text = json.dumps({"images": [_mapped(n, i) for n, i in enumerate(self.images)]}).encode()
        map_fd = os.memfd_create("map")
        os.write(map_fd, text)
        reader = os.open(self.directory / "table", os.O_RDONLY)
        answer = {
            "ok": True, "client": "bench", "map_bytes": len(text),
            "devices": [{"uuid": "one", "path": "table"}],
        }  # fmt: skip
        wire.send(sock, answer, [pump.wake_fd, map_fd, reader])
        wire.close_all([map_fd, reader])


def _mapped(index: int, image: ImageInfo) -> dict[str, Any]:
    extents = [[0, PAGES, index * PAGES]]
    return {
        "image_id": f"{image.image_id:016x}", "generation": image.generation,
        "row_bytes": ROW_BYTES, "rows": ROWS, "devices": [{"uuid": "one", "extents": extents}],
    }  # fmt: skip


def daemon_main(directory: Path, hold_gib: float) -> None:
    images = [ImageInfo.from_json(one) for one in json.loads((directory / "images").read_text())]
    daemon = Daemon(directory, images, int(hold_gib * 2**30))
    print("holds", flush=True)
    sys.stdin.readline()  # its turn
    daemon.serve()


class Spares:
    """Daemons that hold their memory already and wait for their turn."""

    def __init__(self, directory: Path, hold_gib: float) -> None:
        self._words = [
            sys.executable, "-m", "bench.gpu_life", "--daemon", str(directory),
            "--hold-gib", str(hold_gib),
        ]  # fmt: skip
        self._waiting: deque[subprocess.Popen[str]] = deque()
        for _ in range(SPARES):
            self._prepare()

    def _prepare(self) -> None:
        pipe = subprocess.PIPE
        self._waiting.append(
            subprocess.Popen(self._words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        )

    def start(self) -> subprocess.Popen[str]:
        """Let the one that has waited longest serve, and prepare another."""
        self._prepare()
        daemon = self._waiting.popleft()
        assert daemon.stdout is not None
        assert daemon.stdin is not None
        assert daemon.stdout.readline() == "holds\n"
        daemon.stdin.write("go\n")
        daemon.stdin.flush()
        return daemon

    @property
    def ready(self) -> bool:
        """Whether the next one holds its memory."""
        return bool(select.select([self._waiting[0].stdout], [], [], 0)[0])

    def close(self) -> None:
        for daemon in self._waiting:
            daemon.kill()
            daemon.wait()


# --- the engine --------------------------------------------------------------------------------


def make_tables(directory: Path) -> tuple[list[ImageInfo], list[np.ndarray[Any, Any]]]:
    """Write two images into one file; return what they are and their rows as bf16 bits."""
    rng = np.random.default_rng(1)
    images, right = [], []
    with (directory / "table").open("wb") as file:
        for index in range(2):
            rows = rng.integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
            payload = rows[:, :DIM]
            payload[(payload & 0x7F) == 0x7F] = 0x40
            rows[:, DIM:][rows[:, DIM:] == 255] = 127
            pages = np.zeros(PAGES * 4096, np.uint8)
            _core.pack_pages(rows.reshape(-1), ROW_BYTES, 0, 100 + index, 1, pages)
            file.write(pages.tobytes())
            right.append(_core.decode_rows(rows, DIM, "e4m3_e8m0"))
            table = TableSpec(
                f"layers.{index}", TableKind.ENGRAM, index, ROWS, DIM, ROW_BYTES,
                RowFormat.E4M3_E8M0, f"layers.{index}", (),
            )  # fmt: skip
            images.append(
                ImageInfo(100 + index, 1, "bench", table, "", "", "none", PER_PAGE, PAGES, 0.0)
            )
    (directory / "images").write_text(json.dumps([image.to_json() for image in images]))
    return images, right


class GpuSteps:
    """One captured graph: kick both tables, work a little, gather and compare each."""

    def __init__(self, client: Client, right: list[np.ndarray[Any, Any]], device: str) -> None:
        import torch

        self.torch = torch
        self.tables = [client.table(image.name) for image in client.attached]
        self.right = [torch.from_numpy(one.view(np.int16)).to(device) for one in right]
        self.ids = [torch.zeros(STEP_IDS, dtype=torch.int64, device=device) for _ in right]
        self.out = [torch.empty((STEP_IDS, DIM), dtype=torch.int16, device=device) for _ in right]
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.device = device
        self._choose()
        self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _choose(self) -> None:
        for ids in self.ids:
            ids.copy_(self.torch.randint(0, HOT_ROWS, (STEP_IDS,), device=self.device))
            cold = self.torch.randint(HOT_ROWS, ROWS, (COLD_IDS,), device=self.device)
            ids[:COLD_IDS].copy_(cold)

    def _step(self) -> None:
        for table, ids in zip(self.tables, self.ids, strict=True):
            table.kick(ids)
        for table, ids, out, right in zip(self.tables, self.ids, self.out, self.right, strict=True):
            self.torch.cuda._sleep(300_000)
            table.gather(ids, out)
            self.wrong += (out != right[ids]).any(dim=1).sum()

    def step(self) -> None:
        self._choose()
        self.graph.replay()

    def wrong_rows(self) -> int:
        return int(self.wrong.item())


class CpuSteps:
    """The same on the CPU twin."""

    def __init__(self, client: Client, right: list[np.ndarray[Any, Any]], device: str) -> None:
        del device
        self.tables = [client.table(image.name) for image in client.attached]
        self.right = right
        self.rng = np.random.default_rng(2)
        self.wrong = 0

    def step(self) -> None:
        ids = self.rng.integers(0, HOT_ROWS, (len(self.tables), STEP_IDS))
        ids[:, :COLD_IDS] = self.rng.integers(HOT_ROWS, ROWS, (len(self.tables), COLD_IDS))
        for table, wanted in zip(self.tables, ids, strict=True):
            table.kick(wanted)
        for table, wanted, right in zip(self.tables, ids, self.right, strict=True):
            out = np.empty((STEP_IDS, DIM), np.uint16)
            table.gather(wanted, out)
            self.wrong += int((out != right[wanted]).any(axis=1).sum())

    def wrong_rows(self) -> int:
        return self.wrong


@dataclasses.dataclass
class Waits:
    """The GPU's waits, a step at a time: both tables' stalls together."""

    tables: list[Any]
    before_ns: int = 0
    longest_ns: int = 0
    misses: int = 0
    lookups: int = 0

    def look(self) -> int:
        stats = [table.stats() for table in self.tables]
        stall_ns = sum(one["stall_ns"] for one in stats)
        self.misses = sum(one["misses"] + one["bypasses"] for one in stats)
        self.lookups = sum(one["lookups"] for one in stats)
        wait, self.before_ns = stall_ns - self.before_ns, stall_ns
        self.longest_ns = max(self.longest_ns, wait)
        return wait


def engine_main(asked: argparse.Namespace) -> dict[str, Any]:
    """Kill one daemon after another under a running graph; return what was seen."""
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        directory = Path(name)
        images, right = make_tables(directory)
        spares = Spares(directory, asked.hold_gib)
        daemon = spares.start()
        device = None if asked.device == "none" else asked.device
        client = Client.attach(
            directory / "engine.sock", images, engine="bench", cache_rows=CACHE_ROWS,
            rows_max=STEP_IDS, wait_s=120, options=TableOptions(device=device),
        )  # fmt: skip
        try:
            steps = (CpuSteps if device is None else GpuSteps)(client, right, asked.device)
            return _kill(asked, client, steps, spares, daemon)
        finally:
            client.close()
            spares.close()


def _kill(
    asked: argparse.Namespace, client: Client, steps: Any, spares: Spares, daemon: Any
) -> dict[str, Any]:
    waits = Waits(steps.tables)
    for _ in range(200):
        steps.step()
        waits.look()
    normal: list[int] = []
    longest: list[float] = []
    end = time.monotonic() + asked.seconds
    while len(longest) < asked.kills and time.monotonic() < end:
        for _ in range(LEAST_STEPS):
            steps.step()
            normal.append(waits.look())
        attaches = client.keeper.attaches
        steps.step()  # the kill comes in the middle of it
        daemon.send_signal(signal.SIGKILL)
        waits.longest_ns, done = 0, 0
        waits.look()
        successor = spares.start() if spares.ready else None
        while done < LEAST_STEPS or not _is_back(client, attaches):
            steps.step()
            waits.look()
            done += 1
            if successor is None and spares.ready:
                successor = spares.start()
        daemon.wait()
        daemon = successor
        longest.append(waits.longest_ns / MS)
    daemon.kill()
    daemon.wait()
    return {
        "kills": len(longest), "longest_ms": [round(one, 3) for one in longest],
        "wrong_rows": steps.wrong_rows(), "normal_wait_us": float(np.median(normal)) / 1000,
        "miss_ratio": waits.misses / max(1, waits.lookups),
        "takeovers": client.keeper.takeovers,
    }  # fmt: skip


def _is_back(client: Client, attaches: int) -> bool:
    if client.keeper.attaches == attaches:
        return False
    return not any(ring["serving"] for ring in client.keeper.guardian_stats["rings"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_life")
    parser.add_argument("--kills", type=int, default=220)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--hold-gib", type=float, default=8)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--daemon", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.daemon:
        daemon_main(asked.daemon, asked.hold_gib)
    elif asked.engine:
        print(json.dumps(engine_main(asked)))
    else:
        print(json.dumps(run_engines(asked)))


def run_engines(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the engines side by side and put what they saw together."""
    share = -(-asked.kills // asked.engines)
    words = [
        sys.executable, "-m", "bench.gpu_life", "--engine", "--kills", str(share),
        "--seconds", str(asked.seconds), "--hold-gib", str(asked.hold_gib),
        "--device", asked.device, "--directory", asked.directory,
    ]  # fmt: skip
    running = [
        subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(asked.engines)
    ]
    outputs = [engine.communicate()[0] for engine in running]
    if any(engine.returncode for engine in running):
        raise SystemExit("an engine failed")
    seen = [json.loads(text.splitlines()[-1]) for text in outputs]
    longest = sorted(wait for one in seen for wait in one.pop("longest_ms"))
    return {
        "kills": len(longest), "hold_gib": asked.hold_gib,
        "wait_ms_p50": longest[len(longest) // 2],
        "wait_ms_p90": longest[int(len(longest) * 0.9)],
        "wait_ms_p99": longest[min(len(longest) - 1, int(len(longest) * 0.99))],
        "wait_ms_max": longest[-1], "engines": seen,
    }  # fmt: skip


if __name__ == "__main__":
    main()

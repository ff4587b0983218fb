"""One engine rank on the CPU twin that compares every row it is given with the oracle's."""

from __future__ import annotations

import json
import mmap
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from tierd.errors import AttachError, RowError
from tierd.gpu.client import Client, list_images

PHASES = ("idle", "mid-step", "prefill", "staging", "attach")
FIELDS = (
    "phase",
    "stop",
    "steps",
    "rows",
    "wrong",
    "failed",
    "attaches",
    "gap_ns",
    "alarms",
    "takeovers",
)
CACHE_ROWS = 64
ROWS_MAX = 48
STEP_ROWS = 40
PREFILL_ROWS = 150
WAIT_S = 120.0
TIMEOUT_NS = 100 * 10**9


class Board:
    """Numbers that harness and engine share in a file, one writer each."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(FIELDS)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(FIELDS))

    def get(self, field: str) -> int:
        return int(struct.unpack_from("<Q", self._map, 8 * FIELDS.index(field))[0])

    def set(self, field: str, value: int) -> None:
        struct.pack_into("<Q", self._map, 8 * FIELDS.index(field), value)

    def add(self, field: str, value: int = 1) -> None:
        self.set(field, self.get(field) + value)


class Engine:
    """Steps over the tables of one model until the board says stop."""

    def __init__(self, socket_path: str, oracle: Path, board: Board, seed: int) -> None:
        self.path = socket_path
        self.board = board
        self.chance = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.right: dict[str, Any] = {
            file.stem: np.load(file, mmap_mode="r") for file in sorted(oracle.glob("*.npy"))
        }
        self.client: Client | None = None

    def attach(self) -> Client:
        if self.client is None:
            images = [
                image
                for image in list_images(self.path, wait_s=WAIT_S)
                if image.table.name in self.right
            ]
            self.client = Client.attach(
                self.path, images, engine="chaos", cache_rows=CACHE_ROWS, rows_max=ROWS_MAX,
                wait_s=WAIT_S,
            )  # fmt: skip
            for image in images:
                # A machine that does ten things at once is no hang; the harness looks for those.
                self.client.table(image.name)._twin.set_timeout(TIMEOUT_NS)
            self.board.add("attaches")
        return self.client

    def detach(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def step(self, rows: int) -> None:
        """Kick all tables, think, gather and compare."""
        client = self.attach()
        names = list(self.right)
        ids = [self.rng.integers(0, len(self.right[name]), rows) for name in names]
        began = time.monotonic_ns()
        try:
            for name, wanted in zip(names, ids, strict=True):
                client.table(name).kick(wanted)
            if self.chance.random() < 0.5:
                time.sleep(self.chance.random() * 0.001)
            for name, wanted in zip(names, ids, strict=True):
                right = self.right[name]
                out = np.full((rows, right.shape[1]), 0xA5A5, np.uint16)
                client.table(name).gather(wanted, out)
                wrong = int((out != right[wanted]).any(axis=1).sum())
                if wrong:
                    print(json.dumps({"wrong": wrong, "table": name}), flush=True)
                    self.board.add("wrong", wrong)
                self.board.add("rows", rows)
        except RowError as error:
            print(f"row error: {error}", flush=True)
            self.board.add("failed")
            return
        gap = time.monotonic_ns() - began
        if gap > self.board.get("gap_ns"):
            self.board.set("gap_ns", gap)
        self.board.add("steps")

    def run(self) -> None:
        alarms = 0
        while not self.board.get("stop"):
            phase = PHASES[self.board.get("phase")]
            try:
                if phase == "attach":
                    self.detach()
                if phase == "idle":
                    time.sleep(0.01)
                    self.step(1)
                else:
                    self.step(PREFILL_ROWS if phase == "prefill" else STEP_ROWS)
                while alarms < self.board.get("alarms"):
                    self.attach().keeper.alarm()
                    alarms += 1
                    self.step(STEP_ROWS)
                    self.board.set("takeovers", self.attach().keeper.takeovers)
            except AttachError as error:  # the daemon died in the middle of it
                print(f"attach: {error}", flush=True)
                self.client = None
                time.sleep(0.02)
        self.detach()


def main(socket_path: str, oracle: str, board: str, seed: str) -> None:
    """Run an engine until it is told to stop, or killed."""
    print(f"engine {os.getpid()} starts", flush=True)
    Engine(socket_path, Path(oracle), Board(Path(board)), int(seed)).run()

"""A server that plays a slower device: pages come at once, answers when the model says.

One process per ring polls its doorbell, copies the pages out of the table's file and holds the
answer back. Devices are shared between the processes: a burst starts when the device is free.

    python -m bench.held FD ENTRY FILE FIRST_PAGE PAGES MODEL SHARED     (started by Held)
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import time
from typing import Any, Self

import numpy as np

from tierd.io import _core

P = _core.protocol
EXTENT_PAGES = 512  # an image is striped over its devices in extents of 2 MiB


@dataclasses.dataclass(frozen=True)
class Model:
    """When a burst of n pages of one device is answered: base + n * per_page after it starts.

    The paper's disk, as one of four ranks sees it: 0.30 ms + 3.05 us a page.
    """

    base_us: float = 300.0
    page_us: float = 3.05
    devices: int = 1


REMOTE = Model(base_us=15.0, page_us=4096 / 12500.0)  # 15 us + bytes at 100 Gb/s


class Held:
    """The processes that serve a bed's rings."""

    def __init__(self, made: Any, models: list[Model]) -> None:
        """Serve ring i of the bed with models[i]; rings of equal models share devices."""
        self._shared = os.memfd_create("held")
        os.ftruncate(self._shared, 4096)
        self.words = np.frombuffer(mmap.mmap(self._shared, 4096), np.float64)
        self._processes = []
        os.set_inheritable(made.channel.fd, True)
        for ring, model in enumerate(models):
            given = {
                "fd": made.channel.fd, "shared": self._shared, "ring": ring,
                "entry": made.map.entry(ring), "file": str(made.file),
                "first": ring * made.pages, "pages": made.pages,
                "model": dataclasses.asdict(model),
            }  # fmt: skip
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.held", json.dumps(given)],
                    pass_fds=[made.channel.fd, self._shared],
                )
            )
        while self.words[16 : 16 + len(models)].sum() < len(models):
            time.sleep(0.01)

    def read_time_us(self, ring: int) -> float:
        """Mean time from doorbell to answer since the last call."""
        total, count = self.words[32 + 2 * ring], self.words[33 + 2 * ring]
        self.words[32 + 2 * ring : 34 + 2 * ring] = 0
        return float(total / count) if count else 0.0

    def close(self) -> None:
        self.words[31] = 1
        for process in self._processes:
            process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(given: dict[str, Any]) -> None:
    """Poll one ring until told to stop."""
    model, entry, ring = Model(**given["model"]), given["entry"], given["ring"]
    channel = np.frombuffer(mmap.mmap(given["fd"], 0), np.uint8)
    shared = np.frombuffer(mmap.mmap(given["shared"], 4096), np.float64)
    with open(given["file"], "rb") as file:
        # Populated, or the first look at every page would cost a fault.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        whole = np.frombuffer(memory, np.uint8)
    pages = whole.reshape(-1, 4096)[given["first"] : given["first"] + given["pages"]]
    control = channel[entry["control"] : entry["control"] + 1024]
    doorbell = control[P.OFFSET_DOORBELL :][:4].view("<u4")
    done = control[P.OFFSET_DONE_D :][:4].view("<u4")
    status = control[P.OFFSET_STATUS_D :][:64].view("<u8")
    size = int(P.descriptor_bytes(entry["rows_max"]))
    arena = channel[entry["arena_d"] :][: entry["arena_pages"] * 4096].reshape(-1, 4096)
    free = shared[: model.devices]
    last, parent, idle = int(done[0]), os.getppid(), 0
    shared[16 + ring] = 1
    while not shared[31]:
        if doorbell[0] == last:
            idle += 1
            if idle % 1_000_000 == 0 and os.getppid() != parent:
                return
            continue
        began = time.perf_counter() * 1e6
        last = (last + 1) & 0xFFFFFFFF
        at = entry["descriptors"] + last % 8 * size
        _, count, first, _ = channel[at : at + 16].view("<u4").tolist()
        listed = channel[at + 64 : at + 64 + 4 * count].view("<u4").astype(np.int64)
        due = began
        shares = np.bincount(listed // EXTENT_PAGES % model.devices, minlength=model.devices)
        for device, mine in enumerate(shares.tolist()):
            start = max(began, float(free[device]))
            free[device] = start + mine * model.page_us
            due = max(due, float(free[device]) + model.base_us)
        head = min(count, len(arena) - first)
        np.take(pages, listed[:head], axis=0, out=arena[first : first + head], mode="clip")
        if head < count:
            np.take(pages, listed[head:], axis=0, out=arena[: count - head], mode="clip")
        while time.perf_counter() * 1e6 < due:
            pass
        status[last % 8] = last << 32 | 1
        done[0] = last
        shared[32 + 2 * ring] += time.perf_counter() * 1e6 - began
        shared[33 + 2 * ring] += 1


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

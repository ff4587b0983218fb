"""Processes that the operator's measures run beside the daemon: engines and pollers.

python -m bench.operator_load engine SOCKET STEPS_PER_S     prints one JSON line a second
python -m bench.operator_load poll SOCKET CLIENTS           GET /v1/status, each once a second
python -m bench.operator_load late - SECONDS                how late the machine itself is
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time

import numpy as np

ROWS_A_STEP = 24
CACHE_ROWS = 4096


def engine(socket: str, steps_per_s: float) -> None:
    """Run steps at a rate (0: as fast as they go) and print the rows gathered each second."""
    from tierd.gpu.client import Client, list_images

    images = list_images(socket)[:2]
    options = {"engine": "bench", "cache_rows": CACHE_ROWS, "rows_max": 256}
    with Client.attach(socket, images, **options) as client:
        tables = [client.table(info.name) for info in images]
        rows, dim = images[0].table.rows, images[0].table.dim
        rng = np.random.default_rng(os.getpid())
        out = np.zeros((ROWS_A_STEP, dim), np.uint16)
        count, second, due = 0, time.monotonic() + 1, time.monotonic()
        while True:
            ids = rng.integers(0, rows, ROWS_A_STEP)
            for table in tables:
                table.kick(ids)
            for table in tables:
                table.gather(ids, out)
            count += len(tables) * ROWS_A_STEP
            now = time.monotonic()
            if now >= second:
                print(json.dumps({"rows": count}), flush=True)
                count, second = 0, now + 1
            if steps_per_s:
                due = max(due + 1 / steps_per_s, now - 0.1)
                time.sleep(max(0.0, due - time.monotonic()))


def poll(socket: str, clients: int) -> None:
    """Ask for the status, each client once a second on a connection of its own."""
    os.nice(19)  # the load's own cost is nobody's measure

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        await asyncio.sleep(number / clients)
        while True:
            writer.write(b"GET /v1/status HTTP/1.1\r\nHost: tierd\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            assert b" 200 " in head.split(b"\r\n")[0] + b" ", head
            await asyncio.sleep(1)

    async def everybody() -> None:
        await asyncio.gather(*(one(number) for number in range(clients)))

    asyncio.run(everybody())


def late(seconds: float) -> None:
    """Sleep 2 ms at a time at the highest priority; print by how much too long, one JSON line.

    Nothing runs before this process but the kernel and, on a virtual machine, what stops its
    processors from outside: no answer of any program can be more punctual.
    """
    with contextlib.suppress(PermissionError):
        os.nice(-20)
    found, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        time.sleep(0.002)
        found.append((time.perf_counter() - began - 0.002) * 1000)
    found.sort()
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    shown = {name: round(found[int(share * (len(found) - 1))], 2) for name, share in at.items()}
    print(json.dumps({**shown, "over_10_ms_a_second": sum(x > 10 for x in found) / seconds}))


if __name__ == "__main__":
    kind, where, number = sys.argv[1:]
    if kind == "engine":
        engine(where, float(number))
    elif kind == "poll":
        poll(where, int(number))
    else:
        late(float(number))

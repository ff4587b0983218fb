"""The two roles of two lab machines: one exports and is killed now and then, the others read.

    python -m tests.lab.rdma.roles export --kill-every 20
    python -m tests.lab.rdma.roles read --peer 10.9.0.1 --rows 100000 --kills 3 --instances 2

Both are tierd's own exporting and reading ends (tierd.daemon.by_verbs) and its pumps, without the
daemon around them, whose start takes half a minute in an emulated machine: what a daemon says by
REST goes over a plain socket here. Every page is compared with the reader's own copy, whoever
delivered it; a request that is not answered in time is a hang. `read` prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import signal
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.pump_rig import PAGE, Client, Image, Served
from tierd.daemon.by_verbs import VerbsExporter, VerbsReader
from tierd.errors import TierdError
from tierd.io import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAB = Path("/lab")
PORT = 9400
PAGES = 4000
ROWS_PER_PAGE = 15
BATCH = 200
HANG_S = 120
WINDOW_S = 5.0  # of a throughput
BACKOFF_S = (0.05, 2.0)
Status = _core.protocol.Status
Names = ("pages", "wrong_rows", "hangs", "failed", "connects", "remote_reads", "next_tier", "end")


def settings(timeout_us: int) -> Any:
    """What tierd.config would say."""
    port = {"device": "auto", "port": 0, "gid_index": -1}
    return SimpleNamespace(**port, queue_pairs=2, timeout_us=timeout_us)


# --- exporting ------------------------------------------------------------------------------------


def export(asked: argparse.Namespace) -> None:
    """Export, be killed and started again, until /lab/over exists."""
    image = Image.make(PAGES)
    kills = -1
    while not (LAB / "over").exists():
        kills += 1
        child = os.fork()
        if child == 0:
            serve(image.data.reshape(-1).copy(), asked.family)
        (LAB / "exporting").write_text(str(kills))
        due = time.monotonic() + asked.kill_every
        while not (LAB / "over").exists():
            if (LAB / "kill").exists() and time.monotonic() > due:
                break
            time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps({"kills": kills}))


def serve(data: NDArray[np.uint8], family: str) -> None:
    """The exporting process: one connection, and so one session, for each reader."""
    exporter = VerbsExporter.open(settings(0))
    region = exporter.register(SimpleNamespace(pages=data))
    with socket.create_server(
        ("", PORT), family=getattr(socket, family), reuse_port=True
    ) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=session, args=(exporter, region, connection)).start()


def session(exporter: VerbsExporter, region: Any, connection: socket.socket) -> None:
    with connection, connection.makefile("rw") as file:
        responders, answer = exporter.accept(json.loads(file.readline()))
        file.write(json.dumps({**answer, "places": region.places}) + "\n")
        file.flush()
        with contextlib.suppress(OSError):
            file.readline()  # until the reader goes
        for responder in responders:
            responder.close()


# --- reading --------------------------------------------------------------------------------------


class Reading:
    """A process that reads and compares; its counters are seen from outside."""

    def __init__(self, number: int, asked: argparse.Namespace) -> None:
        self._counters = np.frombuffer(mmap.mmap(-1, PAGE), np.int64)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(number, asked)
            finally:
                os._exit(1)

    def __getitem__(self, name: str) -> int:
        return int(self._counters[Names.index(name)])

    def _add(self, name: str, count: int = 1) -> None:
        self._counters[Names.index(name)] += count

    def _run(self, number: int, asked: argparse.Namespace) -> None:
        image = Image.make(PAGES)
        path = Path(f"/root/image{number}")
        served = Served(path, image, remote=True)
        device = served.pump.add_remote()
        table = served.pump.add_table(
            image_id=image.image_id, generation=1, row_bytes=264, rows=PAGES * ROWS_PER_PAGE,
            window_ns=1_000_000, extents=np.array([[0, PAGES, device, 0]], np.uint64),
            copies=[np.array([[0, PAGES, served.device, 0]], np.uint64)],
        )  # fmt: skip
        client = Client(served, 256, 1024, table=table)
        over = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(served.pump, device, asked, over))
        keeper.start()
        rng = np.random.default_rng(number)
        while not self["end"]:
            self._read(client, rng.integers(0, PAGES, BATCH))
            if self["hangs"]:
                break
            stats = served.pump.stats()
            reads = {one["device"]: one["reads"] - one["errors"] for one in stats["devices"]}
            self._counters[Names.index("remote_reads")] = reads.get(device, 0)
            self._counters[Names.index("next_tier")] = stats["next_tier"]
        over.set()
        keeper.join()
        os._exit(0 if served.pump.stop(10_000) else 2)

    def _read(self, client: Client, pages: NDArray[np.int64]) -> None:
        sequence = client.publish(pages)
        try:
            status = int(client.ring.wait(sequence, HANG_S * 1_000_000_000))
        except TimeoutError:
            self._add("hangs")
            return
        if status == Status.ok:
            got, wanted = client.ring.pages(sequence), client.image.data[pages]
            if not np.array_equal(got, wanted):
                self._add("wrong_rows", wrong_rows(got, wanted))
            self._add("pages", len(pages))
        else:
            self._add("failed")
        client.ring.retire(sequence)

    def _keep(
        self, pump: Any, device: int, asked: argparse.Namespace, over: threading.Event
    ) -> None:
        """What the daemon's thread of a peer does."""
        pause = BACKOFF_S[0]
        while not over.is_set():
            try:
                reader = VerbsReader(settings(asked.timeout_us), 128, 1)
                with socket.create_connection((asked.peer, PORT), timeout=5) as connection:
                    file = connection.makefile("rw")
                    file.write(json.dumps(reader.asks()) + "\n")
                    file.flush()
                    answer = json.loads(file.readline())
                    reader.connect(answer)
                    where = {device: [tuple(place) for place in answer["places"]]}
                    if pump.link_remote(reader.links[0], where):
                        self._add("connects")
                        pause = BACKOFF_S[0]
                    while reader.links[0].up and not over.wait(0.05):
                        pass
                    pump.drop_link(reader.links[0], "the reader stops")
            except (OSError, TierdError, ValueError):
                pass
            over.wait(pause)
            pause = min(2 * pause, BACKOFF_S[1])

    def throughput(self) -> float:
        """Pages a second, over a window."""
        before, started = self["pages"], time.monotonic()
        time.sleep(WINDOW_S)
        return (self["pages"] - before) / (time.monotonic() - started)

    def stop(self) -> dict[str, int]:
        self._counters[Names.index("end")] = 1
        _, status = os.waitpid(self.pid, 0)
        seen = {name: self[name] for name in Names if name != "end"}
        return {**seen, "rows": self["pages"] * ROWS_PER_PAGE, "exit": status}


def wrong_rows(got: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> int:
    """How many rows differ; a page whose rows are right and whose rest is not counts as one."""
    rows = ROWS_PER_PAGE * 264
    shape = (len(got), ROWS_PER_PAGE, 264)
    differ = (got[:, :rows].reshape(shape) != wanted[:, :rows].reshape(shape)).any(axis=2)
    return max(1, int(differ.sum()))


def flap(seconds: float) -> None:
    """Take the network device down for a while."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    time.sleep(seconds)
    subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)


def read(asked: argparse.Namespace) -> None:
    """Read and compare until there are enough rows, flaps and kills."""
    readings = [Reading(number, asked) for number in range(asked.instances)]
    started = time.monotonic()

    def wait_for(condition: Any) -> None:
        while not condition() and not any(one["hangs"] for one in readings):
            assert time.monotonic() - started < asked.limit_s, [
                {name: one[name] for name in Names} for one in readings
            ]
            time.sleep(0.1)

    wait_for(lambda: all(one["connects"] for one in readings))
    ratios = []
    for number in range(asked.flaps):
        before = readings[0].throughput()
        flap(1.0 if number % 2 else 0.2)
        time.sleep(asked.settle)
        ratios.append(readings[0].throughput() / before)
    first = kills()
    (LAB / "kill").write_text("")
    wait_for(
        lambda: (
            kills() >= first + asked.kills
            # A busy emulated machine may not come back before the next kill.
            and all(one["connects"] > asked.kills for one in readings)
            and sum(one["pages"] for one in readings) * ROWS_PER_PAGE >= asked.rows
        )
    )
    (LAB / "kill").unlink()
    seen = [one.stop() for one in readings]
    port = VerbsReader(settings(asked.timeout_us), 128, 1).asks()["port"]
    out = {
        "instances": seen,
        "flap_ratios": [round(ratio, 4) for ratio in ratios],
        "median_ratio": statistics.median(ratios) if ratios else None,
        "kills": kills(),
        "mtu": port["mtu"],
        "gid": port["gids"][0]["value"],
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(out))


def kills() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((LAB / "exporting").read_text())
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(required=True)
    exporting = roles.add_parser("export")
    exporting.add_argument("--kill-every", type=float, default=20)
    exporting.add_argument("--family", default="AF_INET", choices=["AF_INET", "AF_INET6"])
    exporting.set_defaults(run=export)
    reading = roles.add_parser("read")
    reading.add_argument("--peer", required=True)
    reading.add_argument("--rows", type=int, default=0)
    reading.add_argument("--flaps", type=int, default=0)
    reading.add_argument("--settle", type=float, default=10.0, help="seconds after a flap")
    reading.add_argument("--kills", type=int, default=0)
    reading.add_argument("--instances", type=int, default=1)
    reading.add_argument("--timeout-us", type=int, default=2_000_000)
    reading.add_argument("--limit-s", type=float, default=900)
    reading.set_defaults(run=read)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()

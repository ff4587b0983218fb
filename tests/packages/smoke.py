"""First rows from an installed tierd: stage a tiny table, serve it, compare every row.

Run by tools/packages.sh with the Python of an environment that holds the wheel and nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the checkpoint's writer alone
import checkpoints

import tierd
from tierd.gpu.client import Client, list_images

TIERD = Path(sys.executable).with_name("tierd")
ROWS = 5000


def run(*words: object) -> str:
    """Run the installed command; its output."""
    return subprocess.run(
        [TIERD, *map(str, words)], check=True, capture_output=True, text=True
    ).stdout


def ready(daemon: subprocess.Popen[bytes], notices: socket.socket) -> None:
    """Wait until the daemon tells that it serves."""
    notices.settimeout(0.5)
    while daemon.poll() is None:
        try:
            if b"READY=1" in notices.recv(4096):
                return
        except TimeoutError:
            continue
    sys.exit(f"tierd serve ended with {daemon.returncode}")


def compare(engine_socket: Path, expected: np.ndarray) -> int:
    """Read every row of the one table in random order; the number of rows compared."""
    ids = np.random.default_rng(1).permutation(len(expected)).astype(np.int64)
    images = list_images(engine_socket)
    with Client.attach(
        engine_socket, images, engine="smoke", cache_rows=1024, rows_max=1000
    ) as client:
        table = client.table("model.layers.3.lookup")
        for chunk in np.split(ids, range(500, len(ids), 500)):
            out = np.empty((len(chunk), expected.shape[1] // 2), dtype=np.uint16)  # bf16's bits
            table.kick(chunk)
            table.gather(chunk, out)
            np.testing.assert_array_equal(out.view(np.uint8), expected[chunk])
    return len(ids)


def main() -> None:
    """Fail unless every row came through."""
    if Path(tierd.__file__).is_relative_to(Path(__file__).resolve().parents[2]):
        sys.exit("this is the checkout's tierd, not an installed one")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tiny = checkpoints.plain(work / "model", rows=ROWS)
        device = work / "rows.img"
        run("format", device, "--size", "16MiB")
        run("stage", tiny.path, "--device", device, "--tensor", "model.layers.3.lookup.weight")
        run("verify", "--device", device, "--full")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.bind(str(work / "notify"))
            daemon = subprocess.Popen(
                [TIERD, "serve", "--dir", work, "--device", device],
                stderr=subprocess.DEVNULL,
                env={**os.environ, "NOTIFY_SOCKET": str(work / "notify")},
            )
            try:
                ready(daemon, notices)
                compared = compare(work / "engine.sock", next(iter(tiny.tables.values())))
                run("status", "--api-socket", work / "api.sock")
            finally:
                daemon.send_signal(signal.SIGTERM)
                code = daemon.wait(20)
    if code:
        sys.exit(f"tierd serve ended with {code}")
    print(f"smoke: {compared} rows read through the installed wheel, none different")


if __name__ == "__main__":
    main()

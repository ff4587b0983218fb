"""Block devices for tests: loop devices over tmpfs and over a file system that fails on demand."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")


def why_not() -> str:
    """Why there can be no lab here; empty if there can."""
    if os.geteuid() != 0:
        return "loop devices and mounts need root"
    for path in ("/dev/loop-control", "/dev/fuse"):
        if not os.path.exists(path):
            return f"there is no {path} here"
    return ""


@contextlib.contextmanager
def loop(path: Path, *, sector: int = 512, options: tuple[str, ...] = ()) -> Iterator[str]:
    """A loop device over ``path``, with direct I/O where the file can do it."""
    words = ["losetup", "--find", "--show", "--direct-io=on", "--sector-size", str(sector)]
    done = subprocess.run([*words, *options, path], capture_output=True, text=True, check=False)
    if done.returncode != 0:  # tmpfs had no O_DIRECT before 6.6
        words.remove("--direct-io=on")
        done = subprocess.run([*words, *options, path], capture_output=True, text=True, check=True)
    device = done.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


class BadDisk:
    """A loop device over :mod:`tests.lab.faultfs`.

    Attributes:
        path: the block device.
        backing: the file below everything, for a look at what is really there.
    """

    def __init__(self, path: str, backing: Path, server: subprocess.Popen[str]) -> None:
        self.path = path
        self.backing = backing
        self._server = server

    def fail(self, **faults: Any) -> dict[str, int]:
        """Set the faults, all of them anew; return counts since the last call."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(faults) + "\n")
        self._server.stdin.flush()
        counts: dict[str, int] = json.loads(self._server.stdout.readline())
        return counts


@contextlib.contextmanager
def bad_disk(folder: Path, size: int, *, sector: int = 512, name: str = "bad") -> Iterator[BadDisk]:
    """A disk of ``size`` bytes; its faults begin with none.

    Raises:
        OSError: no file system can be mounted here, though root asks.
    """
    backing, mount = folder / f"{name}.img", folder / f"{name}.mount"
    mount.mkdir()
    with backing.open("xb") as file:
        file.truncate(size)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.lab.faultfs", backing, mount],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            raise OSError("a FUSE file system cannot be mounted here")
        with loop(mount / "disk", sector=sector) as device:
            yield BadDisk(device, backing, server)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(20)
        if server.stdout is not None:
            server.stdout.close()

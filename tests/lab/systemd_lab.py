"""A real systemd as PID 1, on an overlay of this machine's own root, in about two seconds.

    with Lab(binds=["/dev/loop3"]) as lab:
        lab.run("systemctl start tierd")

systemd-nspawn boots it; it has its own processes, network (loopback only) and /run, and what it
writes is gone when it ends. Needs root and the Debian packages systemd, systemd-container and
dbus, which are installed if they are missing. Limits: no udev, no kernel of its own, and where the
host mounts cgroups v1, MemoryMax and the like are not enforced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

BOOT_S = 30.0
# Of the host's own services none is started; these would only wait for hardware.
MASKED = (
    *("systemd-timesyncd", "systemd-udevd", "systemd-udev-trigger", "systemd-firstboot"),
    *("systemd-networkd-wait-online", "ldconfig", "systemd-update-done", "systemd-sysctl"),
    *("systemd-remount-fs", "systemd-modules-load", "systemd-udev-settle"),
)
_TARGET = "[Unit]\n{0}=sysinit.target dbus.socket\nAfter=sysinit.target dbus.socket\n"


class Lab:
    """One booted machine.

    Attributes:
        root: its root directory, as the host sees it.
    """

    def __init__(self, *, binds: Sequence[str] = ()) -> None:
        """Boot.

        Args:
            binds: paths that it shares with the host, read-write; ``FROM:TO`` under another name.
        """
        _require_packages()
        self._stack = contextlib.ExitStack()
        try:
            self.root = self._make_root()
            self._leader = self._boot(binds)
        except BaseException:
            self._stack.close()
            raise

    def run(self, command: str, *, check: bool = True, timeout_s: float = 60) -> str:
        """Run a command by bash as root inside; return what it printed on both streams.

        Raises:
            AssertionError: it failed, and ``check`` is set; the text has its output.
        """
        inside = ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "--"]
        environ = ["env", "-i", f"PATH={os.environ['PATH']}", "HOME=/root", "LANG=C.UTF-8"]
        done = subprocess.run(
            [*inside, *environ, "bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def until(self, command: str, timeout_s: float = 30) -> None:
        """Repeat a command until it succeeds."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AssertionError):
                self.run(command)
                return
            assert time.monotonic() < deadline, f"{command}: not within {timeout_s} s"
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make_root(self) -> Path:
        work = Path(tempfile.mkdtemp(prefix="tierd-lab-", dir="/var/tmp"))
        self._stack.callback(shutil.rmtree, work, ignore_errors=True)
        _mount("-t", "tmpfs", "-o", "size=2g,mode=755", "lab", work)
        self._stack.callback(_unmount, work)
        for name in ("upper", "work", "root"):
            (work / name).mkdir()
        root = work / "root"
        layers = f"lowerdir=/,upperdir={work}/upper,workdir={work}/work"
        _mount("-t", "overlay", "-o", layers, "lab", root)
        self._stack.callback(_unmount, root)
        shutil.rmtree(root / "var/log/journal", ignore_errors=True)
        (root / "etc/fstab").unlink(missing_ok=True)
        (root / "etc/machine-id").write_text("")
        units = root / "etc/systemd/system"
        target = _TARGET.format("Requires") + "AllowIsolate=yes\n"
        units.mkdir(parents=True, exist_ok=True)
        (units / "lab.target").write_text(target)
        _link(units / "default.target", "lab.target")
        for name in MASKED:
            _link(units / f"{name}.service", "/dev/null")
        for name in ("systemd-udevd-control", "systemd-udevd-kernel"):
            _link(units / f"{name}.socket", "/dev/null")
        return root

    def _boot(self, binds: Sequence[str]) -> int:
        """Start nspawn; return the pid of the systemd in it."""
        command = [
            *("systemd-nspawn", "-q", "--boot", "--register=no", "--keep-unit", "--console=pipe"),
            *("--capability=all", "--private-network", "-D", str(self.root)),
            *(f"--bind={bind}" for bind in binds),
            f"--machine=tierd-lab-{os.getpid()}",
        ]
        console = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SYSTEMD_SECCOMP": "0"},
            start_new_session=True,
        )
        self._stack.callback(self._power_off, process)
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline and process.poll() is None:
            for child in _children(process.pid):
                if Path(f"/proc/{child}/root/run/systemd/private").is_socket():
                    self._leader = child
                    self.run("systemctl is-system-running --wait", check=False)
                    return child
            time.sleep(0.05)
        console.seek(0)
        raise AssertionError(f"the lab does not boot:\n{console.read()}")

    def _power_off(self, process: subprocess.Popen[bytes]) -> None:
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGRTMIN + 4)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _require_packages() -> None:
    if shutil.which("systemd-nspawn"):
        return
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    packages = ["systemd", "systemd-container", "dbus"]
    subprocess.run(["apt-get", "update", "-qq"], env=environ, check=True)
    subprocess.run([*install, *packages], env=environ, check=True, stdout=subprocess.DEVNULL)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        return [int(word) for word in text.read_text().split()]
    return []


def _link(path: Path, to: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def _mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=False)

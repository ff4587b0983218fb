"""Small virtual machines with a real RDMA verbs stack (soft-RoCE), one alone or two on one wire.

    with machines(2) as (server, client):
        server.run("ibv_devinfo")

Each boots in some 5 s (30 s where the host is busy): Debian's kernel under QEMU, with or without
KVM, its root a memory overlay over this machine's own root, so the project's environment runs
inside. Needs root, x86-64 and Debian's packages (setup.sh fetches what is missing, once). Times
measured inside say nothing about hardware.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("TIERD_RDMA_LAB", "/var/tmp/tierd-rdma-lab"))
BOOT_S = 600.0
LOOK_S = 0.02
MEMORY_MIB = 1024

# Runs one command after the other: /lab/NAME/N.sh appears, N.rc is written when it is done.
_AGENT = """
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mkdir -p /run/lock /tmp
ip link set lo up
modprobe -a virtio_net ib_uverbs rdma_ucm rdma_rxe
cd /lab/{name}
# A pause without a process, which an emulated machine would be busy with.
mkfifo /run/quiet
exec {{quiet}}<>/run/quiet
echo 0 > booted
n=0
while true; do
    if [ -e stop ]; then break; fi
    if [ -e $n.sh ]; then
        bash ./$n.sh > $n.out 2>&1 < /dev/null
        echo $? > $n.tmp; mv $n.tmp $n.rc
        n=$((n + 1))
    else
        read -t 0.05 -u $quiet
    fi
done
echo o > /proc/sysrq-trigger
sleep 60
"""

# Soft-RoCE on a network device; an MTU of 4,096 needs 4,200 below it.
ROCE = """
ip link set {netdev} mtu {mtu} up
ip addr add {address} dev {netdev} {options}
rdma link add rxe0 type rxe netdev {netdev}
for i in $(seq 300); do
    grep -l {gid} /sys/class/infiniband/rxe0/ports/1/gids/* >/dev/null 2>&1 && break
    sleep 0.1
done
grep -H -v 0000:0000:0000:0000:0000:0000:0000:0000 /sys/class/infiniband/rxe0/ports/1/gids/*
"""


def why_not() -> str:
    """Why there can be no lab here; empty if there can."""
    if os.geteuid() != 0:
        return "the RDMA lab needs root"
    if platform.machine() != "x86_64":
        return f"the RDMA lab has a kernel for x86-64 only, this is {platform.machine()}"
    if (CACHE / "ready").exists() and shutil.which("qemu-system-x86_64"):
        return ""
    if shutil.which("apt-get") is None:
        return "the RDMA lab needs Debian's packages, and there is no apt-get"
    words = ["bash", str(HERE / "setup.sh"), str(CACHE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"the RDMA lab cannot be set up: {last}"
    return ""


@dataclasses.dataclass
class Wire:
    """A Unix socket that two machines' network devices meet at."""

    path: Path
    listens: bool


class Machine:
    """One booted machine.

    Attributes:
        lab: /lab inside, of all machines; both sides may write there.
        folder: /lab/NAME inside.
    """

    def __init__(self, lab: Path, name: str, wire: Wire | None, memory_mib: int) -> None:
        """Start to boot."""
        self.name = name
        self.lab = lab
        self.folder = lab / name
        self.folder.mkdir()
        (self.folder / "agent.sh").write_text(_AGENT.format(name=name))
        self._next = 0
        self._console = (self.folder / "console").open("wb")
        self._process = subprocess.Popen(
            self._command(lab, wire, memory_mib),
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _command(self, lab: Path, wire: Wire | None, memory_mib: int) -> list[str]:
        cpu = Path("/proc/cpuinfo").read_text()
        mhz = next((x.split(":")[1] for x in cpu.splitlines() if x.startswith("cpu MHz")), "2000")
        # Emulated, the guest's time stamp counter is the host's: it is told the rate, since
        # measuring it on a busy host would go wrong by a factor; so would the check of the timer.
        append = (
            f"console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr net.ifnames=0 "
            f"no_timer_check tsc=reliable tsc_early_khz={int(float(mhz) * 1000)} lab={self.name}"
        )
        kvm = any(flag in cpu.split() for flag in ("vmx", "svm")) and os.access("/dev/kvm", os.W_OK)
        words = ["qemu-system-x86_64"]
        words += ["-accel", "kvm", "-cpu", "host"] if kvm else ["-accel", "tcg,thread=multi"]
        words += [] if kvm else ["-cpu", "max"]
        # One alone has two CPUs; of two, each has one.
        words += [
            "-smp",
            "2" if wire is None else "1",
            "-m",
            str(memory_mib),
            "-M",
            "q35",
            "-nodefaults",
            "-no-reboot",
        ]
        words += ["-display", "none", "-serial", "stdio", "-monitor", "none"]
        words += ["-kernel", str(CACHE / "vmlinux"), "-initrd", str(CACHE / "initrd.gz")]
        words += ["-append", append]
        modules = CACHE / "kernel/lib/modules"
        for tag, path, mode in (
            ("host", "/", ",readonly=on"),
            ("lab", str(lab), ""),
            ("kernel", str(modules), ",readonly=on"),
        ):
            options = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap"
            words += ["-virtfs", options + mode]
        if wire is not None:
            side = "on" if wire.listens else "off"
            net = f"stream,id=n,server={side},addr.type=unix,addr.path={wire.path}"
            mac = f"52:54:00:00:00:0{1 if wire.listens else 2}"
            words += ["-netdev", net, "-device", f"virtio-net-pci,netdev=n,romfile=,mac={mac}"]
        return words

    def wait_booted(self) -> None:
        """Wait until commands can run."""
        self._await(self.folder / "booted", BOOT_S, "it does not boot")

    def start(self, command: str) -> int:
        """Give a command to bash; return its number for :meth:`finish`. One runs at a time."""
        number, self._next = self._next, self._next + 1
        hidden = self.folder / f".{number}.sh"
        hidden.write_text(command)
        hidden.rename(self.folder / f"{number}.sh")
        return number

    def has_finished(self, number: int) -> bool:
        """Whether a command has ended.

        Raises:
            AssertionError: the machine is gone.
        """
        assert self._process.poll() is None, f"{self.name}: the machine is gone"
        return (self.folder / f"{number}.rc").exists()

    def finish(self, number: int, *, check: bool = True, timeout_s: float = 120) -> str:
        """Wait for a command; return what it printed on both streams.

        Raises:
            AssertionError: it failed and ``check`` is set, or the machine is gone.
        """
        done = self.folder / f"{number}.rc"
        self._await(done, timeout_s, f"command {number} does not end")
        text = (self.folder / f"{number}.out").read_text(errors="replace")
        code = int(done.read_text())
        assert code == 0 or not check, f"{self.name}: exit code {code}\n{text}"
        return text

    def run(self, command: str, *, check: bool = True, timeout_s: float = 120) -> str:
        """Run a command; see :meth:`finish`."""
        return self.finish(self.start(command), check=check, timeout_s=timeout_s)

    def roce(
        self,
        address: str,
        *,
        netdev: str = "eth0",
        mtu: int = 4200,
        gid: str = "0000:ffff:",
        options: str = "",
    ) -> str:
        """Put soft-RoCE (rxe0) on a network device; return its GIDs."""
        text = ROCE.format(netdev=netdev, address=address, mtu=mtu, gid=gid, options=options)
        return self.run(text)

    def close(self) -> None:
        """Power off."""
        with contextlib.suppress(OSError):
            (self.folder / "stop").write_text("")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._console.close()

    def _await(self, path: Path, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            gone = self._process.poll() is not None
            if gone or time.monotonic() > deadline:
                console = (self.folder / "console").read_text(errors="replace")[-3000:]
                outputs = sorted(self.folder.glob("*.out"), key=lambda each: each.stat().st_mtime)
                said = outputs[-1].read_text(errors="replace")[-3000:] if outputs else ""
                raise AssertionError(f"{self.name}: {what}\n{console}\n{said}")
            time.sleep(LOOK_S)


@contextlib.contextmanager
def machines(count: int, *, memory_mib: int = MEMORY_MIB) -> Iterator[list[Machine]]:
    """Boot one machine, or two on one wire (eth0 of each)."""
    with contextlib.ExitStack() as stack:
        lab = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierd-rdma-")))
        wires: list[Wire | None] = [None]
        if count == 2:
            wires = [Wire(lab / "wire", listens=True), Wire(lab / "wire", listens=False)]
        booting = []
        for number, wire in enumerate(wires, 1):
            if number == 2:
                _wait_for_socket(lab / "wire")
            machine = Machine(lab, f"node{number}", wire, memory_mib)
            stack.callback(machine.close)
            booting.append(machine)
        for machine in booting:
            machine.wait_booted()
        yield booting


def _wait_for_socket(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.is_socket():
        assert time.monotonic() < deadline, "the first machine opens no wire"
        time.sleep(LOOK_S)

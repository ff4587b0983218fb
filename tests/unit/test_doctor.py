"""The doctor: each refusal of the kernel is made real in a process of its own, and told apart."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from tierd import config
from tierd.cli import cli
from tierd.io.store import Store
from tierd.tools import doctor
from tierd.tools.doctor import hardware, kernel

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_IO_URING_SETUP, _IO_URING_REGISTER = 425, 427
NOBODY = 65_534


def forbid(number: int, error: int) -> None:
    """Have a system call answer with an error in this process, from now on (seccomp)."""
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in (
            (0x20, 0, 0, 0),  # load the call's number
            (0x15, 0, 1, number),  # is it this one?
            (0x06, 0, 0, 0x00050000 | error),  # yes: errno
            (0x06, 0, 0, 0x7FFF0000),  # no: allow
        )
    )
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0) == 0


def as_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def in_a_child(prepare: Callable[[], None], look: Callable[[], Any]) -> dict[str, Any]:
    """What ``look`` finds in a forked process that ``prepare`` has restricted."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            os.write(into, json.dumps(look().to_json()).encode())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(into, json.dumps({"failed": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        text = file.read()
    os.waitpid(child, 0)
    found = json.loads(text)
    assert "failed" not in found, found
    return found


# The forked process runs nothing but the doctor; pytest's threads do not matter to it.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

has_io_uring = pytest.mark.skipif(
    kernel.io_uring().severity != "ok", reason=f"io_uring: {kernel.io_uring().evidence}"
)
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")


@has_io_uring
def test_io_uring_that_works() -> None:
    assert kernel.io_uring().finding == "io_uring and fixed buffers work"


@has_io_uring
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EACCES])
def test_io_uring_refused_by_seccomp(error: int) -> None:
    found = in_a_child(lambda: forbid(_IO_URING_SETUP, error), kernel.io_uring)
    assert found["severity"] == "warning"
    assert "a seccomp filter" in found["cause"]
    assert errno.errorcode[error] in found["evidence"]
    assert "Seccomp: 2" in found["evidence"]
    assert "seccomp" in found["cure"]


@has_io_uring
@pytest.mark.parametrize(("disabled", "group"), [(2, 0), (1, 12_345)])
def test_io_uring_refused_by_sysctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: int, group: int
) -> None:
    """The sysctl is the whole machine's, so a filter gives the kernel's answer in its place."""
    monkeypatch.setattr(kernel, "_has_capability", lambda _: False)
    (tmp_path / "io_uring_disabled").write_text(f"{disabled}\n")
    (tmp_path / "io_uring_group").write_text(f"{group}\n")

    found = in_a_child(
        lambda: forbid(_IO_URING_SETUP, errno.EPERM), lambda: kernel.io_uring(sysctls=tmp_path)
    )
    assert "the sysctl kernel.io_uring_disabled" in found["cause"]
    assert f"kernel.io_uring_disabled = {disabled}" in found["evidence"]
    assert found["cure"] == "sysctl -w kernel.io_uring_disabled=0"


@has_io_uring
@is_root
def test_io_uring_refused_by_memlock() -> None:
    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65_536, 65_536))
        as_nobody()

    found = in_a_child(prepare, kernel.io_uring)
    assert "cannot lock memory" in found["finding"]
    assert "RLIMIT_MEMLOCK is 64 KiB" in found["evidence"]
    assert "ulimit -l unlimited" in found["cure"]


@has_io_uring
def test_fixed_buffers_refused() -> None:
    found = in_a_child(lambda: forbid(_IO_URING_REGISTER, errno.EINVAL), kernel.io_uring)
    assert "fixed buffers do not" in found["finding"]


@is_root
def test_memlock_is_compared_with_what_clients_may_ask_for() -> None:
    settings = config.load(environ={}).settings

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        as_nobody()

    found = in_a_child(prepare, lambda: kernel.memlock(settings))
    assert "may have 1024 MiB (channel.arena_pages_max)" in found["finding"]
    assert kernel.memlock(settings).severity == "ok"  # root may


def test_the_cure_in_a_unit_is_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVOCATION_ID", "x")
    assert "LimitMEMLOCK=infinity" in kernel._memlock_cure()
    assert "SystemCallFilter" in kernel._seccomp_cure()


def test_huge_pages(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    text = "MemTotal: 1 kB\nHugePages_Total: {}\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"
    meminfo.write_text(text.format(8))
    assert "3 of 8 huge pages of 2048 KiB" in kernel.huge_pages(meminfo=meminfo).evidence
    meminfo.write_text(text.format(0))
    assert "no huge pages are reserved" in kernel.huge_pages(meminfo=meminfo).finding


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_memory_nodes(tmp_path: Path) -> None:
    disk = tmp_path / "disk.img"
    disk.touch()
    number = disk.stat().st_dev
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    assert hardware.numa([str(disk)], sys_=tmp_path).severity == "ok"
    (tmp_path / "devices/system/node/node1").mkdir()
    slot = tmp_path / "devices/pci/nvme"
    write(slot / "numa_node", "0")
    (slot / "block").mkdir()
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(slot / "block")
    write(tmp_path / "bus/pci/drivers/nvidia/0000:81:00.0/numa_node", "1")
    found = hardware.numa([str(disk)], sys_=tmp_path)
    assert found.severity == "warning"
    assert f"disk {disk}: node 0, GPU 0000:81:00.0: node 1" in found.evidence
    write(tmp_path / "bus/pci/drivers/nvidia/0000:81:00.0/numa_node", "0")
    assert hardware.numa([str(disk)], sys_=tmp_path).severity == "ok"


def test_rdma_ports(tmp_path: Path) -> None:
    assert "no RDMA device" in hardware.rdma(sys_=tmp_path)[0].finding
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    write(port / "state", "1: DOWN")
    write(port / "rate", "100 Gb/sec (4X EDR)")
    write(port / "gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001")
    write(port / "gids/1", hardware._ZERO_GID)
    write(port / "gid_attrs/types/0", "RoCE v2")
    write(port / "gid_attrs/ndevs/0", "eth7")
    (down,) = hardware.rdma(sys_=tmp_path)
    assert (down.severity, down.cure) == ("warning", "ip link set eth7 up")
    write(port / "state", "4: ACTIVE")
    (local,) = hardware.rdma(sys_=tmp_path)
    assert "only link-local GIDs" in local.finding
    assert "0: fe80:0000:0000:0000:0000:0000:0000:0001 (RoCE v2)" in local.evidence
    write(port / "gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001")
    assert hardware.rdma(sys_=tmp_path)[0].severity == "ok"


_FAKE_CUDA = """
#include <stddef.h>
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuDeviceGet(int* d, int n) { *d = n; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { *c = c; return 0; }
int cuCtxSetCurrent(void* c) { return 0; }
int cuMemHostRegister_v2(void* p, size_t n, unsigned f) { return n > LIMIT ? 1 : 0; }
int cuMemHostUnregister(void* p) { return 0; }
"""


@pytest.mark.parametrize(("limit", "severity"), [("1u << 20", "problem"), ("~0ul", "ok")])
def test_cuda_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, severity: str
) -> None:
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(_FAKE_CUDA.replace("LIMIT", f"({limit})"))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    found = hardware.cuda()
    assert found.severity == severity, found
    assert "driver 13000" in found.evidence
    assert "1 MiB: registered" in found.evidence
    if severity == "problem":
        assert "1 GiB: error 1" in found.evidence


def test_without_a_gpu_there_is_nothing_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.cuda().severity == "ok"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert hardware.cuda().severity == "warning"


def test_the_command(tmp_path: Path) -> None:
    device = tmp_path / "device.img"
    Store.format(device, size=8 << 20).close()
    missing = tmp_path / "none.img"

    def run(*words: object) -> Any:
        return CliRunner().invoke(cli, ["doctor", "--seconds", "0.05", *map(str, words)])

    done = run("--device", device, "--json")
    assert done.exit_code == 0, done.output
    found = {(one["check"], one["subject"]): one for one in json.loads(done.stdout)["findings"]}
    assert "queue depth 64" in found["read_time", str(device)]["evidence"]
    assert ("direct", str(device)) in found
    bad = run("--device", device, "--device", missing)
    assert bad.exit_code == 1
    lines = bad.stdout.splitlines()
    assert lines[0] == f"PROBLEM  device {missing}: the device cannot be opened"
    assert any(line.strip().startswith("run: ") for line in lines)


def test_every_finding_that_is_not_well_has_cause_evidence_and_cure(tmp_path: Path) -> None:
    overrides = {"devices.paths": [str(tmp_path / "none")]}
    settings = config.load(environ={}, overrides=overrides).settings
    found = doctor.examine(settings)
    assert found[0]["severity"] == "problem"
    for one in found:
        assert one["evidence"], one
        assert one["severity"] == "ok" or (one["cause"] and one["cure"]), one

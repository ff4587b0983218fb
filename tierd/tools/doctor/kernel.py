"""io_uring, locked memory and huge pages: what the kernel grants this process.

io_uring can be refused by a sysctl, by a seccomp filter, for want of lockable memory, or because
the kernel has none. They look alike from above, so the system calls themselves are made here, and
what they answer is held against the sysctl, the process's seccomp mode and its limits.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.tools.doctor.finding import Finding, fine

if TYPE_CHECKING:
    from tierd.config import Settings

_SETUP, _REGISTER = 425, 427  # the same on x86-64 and aarch64
_PARAMS_BYTES = 120  # struct io_uring_params
_REGISTER_BUFFERS = 0
_CAP_IPC_LOCK, _CAP_SYS_ADMIN = 14, 21
_SECCOMP_FILTER = 2
PROBE_BYTES = 1 << 20
MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def io_uring(*, sysctls: Path = Path("/proc/sys/kernel")) -> Finding:
    """Make a ring and register a buffer with it."""
    fd, number = _call(_SETUP, 4, ctypes.create_string_buffer(_PARAMS_BYTES))
    if fd < 0:
        return _setup_refused(number, sysctls)
    try:
        area = mmap.mmap(-1, PROBE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        vector = ctypes.create_string_buffer(struct.pack("QQ", address, PROBE_BYTES))
        result, number = _call(_REGISTER, fd, _REGISTER_BUFFERS, vector, 1)
    finally:
        os.close(fd)
    if result < 0 and number == errno.ENOMEM:
        return _memlock_refuses("io_uring_register", number)
    if result < 0:
        return Finding(
            "io_uring",
            "",
            "warning",
            "io_uring works, fixed buffers do not, so reads cost more CPU time",
            _said("io_uring_register", number),
            "the kernel is older than 5.13, or a filter forbids io_uring_register",
            _seccomp_cure(),
        )
    return fine("io_uring", "io_uring and fixed buffers work", "a ring was made and used")


def _setup_refused(number: int, sysctls: Path) -> Finding:
    said = _said("io_uring_setup", number)
    disabled = _sysctl(sysctls, "io_uring_disabled")
    if number == errno.ENOMEM:
        return _memlock_refuses("io_uring_setup", number)
    if number == errno.EPERM and _sysctl_refuses(disabled, sysctls):
        return _refused(
            f"{said}; kernel.io_uring_disabled = {disabled}",
            "the sysctl kernel.io_uring_disabled forbids it to this process",
            "sysctl -w kernel.io_uring_disabled=0",
        )
    if _seccomp_mode() == _SECCOMP_FILTER:
        return _refused(
            f"{said}; Seccomp: {_SECCOMP_FILTER} in /proc/self/status",
            "a seccomp filter (of the unit, or of the container) forbids it",
            _seccomp_cure(),
        )
    return _refused(
        f"{said}; kernel {os.uname().release}",
        "this kernel was built without it, or a security module forbids it",
        "zgrep CONFIG_IO_URING /proc/config.gz /boot/config-$(uname -r)",
    )


def _refused(evidence: str, cause: str, cure: str) -> Finding:
    text = "io_uring is refused; pumps read with threads, at more CPU time a read"
    return Finding("io_uring", "", "warning", text, evidence, cause, cure)


def _memlock_refuses(call: str, number: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Finding(
        "io_uring",
        "",
        "warning",
        "io_uring cannot lock memory, so its buffers are not fixed",
        f"{_said(call, number)}; RLIMIT_MEMLOCK is {_limit(soft)}",
        f"the process may lock {_limit(soft)}, {PROBE_BYTES // MIB} MiB were asked for",
        _memlock_cure(),
    )


def memlock(settings: Settings) -> Finding:
    """Compare what one client may make the daemon lock with what it may lock."""
    need = settings.channel.arena_pages_max * 4096
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    evidence = f"RLIMIT_MEMLOCK is {_limit(soft)}; CAP_IPC_LOCK is {_word(_CAP_IPC_LOCK)}"
    if soft == resource.RLIM_INFINITY or soft >= need or _has_capability(_CAP_IPC_LOCK):
        return fine("memlock", "enough memory may be locked for a client's arenas", evidence)
    return Finding(
        "memlock",
        "",
        "warning",
        f"a client's arenas may have {need // MIB} MiB (channel.arena_pages_max), and less than "
        "that may be locked",
        evidence,
        "the limit is too low; reads into memory that is not locked cost more CPU time",
        _memlock_cure(),
    )


def huge_pages(*, meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Say how many huge pages there are; only tables kept in memory want them."""
    text = meminfo.read_text(encoding="utf-8")
    found = dict(
        re.findall(r"^(HugePages_Total|HugePages_Free|Hugepagesize):\s+(\d+)", text, re.MULTILINE)
    )
    if "Hugepagesize" not in found:
        return fine("huge_pages", "this kernel has no huge pages", "none in /proc/meminfo")
    total, free, kib = (
        int(found[k]) for k in ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    )
    evidence = f"{free} of {total} huge pages of {kib} KiB are free"
    if total:
        return fine("huge_pages", "huge pages are reserved", evidence)
    text = "no huge pages are reserved; only tables that are kept in memory would use them"
    return fine("huge_pages", text, evidence)


def _call(number: int, *arguments: object) -> tuple[int, int]:
    ctypes.set_errno(0)
    result = int(_libc.syscall(number, *arguments))
    return result, ctypes.get_errno()


def _said(call: str, number: int) -> str:
    return f"{call} answers {errno.errorcode.get(number, number)} ({os.strerror(number)})"


def _sysctl(folder: Path, name: str) -> int:
    try:
        return int((folder / name).read_text())
    except (OSError, ValueError):
        return 0


def _sysctl_refuses(disabled: int, sysctls: Path) -> bool:
    if disabled == 1:
        group = _sysctl(sysctls, "io_uring_group")
        member = group in {os.getegid(), *os.getgroups()}
        return not member and not _has_capability(_CAP_SYS_ADMIN)
    return disabled >= 2


def _status(name: str) -> str:
    text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    match = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    return match[1] if match else "0"


def _seccomp_mode() -> int:
    return int(_status("Seccomp"))


def _has_capability(number: int) -> bool:
    return bool(int(_status("CapEff"), 16) >> number & 1)


def _word(capability: int) -> str:
    return "held" if _has_capability(capability) else "not held"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // 1024} KiB"


def _in_unit() -> bool:
    return "INVOCATION_ID" in os.environ


def _seccomp_cure() -> str:
    if _in_unit():
        calls = "io_uring_setup io_uring_enter io_uring_register"
        return f"systemctl edit tierd  # [Service] SystemCallFilter={calls}"
    return "docker run --security-opt seccomp=unconfined ...  # or a profile that allows io_uring"


def _memlock_cure() -> str:
    if _in_unit():
        return "systemctl edit tierd  # [Service] LimitMEMLOCK=infinity"
    return "ulimit -l unlimited  # in a container: docker run --ulimit memlock=-1"

"""Who holds a device: the process ids and reasons that a "busy" message names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tierd.io import linux

_PIDS_MAX = 65536  # processes looked at; a bound, not a limit anybody meets


def flock_holder(info: os.stat_result) -> int | None:
    """Process that holds an exclusive flock on the file with this stat result."""
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        text = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        fields = line.split()
        if "->" in fields or len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "WRITE":
            continue
        if fields[5] == wanted and int(fields[4]) > 0:
            return int(fields[4])
    return None


def open_holder(info: os.stat_result) -> int | None:
    """A process other than this one that has the file or block device open for writing.

    Looks only where permissions allow; descriptors opened for reading (those of attached
    engines) keep nobody out and are passed over.
    """
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in sorted(pids)[:_PIDS_MAX]:
        if pid != own and _has_open_for_writing(pid, info):
            return pid
    return None


def _has_open_for_writing(pid: int, info: os.stat_result) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # gone, or not ours to look at
        return False
    for name in names:
        try:
            other = os.stat(f"{folder}/{name}")
            writes = os.lstat(f"{folder}/{name}").st_mode & stat.S_IWUSR
        except OSError:
            continue
        if writes and _is_same(info, other):
            return True
    return False


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    if stat.S_ISBLK(one.st_mode) and stat.S_ISBLK(other.st_mode):
        return one.st_rdev == other.st_rdev
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def describe(info: os.stat_result) -> str:
    """Say in a few words who holds the file or block device, as far as that can be found out."""
    pid = flock_holder(info)
    if pid is None:
        pid = open_holder(info)
    if pid is not None:
        return f"process {pid} ({_command_of(pid)}) holds it"
    if stat.S_ISBLK(info.st_mode):
        mount = linux.mount_point_of(info.st_rdev)
        if mount is not None:
            return f"it is mounted at {mount}"
        upper = _stacked_devices(info.st_rdev)
        if upper:
            return f"it is part of {', '.join(upper)}"
    return "its holder cannot be seen from here (another user's process, or another container)"


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "gone by now"


def _stacked_devices(device: int) -> list[str]:
    folder = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/holders"
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []

"""Devices: files, real loop devices, what they admit about directness, and who holds them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tierd.errors import DeviceBusyError, DeviceError, DeviceForeignError
from tierd.io import device as device_module
from tierd.io import linux
from tierd.io.device import PAGE_BYTES, Device, aligned_buffer
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
HOLD = """
import sys
from tierd.io.device import Device
device = Device.open(sys.argv[1], write=True)
print("held", flush=True)
sys.stdin.read()
"""
HOLD_EXCL = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_EXCL)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "device"
    file.write_bytes(np.random.default_rng(1).bytes(MIB))
    fd = os.open(file, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)
    return str(file)


@contextlib.contextmanager
def holder(path: str, script: str = HOLD) -> Iterator[int]:
    """Another process that has the device open for writing."""
    command = [sys.executable, "-c", script, path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process.pid
        finally:
            process.stdin.close()


# --- opening --------------------------------------------------------------------------------------


def test_a_file_is_a_device(path: str) -> None:
    with Device.open(path, write=True) as device:
        assert (device.size, device.is_block, device.writable) == (MIB, False, True)
        assert PAGE_BYTES % device.block_size == 0
        assert device.direct or device.direct_reason
    device.close()  # a second close does nothing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "no such device or file; run: tierd format"),
        ("", "neither a block device nor a file"),
        ("pipe", "neither a block device nor a file"),
    ],
)
def test_what_is_no_device_is_refused(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DeviceError, match=words):
        Device.open(tmp_path / name, write=True)


def test_no_permission_is_said(path: str, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DeviceError, match=r"Permission denied; this user may not .* run: ls -l"):
        Device.open(path, write=True)


def test_the_holder_is_named(path: str) -> None:
    with holder(path) as pid:
        with pytest.raises(DeviceBusyError, match=rf"process {pid} \(python.*run: tierd status"):
            Device.open(path, write=True, retry_s=0)
        with Device.open(path, write=False) as device:
            assert device.size == MIB, "a reader is not kept out"
    Device.open(path, write=True).close()


def test_open_waits_a_moment_for_a_holder_on_its_way_out(path: str, monkeypatch) -> None:
    first = Device.open(path, write=True)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            first.close()

    monkeypatch.setattr(device_module.time, "sleep", pause)
    Device.open(path, write=True).close()
    assert len(pauses) == 3


def test_an_unseen_holder_is_admitted(path: str, monkeypatch) -> None:
    monkeypatch.setattr(device_module.holders, "flock_holder", lambda info: None)
    monkeypatch.setattr(device_module.holders, "open_holder", lambda info: None)
    with (
        Device.open(path, write=True),
        pytest.raises(DeviceBusyError, match="its holder cannot be seen from here"),
    ):
        Device.open(path, write=True, retry_s=0)


def test_a_holder_without_a_lock_is_found_by_its_descriptor(path: str) -> None:
    with holder(path, HOLD_EXCL) as pid:
        assert device_module.holders.open_holder(os.stat(path)) == pid
        fd = os.open(path, os.O_RDONLY)  # readers do not count, nor does this process
        os.close(fd)
    assert device_module.holders.open_holder(os.stat(path)) is None


# --- directness ----------------------------------------------------------------------------------


def resident_pages(path: str) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return sum(bool(linux.is_resident(fd, at)) for at in range(0, MIB, PAGE_BYTES))
    finally:
        os.close(fd)


def drop_cache(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_what_calls_itself_direct_leaves_the_page_cache_alone(path: str) -> None:
    with Device.open(path, write=True) as device:
        if not device.direct or device.direct_reason:
            pytest.skip(f"no O_DIRECT to be observed under {path}: {device.direct_reason}")
        drop_cache(path)
        device.read(0, MIB)
        device.write(0, aligned_buffer(MIB))
        assert resident_pages(path) == 0
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, MIB)  # the measure itself works: a buffered read is seen
        os.close(fd)
        assert resident_pages(path) > 0


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs at /dev/shm")
def test_memory_does_not_pass_for_a_disk() -> None:
    file = Path(f"/dev/shm/tierd-test-{os.getpid()}")
    try:
        file.write_bytes(bytes(MIB))
        with Device.open(file, write=True) as device:
            assert not device.direct
            assert device.direct_reason == "tmpfs keeps its pages in memory"
            device.write(0, np.full(PAGE_BYTES, 3, np.uint8))
            assert device.read(1, 2) == b"\3\3"
    finally:
        file.unlink()


def test_a_file_system_without_o_direct_is_used_and_said(path: str, monkeypatch) -> None:
    monkeypatch.setattr(linux, "set_direct", lambda fd, on: not on)
    with Device.open(path, write=True) as device:
        assert (device.direct, device.direct_reason) == (False, "the file system refuses O_DIRECT")
        assert device.read(3, 5) == Path(path).read_bytes()[3:8]
        os.close(device.readonly_fd())


def test_o_direct_that_fails_at_the_first_read_is_not_believed(path: str, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuse)
        device = Device.open(path, write=True)
    assert not device.direct
    assert device.direct_reason == "an aligned O_DIRECT read fails: Invalid argument"
    assert device.read(3, 5) == Path(path).read_bytes()[3:8]
    device.close()


def test_o_direct_that_fills_the_page_cache_is_not_believed(path: str, monkeypatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(linux, "is_resident", lambda fd, offset: next(answers))
    monkeypatch.setattr(linux, "file_system_of", lambda path: "fuse.clever")
    with Device.open(path, write=True) as device:
        assert not device.direct
        assert "through the page cache" in device.direct_reason


def test_blocks_larger_than_a_page_are_refused(path: str, monkeypatch) -> None:
    monkeypatch.setattr(linux, "direct_alignment", lambda fd: 16384)
    with pytest.raises(DeviceError, match="blocks of 16384 bytes"):
        Device.open(path, write=True)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 1), (1, 1), (4095, 2), (5000, 70_000), (MIB - 1, 1), (0, MIB)]
)
def test_reads_of_any_alignment(path: str, offset: int, size: int) -> None:
    whole = Path(path).read_bytes()
    with Device.open(path, write=False) as device:
        assert device.read(offset, size) == whole[offset : offset + size]
        into = np.empty(size + 1, np.uint8)[1:]
        device.read_into(offset, into)
        assert into.tobytes() == whole[offset : offset + size]


def test_writes_of_any_memory_alignment(path: str) -> None:
    data = np.random.default_rng(2).integers(0, 256, 2 * PAGE_BYTES + 1, np.uint8)
    with Device.open(path, write=True) as device:
        device.write(PAGE_BYTES, data[1:])
        device.write(0, data[:PAGE_BYTES].tobytes())
        device.flush()
        with pytest.raises(AssertionError, match="whole blocks"):
            device.write(0, data[:100])
    stored = Path(path).read_bytes()
    assert stored[PAGE_BYTES : 3 * PAGE_BYTES] == data[1:].tobytes()
    assert stored[:PAGE_BYTES] == data[:PAGE_BYTES].tobytes()


def test_aligned_buffers_are_aligned() -> None:
    for size in (1, 4095, PAGE_BYTES, MIB + 1):
        buffer = aligned_buffer(size)
        assert buffer.ctypes.data % PAGE_BYTES == 0
        assert buffer.size == size
        assert not buffer.any()


def test_short_transfers_go_on_where_they_stopped(path: str, monkeypatch) -> None:
    whole = Path(path).read_bytes()
    preadv, pwritev = os.preadv, os.pwritev
    calls = []

    def short_read(fd: int, buffers, offset: int) -> int:
        calls.append(offset)
        count = preadv(fd, [buffers[0][: PAGE_BYTES * 3]], offset)
        return count - 100 if offset == 0 else count  # not a whole block: asked again from there

    def short_write(fd: int, buffers, offset: int) -> int:
        calls.append(offset)
        return pwritev(fd, [buffers[0][:PAGE_BYTES]], offset)

    with Device.open(path, write=True) as device:
        monkeypatch.setattr(os, "preadv", short_read)
        monkeypatch.setattr(os, "pwritev", short_write)
        assert device.read(0, 10 * PAGE_BYTES) == whole[: 10 * PAGE_BYTES]
        assert len(calls) == 4
        assert all(offset % device.block_size == 0 for offset in calls)
        device.write(0, np.full(5 * PAGE_BYTES, 9, np.uint8))
        assert len(calls) == 9
    assert Path(path).read_bytes()[: 5 * PAGE_BYTES] == b"\x09" * 5 * PAGE_BYTES


def test_the_end_of_the_device_is_an_error(path: str) -> None:
    with Device.open(path, write=True) as device:
        with pytest.raises(DeviceError, match=rf"read at byte {MIB} ended early.*{MIB} bytes"):
            device.read(MIB - 1, 2)
        os.truncate(path, MIB // 2)
        with pytest.raises(DeviceError, match="may have shrunk"):
            device.read(MIB - PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EIO, "Input/output error; the medium"),
        (errno.ENODATA, "unreadable block"),
        (errno.ENXIO, "gone away"),
        (errno.ENOSPC, "is full"),
        (errno.ETIMEDOUT, "timed out$"),
    ],
)
def test_every_errno_becomes_one_line(path: str, monkeypatch, code: int, words: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with Device.open(path, write=True) as device:
        for name in ("preadv", "pwritev", "fdatasync"):
            monkeypatch.setattr(os, name, fail)
        for what, call in [
            ("read at byte 8192", lambda: device.read(8192, 1)),
            ("write at byte 4096", lambda: device.write(4096, aligned_buffer(PAGE_BYTES))),
            ("flush", device.flush),
        ]:
            with pytest.raises(DeviceError, match=f"{re.escape(path)}: {what}.*{words}"):
                call()


# --- readers --------------------------------------------------------------------------------------


def test_a_readers_descriptor_is_separate_and_read_only(path: str) -> None:
    with Device.open(path, write=True) as device:
        fd = device.readonly_fd()
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        Device.open(path, write=True, retry_s=0).close()
        os.unlink(path)  # by now the path means nothing; the descriptor still reads the device
        buffer = aligned_buffer(PAGE_BYTES)
        assert os.preadv(fd, [buffer.data], 0) == PAGE_BYTES
    finally:
        os.close(fd)


def test_a_replaced_path_does_not_mislead_a_reader(path: str) -> None:
    with Device.open(path, write=True) as device:
        os.rename(path, path + ".old")
        Path(path).write_bytes(b"other")
        fd = device.readonly_fd()
        assert os.fstat(fd).st_size == MIB
        os.close(fd)


def test_leases_are_seen_by_others_and_end_with_the_last_copy(path: str) -> None:
    with Device.open(path, write=True) as device:
        ranges = [(700_000, 4096), (4096, 8192), (8192, 100)]
        fd = device.readonly_fd(ranges)
        assert device.leased_ranges(0, MIB) == [(4096, 12288), (700_000, 704_096)]
        assert device.leased_ranges(10_000, 701_000) == [(10_000, 12288), (700_000, 701_000)]
        assert device.leased_ranges(20_000, 30_000) == []
        other = device.readonly_fd([(0, 10)])  # lower, by a later reader: named second
        assert device.leased_ranges(0, 20) == [(0, 10)]
        assert device.leased_ranges(0, MIB) == [(0, 10), (4096, 12288), (700_000, 704_096)]
        copy = os.dup(fd)
        os.close(fd)
        os.close(other)
        assert device.leased_ranges(0, 5000) == [(4096, 5000)]
        os.close(copy)
        assert device.leased_ranges(0, MIB) == []


def test_a_file_system_without_range_locks_is_refused(path: str, monkeypatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Device.open(path, write=True) as device:
        monkeypatch.setattr(linux, "lease_range", lambda *_: False)
        with pytest.raises(DeviceError, match="no byte-range locks"):
            device.readonly_fd([(0, 10)])
    assert len(os.listdir("/proc/self/fd")) == before


# --- real block devices --------------------------------------------------------------------------


@pytest.fixture
def loop(tmp_path: Path) -> Iterator:
    """Make loop devices: loop(sector=512, direct=True) -> path. They end with the test."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    if shutil.which("losetup") is None:
        pytest.skip("loop devices need losetup (Debian: mount)")
    made = []

    def make(sector: int = 512, direct: bool = True) -> str:
        file = tmp_path / f"disk{len(made)}"
        with file.open("wb") as disk:
            os.posix_fallocate(disk.fileno(), 0, 32 * MIB)
        options = [f"--direct-io={'on' if direct else 'off'}", f"--sector-size={sector}"]
        command = ["losetup", "--find", "--show", *options, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"losetup cannot make a loop device here: {done.stderr.strip()}")
        made.append(done.stdout.strip())
        return made[-1]

    yield make
    for path in made:
        subprocess.run(["losetup", "--detach", path], check=True)


@pytest.mark.lab
@pytest.mark.parametrize("sector", [512, 4096])
def test_a_block_device(loop, sector: int) -> None:
    path = loop(sector)
    with Store.format(path) as store:
        device = store.device
        assert (device.is_block, device.size, device.block_size) == (True, 32 * MIB, sector)
        assert (device.direct, device.direct_reason) == (True, "")
        start = 8 * MIB
        device.write(start, np.full(MIB, 5, np.uint8))
        assert device.read(start + 1, 2) == b"\5\5"
        assert device.discard(start, MIB)
        fd = store.device.readonly_fd([(start, MIB)])
        assert device.leased_ranges(0, device.size) == [(start, start + MIB)]
    with Store.open(path) as store:  # the reader keeps nobody out
        assert store.device.leased_ranges(0, 32 * MIB) == [(start, start + MIB)]
    os.close(fd)


@pytest.mark.lab
def test_a_held_block_device_names_its_holder(loop) -> None:
    path = loop()
    Store.format(path).close()
    for script in (HOLD, HOLD_EXCL):
        with holder(path, script) as pid, pytest.raises(DeviceBusyError, match=f"process {pid} "):
            Device.open(path, write=True, retry_s=0)
    Store.open(path).close()


@pytest.mark.lab
def test_a_file_systems_device_is_refused_and_a_mounted_one_is_busy(loop, tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4 (Debian: e2fsprogs)")
    path = loop()
    subprocess.run(["mkfs.ext4", "-q", path], check=True)
    with pytest.raises(DeviceForeignError, match=f"{path} holds an ext2/3/4 file system"):
        Store.format(path)
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", path, str(mount)], check=True)
    try:
        with pytest.raises(DeviceBusyError, match=f"it is mounted at {mount}"):
            Device.open(path, write=True, retry_s=0)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    Store.format(path, force=path).close()


@pytest.mark.lab
def test_a_loop_device_over_a_buffered_file_is_not_direct(loop) -> None:
    with Device.open(loop(direct=False), write=True) as device:
        assert not device.direct
        assert "--direct-io=on" in device.direct_reason


@pytest.mark.lab
def test_the_size_of_a_block_device_is_its_own(loop) -> None:
    path = loop()
    with pytest.raises(DeviceError, match="is a block device, its size is its own"):
        Store.format(path, size=8 * MIB)

"""Making a device ready: its file, what must not be overwritten, the first root."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from typing import TYPE_CHECKING

from tierd.errors import (
    DeviceBusyError,
    DeviceError,
    DeviceForeignError,
    DeviceMissingError,
    DeviceTooSmallError,
)
from tierd.io import signatures, superblock
from tierd.io.device import aligned_buffer, how_to_make
from tierd.io.extent_table import ExtentTable
from tierd.io.layout import RESERVED_BYTES, UNIT_BYTES, Areas
from tierd.io.superblock import Root

if TYPE_CHECKING:
    from tierd.io.device import Device


def make_file(path: str, size: int | None) -> bool:
    """Make the file if there is none, or lengthen an empty one; True if it was made here."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        command = how_to_make(path)
        if "--size" not in command:
            raise DeviceMissingError(f"{path}: there is no such device; run: {command}") from None
        if size is None:
            raise DeviceError(
                f"{path} does not exist, and a new file needs a size; run: {command}"
            ) from None
        info = None
    except OSError as error:
        raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}; run: ls -l {path}") from None
    if size is None or (info is not None and info.st_size == size):
        return False
    if info is not None and stat.S_ISBLK(info.st_mode):
        raise DeviceError(f"{path} is a block device, its size is its own; leave --size away")
    if info is not None and info.st_size > 0:
        raise DeviceError(
            f"{path} exists and has {info.st_size} bytes, not {size}; use its size or another "
            f"name; run: ls -l {path}"
        )
    _require_minimum(path, size)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        # Asked first, since a reservation that fails has filled the file system for a moment.
        system = os.statvfs(folder)
        if system.f_bavail * system.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _reserve(path, size)
    except OSError as error:
        if info is None:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
            raise DeviceTooSmallError(
                f"{path}: no room for a file of {size} bytes in {folder}; run: df -h {folder}"
            ) from None
        raise DeviceError(
            f"{path}: cannot be made: {os.strerror(error.errno or 0)}; run: ls -ld {folder}"
        ) from None
    return info is None


def _reserve(path: str, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _require_minimum(path: str, size: int) -> None:
    areas = Areas.of(size)
    if areas.data_end <= areas.data_start:
        raise DeviceTooSmallError(
            f"{path} has {size} bytes; the smallest store has {areas.data_start + UNIT_BYTES}; "
            "use a larger device"
        )


def refuse_content(device: Device, path: str, force: str | None) -> None:
    """Raise unless the device is empty, or ``force`` names it; nobody may be reading it."""
    _require_minimum(path, device.size)
    if device.leased_ranges(0, device.size):
        raise DeviceBusyError(
            f"{path} is still read by an engine that attached to its images; stop the engine "
            "first; run: tierd status"
        )
    content = signatures.find_content(device)
    if content is None:
        return
    real = os.path.realpath(path)
    names = {path, real, os.path.basename(path), os.path.basename(real)}
    if force in names:
        return
    given = f" (--force names {force}, which is not this device)" if force is not None else ""
    raise DeviceForeignError(
        f"{path} holds {content}, which would be lost{given}; if that is what you want, "
        f"run: tierd format {path} --force {path}"
    )


def write_empty(device: Device) -> None:
    """Clear the first and the last MiB, so that no old mark survives, and write the first root."""
    device.write(0, aligned_buffer(RESERVED_BYTES))
    device.write(signatures.tail_offset(device), aligned_buffer(signatures.TAIL_BYTES))
    device.flush()
    areas = Areas.of(device.size)
    table, ident = ExtentTable(), uuid.uuid4()
    data = table.pack(ident, 1)
    root = Root(
        sequence=1,
        slot=0,
        uuid=ident,
        device_bytes=device.size,
        block_size=device.block_size,
        table_offset=areas.table_offset(0),
        table_bytes=len(data),
        area_bytes=areas.table_bytes,
        table_crc=superblock.crc(data),
    )
    superblock.store(device, root, data)

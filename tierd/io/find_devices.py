"""Devices by what they say of themselves: UUIDs on their roots, whatever their names are today.

``UUID=...`` stands for a block device wherever a device's path may stand. Looking opens devices
for reading only and keeps nobody out.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.errors import DeviceDuplicateError, DeviceError, DeviceMissingError
from tierd.io import superblock
from tierd.io.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "UUID="
_BLOCK = Path("/sys/class/block")
_LOOKED_AT_MAX = 4096  # block devices; a bound, not a limit anybody meets


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A block device with a root of tierd's on it."""

    path: str
    uuid: str


def resolve(name: str) -> str:
    """Return the path of ``name``, a path or ``UUID=...``.

    Raises:
        DeviceMissingError: no block device here has that UUID; the text lists those there are.
        DeviceDuplicateError: two have it.
        DeviceError: the UUID is none.
    """
    if not name.startswith(PREFIX):
        return name
    try:
        wanted = str(uuid.UUID(name.removeprefix(PREFIX)))
    except ValueError:
        raise DeviceError(
            f"{name} is not a device: after UUID= come 32 hex digits; run: tierd devices list"
        ) from None
    found = scan()
    paths = [device.path for device in found if device.uuid == wanted]
    if len(paths) > 1:
        raise DeviceDuplicateError(
            f"{' and '.join(paths)} both say that they are device {wanted}; one is a copy of the "
            "other; name the right one by its path; run: tierd devices list"
        )
    if not paths:
        others = ", ".join(f"{device.path} is {device.uuid}" for device in found) or "there is none"
        if closed := [path for path in _block_paths() if not os.access(path, os.R_OK)]:
            others += f"; this user may not open {', '.join(closed[:8])}"
        raise DeviceMissingError(
            f"no block device here is device {wanted} ({others}); attach it, or name the right "
            "one; run: tierd devices list"
        )
    return paths[0]


def require_distinct(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse one device that is named twice, whatever its names are.

    Raises:
        DeviceDuplicateError: it is; opened twice for writing it would seem to be another's.
    """
    seen: dict[tuple[int, ...], str] = {}
    for path in [os.fspath(path) for path in paths]:
        try:
            info = os.stat(path)
        except OSError:  # whoever opens it says why
            continue
        block = stat.S_ISBLK(info.st_mode)
        key = (info.st_rdev,) if block else (info.st_dev, info.st_ino)
        other = seen.setdefault(key, path)
        if other is not path:
            raise DeviceDuplicateError(
                f"{other} and {path} are one device, named twice; name it once; "
                "run: tierd devices list"
            )


def scan() -> list[Found]:
    """Every block device that bears a whole root, by path; those that cannot be read are not."""
    found = [(path, uuid_of(path)) for path in _block_paths()[:_LOOKED_AT_MAX]]
    return [Found(path, ident) for path, ident in found if ident is not None]


def uuid_of(path: str) -> str | None:
    """UUID in the newest whole root of a device; None if there is none to be read."""
    try:
        with Device.open(path, write=False) as device:
            return superblock.peek_uuid(device)
    except DeviceError:
        return None


def _block_paths() -> list[str]:
    paths = (f"/dev/{entry.replace('!', '/')}" for entry in _block_names())
    return sorted(path for path in paths if os.path.exists(path))


def _block_names() -> Iterable[str]:
    try:
        names = os.listdir(_BLOCK)
    except OSError:
        return []
    return [name for name in names if _sectors(name) > 0]


def _sectors(name: str) -> int:
    try:
        return int((_BLOCK / name / "size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0

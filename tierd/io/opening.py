"""What a store may believe of a device: its newest root, unless somebody else has come since."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tierd.errors import DeviceDamagedError, DeviceForeignError
from tierd.io import signatures, superblock

if TYPE_CHECKING:
    from tierd.io.device import Device


def load(device: Device) -> superblock.Loaded | None:
    """Load, unless others have taken the device over since; reading does them no harm.

    Raises:
        DeviceForeignError: they have.
        DeviceError: as :func:`tierd.io.superblock.load`.
    """
    try:
        loaded = _load_settled(device)
    except DeviceDamagedError:
        _refuse_foreign(device)
        raise
    if device.writable and loaded is not None and loaded.note:
        _refuse_foreign(device)
    return loaded


def _refuse_foreign(device: Device) -> None:
    foreign = signatures.find_foreign(device)
    if foreign is not None:
        raise DeviceForeignError(
            f"{device.path} was a tierd store, and {foreign} was written over a part of it; find "
            f"out whose it is now; run: tierd devices inspect {device.path}"
        )


def _load_settled(device: Device) -> superblock.Loaded | None:
    """Load; for a reader beside a writer, again if two commits overtook the first look."""
    for _ in range(0 if device.writable else 3):
        with contextlib.suppress(DeviceDamagedError):
            return superblock.load(device)
    return superblock.load(device)

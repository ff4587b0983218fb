"""``tierd init``: a configuration for this machine and this checkpoint, with the reasons in it."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import os
from typing import TYPE_CHECKING, Any

from tierd.errors import ConfigError, DeviceError
from tierd.io import find_devices, tables
from tierd.io.checkpoint import Checkpoint
from tierd.io.device import Device
from tierd.io.layout import Geometry
from tierd.tools import device_list, reference
from tierd.tools.doctor import hardware
from tierd.tools.show import size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAGE_BYTES = 4096
ADMIN_GROUP = "tierd-admin"  # systemd/tierd.sysusers.conf makes it
METRICS_LISTEN = "127.0.0.1:9469"
MODE = 0o644


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What would be written and done.

    Attributes:
        text: the configuration file.
        chosen: key -> (value, why).
        format: devices that have to be formatted first; what they hold is lost.
        notes: what the operator should know.
        steps: commands that come next.
    """

    text: str
    chosen: dict[str, tuple[Any, str]]
    format: list[str]
    notes: list[str]
    steps: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "chosen": {key: {"value": v, "why": why} for key, (v, why) in self.chosen.items()},
            "format": self.format,
            "notes": self.notes,
            "steps": self.steps,
        }


def plan(checkpoint: Path | None, devices: Sequence[str]) -> Plan:
    """Look at the machine and the checkpoint.

    Args:
        checkpoint: whose tables are to be served; None leaves that open.
        devices: to be used, formatted or not; none means those that are formatted already.

    Raises:
        ConfigError: there is no device to use.
        CheckpointError: the checkpoint cannot be used.
    """
    notes: list[str] = []
    paths, unformatted, room = _devices(devices)
    chosen: dict[str, tuple[Any, str]] = {
        "devices.paths": (paths, f"{size(room)} in all"),
        "metrics.listen": (METRICS_LISTEN, "for Prometheus on this machine; read-only"),
    }
    with contextlib.suppress(KeyError):
        grp.getgrnam(ADMIN_GROUP)
        chosen["api.admin_group"] = (ADMIN_GROUP, "its members may change things over REST")
    need = _need(checkpoint, notes) if checkpoint is not None else 0
    if need > room:
        notes.append(
            f"the tables need {size(need)}, the devices have {size(room)}: name more devices"
        )
    _pumps(chosen, paths, notes)
    steps = [f"tierd format {path}" for path in unformatted]
    steps += ["tierd config check", "systemctl enable --now tierd"]
    if checkpoint is not None:
        steps.append(f"tierd stage {checkpoint}")
    steps.append("tierd status")
    return Plan(reference.toml(chosen), chosen, unformatted, notes, steps)


def _devices(names: Sequence[str]) -> tuple[list[str], list[str], int]:
    """Return the paths for the configuration, those to format, and the room they have."""
    paths = [*names] or device_list.formatted(but=())
    if not paths:
        raise ConfigError(
            "no device is named and none here is formatted; name one with --device (what it holds "
            "will be lost); run: lsblk"
        )
    kept, unformatted, room = [], [], 0
    for name in paths:
        try:
            with Device.open(find_devices.resolve(name), write=False) as device:
                room += device.size
                ident = find_devices.uuid_of(device.path)
                if ident is None:
                    unformatted.append(device.path)
                # A block device's name may change at the next boot; its UUID does not.
                kept.append(f"UUID={ident}" if ident and device.is_block else device.path)
        except DeviceError as error:
            raise ConfigError(str(error)) from None
    given = [path if path.startswith("UUID=") else os.path.abspath(path) for path in kept]
    return given, unformatted, room


def _need(checkpoint: Path, notes: list[str]) -> int:
    """Return the bytes that the checkpoint's tables take, and tell what they are."""
    with Checkpoint.open(checkpoint) as source:
        specs = tables.find_tables(source, tensors=[])
    need = 0
    for spec in specs:
        pages = Geometry.of(spec.row_bytes, spec.rows).pages
        need += pages * PAGE_BYTES
        notes.append(f"table {spec.name}: {spec.rows:,} rows of {spec.row_bytes} bytes")
        if spec.layer == 0:
            notes.append(f"table {spec.name} is read by layer 0, so its reads have no time to hide")
    return need


def _pumps(chosen: dict[str, tuple[Any, str]], paths: Sequence[str], notes: list[str]) -> None:
    cpus = len(os.sched_getaffinity(0))
    if cpus <= 4:
        chosen["pump.spin_us"] = (0, f"{cpus} CPUs: a pump that spins would take one from others")
    elif len(paths) > 1 and cpus >= 16:
        count = min(len(paths), 4)
        chosen["pump.count"] = (count, f"{len(paths)} devices and {cpus} CPUs")
    finding = hardware.numa(paths)
    if finding.severity != "ok":
        notes.append(f"{finding.finding} ({finding.evidence})")


def format_devices(paths: Sequence[str]) -> None:
    """Format devices; the caller has asked.

    Raises:
        DeviceError: one cannot be formatted.
    """
    from tierd.tools import offline  # noqa: PLC0415 - needed only for this

    for path in paths:
        offline.format_device(path, size=None, force=path)


def write(text: str, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    aside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.chmod(MODE)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; run as root") from None

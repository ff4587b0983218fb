"""Devices: can they be opened and read directly, in which blocks, and how fast."""

from __future__ import annotations

import os

from tierd.errors import TierdError
from tierd.io import find_devices, probe
from tierd.io.device import Device
from tierd.tools.doctor.finding import Finding, fine

# One rank's misses of one layer in a step of the paper's largest batch, and its disk's time.
BURST_PAGES = 740
BURST_MS_SLOW = 10.0


def examine(name: str, *, seconds: float | None) -> list[Finding]:
    """Look at one device.

    Args:
        name: path, or ``UUID=...``.
        seconds: how long to read at each queue depth; None reads nothing.
    """
    try:
        path = find_devices.resolve(name)
        device = Device.open(path, write=False)
    except TierdError as error:
        what, _, cure = str(error).partition("; run: ")
        text = "the device cannot be opened"
        cure = cure or "tierd devices list"
        return [Finding("device", name, "problem", text, what, "see the evidence", cure)]
    try:
        found = [_directness(device)]
        if seconds is not None:
            found.append(_read_time(device, seconds))
        return found
    finally:
        device.close()


def _directness(device: Device) -> Finding:
    evidence = f"{device.size} bytes, blocks of {device.block_size} bytes"
    if device.direct:
        return fine("direct", "reads go past the page cache", evidence, subject=device.path)
    cure = f"stat -f {device.path}  # choose a block device, or a file on ext4 or xfs"
    if "loop device" in device.direct_reason:
        cure = f"losetup --direct-io=on {device.path}"
    return Finding(
        "direct",
        device.path,
        "warning",
        "reads go through the page cache, so their timing says little and memory is used twice",
        evidence,
        device.direct_reason,
        cure,
    )


def _read_time(device: Device, seconds: float) -> Finding:
    fd = device.readonly_fd()
    try:
        times = [
            probe.read_randomly(fd, device.size, depth=depth, seconds=seconds, path=device.path)
            for depth in probe.DEPTHS
        ]
    except TierdError as error:
        what, _, cure = str(error).partition("; run: ")
        text, cause = "the device cannot be read", "the medium, its cable or its driver"
        return Finding("read_time", device.path, "problem", text, what, cause, cure)
    finally:
        os.close(fd)
    evidence = "; ".join(
        f"queue depth {each.depth}: {each.reads_per_s:,.0f} reads/s, median {each.p50_us:,.0f} us, "
        f"99 % within {each.p99_us:,.0f} us"
        for each in times
    )
    burst_ms = BURST_PAGES / times[-1].reads_per_s * 1000
    text = f"a burst of {BURST_PAGES} pages takes about {burst_ms:.1f} ms"
    if burst_ms <= BURST_MS_SLOW:
        return fine("read_time", text, evidence, subject=device.path)
    return Finding(
        "read_time",
        device.path,
        "warning",
        text,
        evidence,
        "the device, or what lies between, is slow; an NVMe disk takes 2 to 7 ms",
        f"fio --name=t --filename={device.path} --readonly --direct=1 --rw=randread --bs=4k "
        "--iodepth=64 --ioengine=io_uring --runtime=5 --time_based",
    )

"""NUMA, RDMA and CUDA: which hardware is where, and whether it is usable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.tools.doctor.finding import Finding, fine

if TYPE_CHECKING:
    from collections.abc import Iterable

SYS = Path("/sys")
CUDA_TIMEOUT_S = 60.0
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def numa(disks: Iterable[str], *, sys_: Path = SYS) -> Finding:
    """Compare the NUMA nodes of disks, network cards and GPUs."""
    nodes = sorted(path.name for path in (sys_ / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return fine("numa", "one memory node: nothing can be far away", f"{len(nodes)} nodes")
    places = {f"disk {disk}": _disk_node(disk, sys_) for disk in disks}
    for path in sorted((sys_ / "class/net").glob("*/device/numa_node")):
        places[f"network {path.parts[-3]}"] = _number(path)
    for path in sorted((sys_ / "bus/pci/drivers/nvidia").glob("*/numa_node")):
        places[f"GPU {path.parts[-2]}"] = _number(path)
    known = {what: node for what, node in places.items() if node is not None and node >= 0}
    evidence = ", ".join(f"{what}: node {node}" for what, node in known.items()) or "none is known"
    used = {node for what, node in known.items() if not what.startswith("network")}
    if len(used) < 2:
        return fine("numa", "disks and GPUs are on one memory node", evidence)
    return Finding(
        "numa",
        "",
        "warning",
        "disks and GPUs are on different memory nodes, so reads cross between them",
        evidence,
        "the slots that the cards are in",
        "tierd config show  # set pump.cpu to a CPU of the disk's node: lscpu | grep NUMA",
    )


def _disk_node(disk: str, sys_: Path) -> int | None:
    try:
        info = os.stat(disk)
    except OSError:
        return None
    device = info.st_rdev or info.st_dev
    place = (sys_ / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for folder in (place, *place.parents):
        if (folder / "numa_node").is_file():
            return _number(folder / "numa_node")
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def rdma(*, sys_: Path = SYS) -> list[Finding]:
    """List RDMA ports with their GIDs; only exports and remote tables need one."""
    ports = sorted((sys_ / "class/infiniband").glob("*/ports/*"))
    if not ports:
        return [fine("rdma", "no RDMA device; remote tables would come over TCP", "none in /sys")]
    return [_port(port) for port in ports]


def _port(port: Path) -> Finding:
    name = f"{port.parts[-3]}/{port.name}"
    state = _text(port / "state")
    gids = {path.name: _text(path) for path in sorted((port / "gids").glob("*"))}
    used = {index: gid for index, gid in gids.items() if gid and gid != _ZERO_GID}
    kinds = {index: _text(port / "gid_attrs/types" / index) for index in used}
    listed = ", ".join(f"{index}: {gid} ({kinds[index] or '?'})" for index, gid in used.items())
    evidence = f"{state}, {_text(port / 'rate')}; GIDs {listed or 'none'}"
    net = _text(port / "gid_attrs/ndevs/0") or "IFACE"
    if "ACTIVE" not in state:
        text, cause = "the port is not active", "no cable, no link, or the interface is down"
        return Finding("rdma", name, "warning", text, evidence, cause, f"ip link set {net} up")
    if all(gid.startswith("fe80") for gid in used.values()):
        text = "the port has only link-local GIDs, which other nodes cannot reach"
        cause = "its network interface has no address"
        return Finding("rdma", name, "warning", text, evidence, cause, f"ip addr show dev {net}")
    return fine("rdma", "the port is active and can be reached", evidence, subject=name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def cuda() -> Finding:
    """Register host memory of several sizes with CUDA, in a process of its own.

    A context costs hundreds of MiB, and a driver that errs should err elsewhere.
    """
    command = [sys.executable, "-m", "tierd.tools.doctor.cuda"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CUDA_TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        cause = "the driver hangs or crashes"
        text, seen = "CUDA could not be examined", f"{type(error).__name__}"
        return Finding("cuda", "", "warning", text, seen, cause, "nvidia-smi")
    if answer["driver"] is None:
        return fine("cuda", "no CUDA driver: nothing is cached on a GPU here", answer["evidence"])
    failed = [size for size, result in answer["sizes"].items() if result != 0]
    evidence = f"driver {answer['driver']}; " + ", ".join(
        f"{size}: {'registered' if result == 0 else f'error {result}'}"
        for size, result in answer["sizes"].items()
    )
    if not failed:
        return fine("cuda", "host memory can be registered with CUDA", evidence)
    return Finding(
        "cuda",
        "",
        "problem",
        f"CUDA cannot register {', '.join(failed)} of host memory, so channels of that size fail",
        evidence,
        "the pair of kernel and driver: 6.11 with older drivers refuses more than 2 GiB",
        "uname -r; nvidia-smi --query-gpu=driver_version --format=csv",
    )

"""Tables in another node's memory, over real verbs: soft-RoCE in small virtual machines.

What is tested runs inside (one_machine.py, two_daemons.py, two_machines.py); here the machines are
booted and the outcomes shown.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.remote import two_roles
from tests.daemons import engram_node
from tests.lab.rdma import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.rdma.machine import Machine

ROOT = Path(__file__).resolve().parents[3]
WHY_NOT = machine.why_not() if os.environ.get("TIERD_LAB_RDMA") else "run: make lab-rdma"
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[Machine]:
    with machine.machines(1) as (one,):
        one.run("modprobe dummy; ip link add d0 type dummy")
        one.roce("10.9.0.1/24", netdev="d0")
        yield one


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Machine]]:
    with machine.machines(2) as both:
        for number, one in enumerate(both, 1):
            one.roce(f"10.9.0.{number}/24")
        yield both


def inside(one: Machine, name: str, timeout_s: float = 900) -> str:
    """Run a file's tests in a machine, without the plugins: importing them takes a minute there."""
    words = [
        *(sys.executable, "-m", "pytest", "--noconftest", "-c", "/dev/null", "-v"),
        *(f"--rootdir={ROOT}", "-p", "no:cacheprovider", f"tests/lab/rdma/{name}"),
    ]
    settings = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1"
    path = shlex.quote(str(Path(sys.executable).parent))
    command = f"cd {shlex.quote(str(ROOT))}; export PATH={path}:$PATH {settings}"
    text = one.run(f"{command}; {shlex.join(words)}", check=False, timeout_s=timeout_s)
    print(text)
    assert " passed" in text, text
    assert "failed" not in text, text
    assert "error" not in text.rsplit("=", 40)[-1], text
    return text


def test_the_machines_have_real_verbs(alone: Machine) -> None:
    assert "rxe0" in alone.run("rdma link show")
    assert "qp" in alone.run("rdma resource show")


def test_one_machine(alone: Machine) -> None:
    inside(alone, "one_machine.py")


def test_two_daemons(alone: Machine, tmp_path: Path) -> None:
    node = engram_node(tmp_path, rows=11_000)
    (alone.lab / "device.img").write_bytes(node.device.read_bytes())
    inside(alone, "two_daemons.py")


def test_two_machines_while_the_peer_is_killed_and_the_link_flaps(pair: list[Machine]) -> None:
    words = ["--rows", "60000", "--kills", "2", "--flaps", "2", "--settle", "1"]
    seen = two_roles(*pair, [*words, "--instances", "2"])
    for one in seen["instances"]:
        assert (one["wrong_rows"], one["hangs"], one["failed"], one["exit"]) == (0, 0, 0, 0)
        assert one["connects"] >= 3
        assert one["remote_reads"] > 0
    assert seen["mtu"] == 4096


def test_the_smaller_mtu_is_used(pair: list[Machine]) -> None:
    pair[1].run("ip link set eth0 mtu 1500")
    try:
        seen = two_roles(*pair, ["--rows", "6000"])
        assert seen["mtu"] == 1024
        assert seen["instances"][0]["wrong_rows"] == 0
        assert seen["instances"][0]["remote_reads"] > 0
    finally:
        pair[1].run("ip link set eth0 mtu 4200")


def test_addresses_of_ipv6_alone(pair: list[Machine]) -> None:
    for number, one in enumerate(pair, 1):
        one.run(f"ip addr flush dev eth0; ip addr add fd00::{number}/64 dev eth0 nodad")
    seen = two_roles(*pair, ["--rows", "6000"], peer="fd00::1", family="AF_INET6")
    assert seen["gid"].startswith("fd00")
    assert seen["instances"][0]["wrong_rows"] == 0
    assert seen["instances"][0]["remote_reads"] > 0

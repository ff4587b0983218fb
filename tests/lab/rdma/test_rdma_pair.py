"""Two machines on one wire: one exports (roles.py), the other reads, and things go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.remote import two_roles
from tests.lab.rdma import machine
from tests.lab.rdma.marks import LAB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.rdma.machine import Machine

pytestmark = LAB


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Machine]]:
    with machine.machines(2) as both:
        for number, one in enumerate(both, 1):
            one.roce(f"10.9.0.{number}/24")
        yield both


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

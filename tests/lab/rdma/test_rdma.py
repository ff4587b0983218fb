"""Tables in another node's memory, over real verbs: soft-RoCE in small virtual machines.

What is tested runs inside one machine (one_machine.py, two_daemons.py); here it is booted and the
outcomes shown. test_rdma_pair.py has two.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.daemons import engram_node
from tests.lab.rdma import machine
from tests.lab.rdma.marks import LAB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.rdma.machine import Machine

ROOT = Path(__file__).resolve().parents[3]
pytestmark = LAB


@pytest.fixture(scope="module")
def alone() -> Iterator[Machine]:
    with machine.machines(1) as (one,):
        one.run("modprobe dummy; ip link add d0 type dummy")
        one.roce("10.9.0.1/24", netdev="d0")
        yield one


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

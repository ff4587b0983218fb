"""What every test of the lab's machines is marked with."""

from __future__ import annotations

import os

import pytest

from tests.lab.rdma import machine

WHY_NOT = machine.why_not() if os.environ.get("TIERD_LAB_RDMA") else "run: make lab-rdma"
LAB = [
    pytest.mark.rdma,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.timeout(1200),
]

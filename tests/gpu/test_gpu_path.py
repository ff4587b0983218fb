"""The GPU path on a GPU: captured steps against plain torch, and how a fault ends a process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.gpu_rig import bed, graph_of
from bench.gpu_rows import compared, replayed, stress
from tierd.errors import HookError
from tierd.io import seen

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_rows_under_evictions() -> None:
    assert compared(steps=100)["differing"] == 0


def test_replays_with_resizes_and_quota_moves() -> None:
    assert replayed(replays=500)["wrong"] == 0


def test_stress_of_four_sets() -> None:
    assert stress(lookups=2_000_000)["wrong"] == 0


def test_warm_and_then_replay() -> None:
    """Eager lookups and a graph's own must not overlap."""
    with bed(pages=8192, sets=1024) as made:
        ids, out = torch.zeros(768, dtype=torch.int64, device="cuda"), made.outputs(768)

        def step() -> None:
            made.tables[0].kick(ids)
            made.tables[0].gather(ids, out)

        graph = graph_of(step)
        for part in torch.arange(20_000, device="cuda").split(2048):
            made.tables[0].warm(part)
        ids.copy_(torch.randint(0, made.rows, (768,), device="cuda"))
        graph.replay()
        assert made.differing(0, ids, out) == 0


def test_the_daemons_wish_is_followed_inside_a_graph() -> None:
    with bed(pages=8192, sets=64) as made:
        ids = [torch.zeros(768, dtype=torch.int64, device="cuda") for _ in range(2)]
        out = [made.outputs(768) for _ in range(2)]

        def step() -> None:
            for n in range(2):
                made.tables[n].kick(ids[n])
                made.tables[n].gather(ids[n], out[n])

        graph = graph_of(step)
        for ways in (24, 3):
            made.wish(ways, 32 - ways)
            for _ in range(600):
                for n in range(2):
                    ids[n].copy_(torch.randint(0, made.rows, (768,), device="cuda"))
                graph.replay()
                assert all(made.differing(n, ids[n], out[n]) == 0 for n in range(2))
            assert [table.quota for table in made.tables] == [ways, 32 - ways]


def test_rows_that_no_trace_saw_are_zero_inside_a_graph() -> None:
    with bed(pages=8192, sets=64) as made:
        bits = seen.empty(made.rows)
        seen.mark(bits, np.arange(0, made.rows, 3))
        made.tables[0].skip_unseen(bits)
        ids, out = torch.zeros(768, dtype=torch.int64, device="cuda"), made.outputs(768)

        def step() -> None:
            made.tables[0].kick(ids)
            made.tables[0].gather(ids, out)

        graph = graph_of(step)
        for _ in range(20):
            ids.copy_(torch.randint(0, made.rows, (768,), device="cuda"))
            graph.replay()
            known = ids % 3 == 0
            assert made.differing(0, ids[known], out[known]) == 0
            assert not out[~known].view(torch.int16).any()


def test_prefill_in_parts() -> None:
    with bed(pages=8192, sets=256, rows_max=1024) as made:
        ids, out = torch.randint(0, made.rows, (10_000,), device="cuda"), made.outputs(10_000)
        made.tables[1].gather(ids, out)
        assert made.differing(1, ids, out) == 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # nothing came into it
def test_a_captured_shape_beyond_a_request_is_refused() -> None:
    with bed(pages=1024, sets=64, rows_max=256) as made:
        ids = torch.zeros(512, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        refused = pytest.raises(HookError, match=r"raise channel\.rows_max to 512")
        with refused, torch.cuda.graph(graph):
            made.tables[0].kick(ids)


FAULT = """
import torch
from bench.gpu_rig import Bed
made = Bed(pages=1024, sets=64, rows_max=256)
ids = torch.full((8,), -5, dtype=torch.int64, device="cuda")
made.tables[0].kick(ids)
made.tables[0].gather(ids, made.outputs(8))
torch.cuda.synchronize()
print("went on")
"""


def test_a_fault_ends_the_process_with_its_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 70
    assert "row -5 is outside the table" in done.stderr
    assert "went on" not in done.stdout

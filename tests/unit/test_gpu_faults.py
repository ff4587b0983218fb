"""What the GPU path does when a row cannot be served: it stops, says why, and leaves no wrong row.

A server played by the test answers requests as it likes; so either arena, any status, and pages
that are not what they should be.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import gpu_rig  # first: it decides that kernels are interpreted
import numpy as np
import pytest
import torch
from gpu_rig import GpuEngine
from twin_rig import Image, expected, pack, random_rows

from tierd.errors import HookError, RowError
from tierd.gpu import fault, state
from tierd.gpu.cache import GpuCache
from tierd.gpu.shared import ChannelMap, resolve_device
from tierd.gpu.table import GpuTable, TableImage
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

P = _core.protocol
ROWS, DIM = 60, 64


@pytest.fixture(scope="module")
def image() -> Image:
    stored = random_rows(ROWS, DIM, "e4m3_e8m0", np.random.default_rng(5))
    decoded = expected(stored, DIM, "e4m3_e8m0")
    return Image(77, 3, DIM, "e4m3_e8m0", stored, decoded, 0, 0, -1)


class HandServer:
    """Answers the last published request of ring 0 by hand."""

    def __init__(self, engine: GpuEngine, image: Image) -> None:
        self.entry = engine.map.entry(0)
        self.buffer = engine.channel.buffer()
        self.control = engine.channel.control(0)
        self.pages = pack(image.stored, image.image_id, image.generation)

    def word(self, offset: int) -> np.ndarray[Any, Any]:
        return self.control[offset : offset + 4].view("<u4")

    def listed(self) -> tuple[int, np.ndarray[Any, Any], int]:
        """(sequence, pages, first arena page) of the last published request."""
        sequence = int(self.word(P.OFFSET_DOORBELL)[0])
        size = int(P.descriptor_bytes(self.entry["rows_max"]))
        at = self.entry["descriptors"] + sequence % 8 * size
        header = self.buffer[at : at + 16].view("<u4")
        assert header[0] == sequence
        listed = self.buffer[at + 64 : at + 64 + int(header[1]) * 4].view("<u4")
        return sequence, listed.copy(), int(header[2])

    def answer(self, status: str = "ok", *, guardian: bool = False, spoil: int = -1) -> int:
        """Write the pages and complete; `spoil` flips a bit of every row in that arena page."""
        sequence, listed, first = self.listed()
        arena = self.entry["arena_g" if guardian else "arena_d"]
        for k, page in enumerate(listed):
            at = arena + (first + k) % self.entry["arena_pages"] * 4096
            self.buffer[at : at + 4096] = self.pages[page]
            if k == spoil:
                self.buffer[at : at + 3000 : 16] ^= 4
        word = P.OFFSET_STATUS_G if guardian else P.OFFSET_STATUS_D
        done = P.OFFSET_DONE_G if guardian else P.OFFSET_DONE_D
        at = word + sequence % 8 * 8
        code = int(P.Status[status])
        self.control[at : at + 8].view("<u8")[0] = sequence << 32 | code
        self.word(done)[0] = sequence
        return sequence


@pytest.fixture
def engine(image: Image) -> Iterator[GpuEngine]:
    with GpuEngine(None, [image], quota=8) as made:
        yield made


def test_pages_come_from_the_arena_whose_word_names_the_request(
    engine: GpuEngine, image: Image
) -> None:
    server = HandServer(engine, image)
    for step, guardian in enumerate([False, True, True, False]):
        ids = torch.arange(step * 5, step * 5 + 5)
        engine.tables[0].kick(ids)
        server.answer(guardian=guardian)
        if guardian:  # what the daemon's arena holds is a foreign row's bytes
            start = server.entry["arena_d"]
            server.buffer[start : start + 5 * 4096] = 0x55
        np.testing.assert_array_equal(engine.gather(0, ids), image.decoded[ids.numpy()])


def test_two_requests_answered_by_different_servers(engine: GpuEngine, image: Image) -> None:
    server = HandServer(engine, image)
    engine.tables[0].kick(torch.arange(5))
    server.answer(guardian=True)
    later = torch.arange(3, 9)
    engine.tables[0].kick(later)
    server.answer()
    np.testing.assert_array_equal(engine.gather(0, later), image.decoded[3:9])


def test_bypassed_rows_come_from_the_guardian_too(image: Image) -> None:
    with GpuEngine(None, [image], quota=0) as engine:
        server = HandServer(engine, image)
        ids = torch.tensor([9, 9, 30])
        engine.tables[0].kick(ids)
        server.answer(guardian=True)
        np.testing.assert_array_equal(engine.gather(0, ids), image.decoded[ids.numpy()])


@pytest.mark.parametrize("status", ["read_error", "wrong_page", "bad_request", "cancelled"])
def test_a_failed_request_empties_its_words_and_says_why(
    engine: GpuEngine, image: Image, status: str
) -> None:
    server = HandServer(engine, image)
    engine.tables[0].kick(torch.arange(2))
    server.answer()
    engine.gather(0, torch.arange(2))  # as demanded ids: all hits
    ids = torch.arange(6)
    engine.tables[0].kick(ids)
    sequence = server.answer(status)
    assert engine.held(0) == 6
    with pytest.raises(RowError, match=rf"request {sequence} failed: {status}.*run: tierd verify"):
        engine.gather(0, ids)
    assert engine.held(0) == 2
    assert engine.tables[0].stats()["failed"] == 1
    with pytest.raises(RowError, match=status):  # nothing is served after a fault
        engine.tables[0].kick(ids)


@pytest.mark.parametrize("quota", [8, 0])
def test_a_row_without_its_tag_is_never_served(image: Image, quota: int) -> None:
    with GpuEngine(None, [image], quota=quota) as engine:
        server = HandServer(engine, image)
        ids = torch.tensor([40])
        engine.tables[0].kick(ids)
        server.answer(spoil=0)
        with pytest.raises(RowError, match=r"row 40 .*does not carry its tag"):
            engine.gather(0, ids)
        assert engine.held(0) == 0
        assert engine.tables[0].stats()["tag_errors"] == 1


def test_nobody_answers(image: Image) -> None:
    with GpuEngine(None, [image], quota=8) as engine:
        engine.tables[0]._timeout_ns = 20_000_000
        engine.tables[0].kick(torch.arange(3))
        with pytest.raises(RowError, match=r"no answer within 0\.0 s; run: tierd status"):
            engine.gather(0, torch.arange(3))
        assert engine.held(0) == 0


@pytest.mark.parametrize("bad", [-1, ROWS, 1 << 40])
def test_ids_outside_the_table(engine: GpuEngine, image: Image, bad: int) -> None:
    ids = torch.tensor([3, bad])
    engine.tables[0].kick(ids)
    HandServer(engine, image).answer()
    with pytest.raises(RowError, match=f"row {bad} is outside the table"):
        engine.gather(0, ids)


def test_ids_that_change_after_the_kick(engine: GpuEngine, image: Image) -> None:
    ids = torch.arange(4)
    engine.tables[0].kick(ids)
    HandServer(engine, image).answer()
    ids[2] = 50
    with pytest.raises(RowError, match="row 50: the row numbers changed"):
        engine.gather(0, ids)


def test_a_row_of_another_rank_that_becomes_ones_own(image: Image) -> None:
    """It was not looked up, so serving it as +0 would be wrong."""
    with GpuEngine(None, [image], quota=8, row_hi=30) as engine:
        ids = torch.arange(40, 44)
        engine.tables[0].kick(ids)
        assert not engine.gather(0, ids).any()
        engine.tables[0].kick(ids)
        ids[1] = 30  # still another's
        assert not engine.gather(0, ids).any()
        engine.tables[0].kick(ids)
        ids[2] = 29
        with pytest.raises(RowError, match="row 29: the row numbers changed"):
            engine.gather(0, ids)


@pytest.mark.parametrize("row_format", ["e4m3_e8m0", "bf16"])
def test_a_gather_that_no_kick_has_served(row_format: str) -> None:
    """As of a graph that holds a gather alone, replayed first."""
    stored = random_rows(ROWS, DIM, row_format, np.random.default_rng(6))
    decoded = expected(stored, DIM, row_format)
    image = Image(78, 1, DIM, row_format, stored, decoded, 0, 0, -1)
    with GpuEngine(None, [image], quota=8) as engine:
        ids = torch.arange(4)
        engine.tables[0]._kicked = ids
        with pytest.raises(RowError, match="row 3: the row numbers changed"):
            engine.gather(0, ids)


@pytest.mark.parametrize("status", ["ok", "read_error"])
def test_a_fill_ages_after_its_claim_spares_who_has_the_slot_now(image: Image, status: str) -> None:
    """A claim is not protected for ever; its row must then not land in another row's slot."""
    with GpuEngine(None, [image], sets=1, quota=8) as engine:
        server = HandServer(engine, image)
        ids = torch.arange(4)
        engine.tables[0].kick(ids)
        server.answer(status)
        words = engine.cache.words
        slot = int(((words >> 24) & ((1 << 34) - 1) == 3).nonzero()[0])  # row 2
        taken = 51 << 24
        words[slot] = taken
        engine.cache.slots.view(torch.uint8).reshape(-1)[:] = 0x5A
        before = engine.cache.slots.clone().reshape(len(words), -1)
        with pytest.raises(RowError, match=r"row 2: the row numbers changed|read_error"):
            engine.gather(0, ids)
        assert int(words[slot]) == taken
        now = engine.cache.slots.reshape(len(words), -1)
        assert torch.equal(now[slot], before[slot])
        assert engine.held(0) == (4 if status == "ok" else 1)
        filled = int((now != before).any(1).sum())
        assert filled == (3 if status == "ok" else 0)


def test_request_zero_is_not_answered_by_words_never_written(image: Image) -> None:
    """Sequence 2^32 has the low bits of a status word that is all zeroes."""
    with GpuEngine(None, [image], quota=8, first_sequence=(1 << 32) - 1) as engine:
        server = HandServer(engine, image)
        ids = torch.arange(3)
        engine.tables[0].kick(ids)
        assert server.listed()[0] == 0
        assert not engine.channel.control(0)[P.OFFSET_STATUS_D :][:64].any()
        server.answer()  # by the daemon alone: the guardian's word stays zero
        np.testing.assert_array_equal(engine.gather(0, ids), image.decoded[:3])
    with GpuEngine(None, [image], quota=8, first_sequence=(1 << 32) - 1) as engine:
        engine.tables[0]._timeout_ns = 20_000_000
        engine.tables[0].kick(ids)
        with pytest.raises(RowError, match="no answer"):
            engine.gather(0, ids)


# --- what is refused before any launch -----------------------------------------------------------


def refused(engine: GpuEngine, ids: Any, out: torch.Tensor | None = None) -> str:
    before = engine.cache.state.clone()
    table = engine.tables[0]
    call = table.kick if out is None else functools.partial(table.gather, out=out)
    with pytest.raises(HookError) as caught:
        call(ids)
    assert torch.equal(engine.cache.state, before)
    return str(caught.value)


def test_ids_of_another_kind(engine: GpuEngine) -> None:
    assert "int32 or int64" in refused(engine, torch.zeros(3))
    assert "got ndarray" not in refused(engine, torch.zeros(3, dtype=torch.bool))
    assert "int32 or int64" in refused(engine, np.zeros(3, np.int64))
    assert "on meta" in refused(engine, torch.zeros(3, dtype=torch.int64, device="meta"))
    assert "do not collapse" in refused(engine, torch.zeros(4, 4, 4).long()[:, :3, :3])


def test_outputs_of_another_kind(engine: GpuEngine) -> None:
    ids = torch.arange(4)
    assert "shape" in refused(engine, ids, torch.empty(4, DIM + 1, dtype=torch.bfloat16))
    assert "float32" in refused(engine, ids, torch.empty(4, DIM))
    wide = torch.empty(4, 2 * DIM, dtype=torch.bfloat16)[:, :DIM]
    assert "not contiguous" in refused(engine, ids, wide)


def test_no_rows_at_all(engine: GpuEngine) -> None:
    ids = torch.empty(0, 3, dtype=torch.int64)
    engine.tables[0].kick(ids)
    engine.tables[0].gather(ids, torch.empty(0, 3, DIM, dtype=torch.bfloat16))
    assert engine.tables[0].stats()["steps"] == 0


def test_parts_that_do_not_fit_each_other(engine: GpuEngine, image: Image) -> None:
    view = gpu_rig.view_of(image, 0)
    with pytest.raises(HookError, match="in use in this cache"):
        GpuTable(engine.cache, engine.map, ring=0, image=view, quota=4)
    with pytest.raises(HookError, match="the channel has 1 rings"):
        GpuTable(engine.cache, engine.map, ring=1, image=view, quota=4)
    other = GpuCache(sets=1, row_bytes=100, device="cpu")
    with pytest.raises(HookError, match="do not fit a cache of 100 B rows"):
        GpuTable(other, engine.map, ring=0, image=view, quota=4)
    fresh = GpuCache(sets=1, row_bytes=image.row_bytes, device="cpu")
    with pytest.raises(HookError, match="carries table 0, not 5"):
        GpuTable(fresh, engine.map, ring=0, image=gpu_rig.view_of(image, 5), quota=4)
    with pytest.raises(HookError, match="do not make rows of 66 B"):
        TableImage("t", 0, 1, 1, 10, 100, 66, RowFormat.E4M3_E8M0)


def test_sizes_out_of_range(engine: GpuEngine) -> None:
    with pytest.raises(HookError, match="1 to 4194304 sets"):
        GpuCache(sets=1 << 23, row_bytes=66, device="cpu")
    with pytest.raises(HookError, match="between 1 and 2"):
        engine.cache.resize(3)
    with pytest.raises(HookError, match="the other tables hold 0 of 32"):
        engine.tables[0].set_quota(33)
    with pytest.raises(HookError, match="the other tables hold"):
        engine.cache.set_quotas({0: 40})
    assert int(engine.cache.state[state.C_QUOTA.value]) == 8


def test_no_gpu_is_said_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(HookError, match="no CUDA GPU is visible"):
        resolve_device("cuda")


def test_a_channel_of_another_process_is_refused(engine: GpuEngine) -> None:
    head = engine.channel.buffer()[:64].view("<u4")
    pid, abi = int(head[7]), int(head[1])
    try:
        head[7] = pid + 1
        with pytest.raises(HookError, match=f"made by process {pid + 1}"):
            ChannelMap(engine.channel, torch.device("cpu"))
        head[7], head[1] = pid, 9
        with pytest.raises(HookError, match="ABI 9"):
            ChannelMap(engine.channel, torch.device("cpu"))
    finally:
        head[7], head[1] = pid, abi


WATCHED = """
import time
import numpy as np
from tierd.gpu import fault, state
block = fault.FaultBlock("model/table", 15)
words = block.memory[:24].view(np.int64)
words[1:3] = [4, 300]
fault.WATCH.add(block)
print("going on", flush=True)
words[0] = state.FAULT_TAG.value
time.sleep(60)
print("still here", flush=True)
"""


def test_the_watch_ends_the_process_with_the_reason() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == fault.EXIT_CODE
    assert done.stdout == "going on\n"
    assert "tierd: model/table: row 300 (page 20) does not carry its tag" in done.stderr

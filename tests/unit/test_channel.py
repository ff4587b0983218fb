"""The client's side of a channel: layout, seals, and requests without a cache."""

from __future__ import annotations

import fcntl
import os
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest

from tests.unit.twin_rig import Rig
from tierd.io import _core
from tierd.io._core import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("channel") / "image", [(3000, 256, "e4m3_e8m0")])
    yield rig
    rig.close()


def make_channel(rows_max: int = 8, arena_pages: int = 20, rings: int = 1) -> _core.Channel:
    return _core.Channel(
        rank=1, world=2, client_id=bytes(range(16)),
        rings=[(rows_max, arena_pages, ring, 0) for ring in range(rings)],
    )  # fmt: skip


class Served:
    """A ring of its own, served by the rig's pump."""

    def __init__(self, rig: Rig, *, first_sequence: int = 0, rows_max: int = 8) -> None:
        self.rig = rig
        self.channel = make_channel(rows_max)
        self.client = _core.RingClient(
            self.channel, 0, rig.pump.wake_fd, first_sequence=first_sequence, spin_us=0
        )
        self.number = rig.pump.add_channel(self.channel.fd)
        rig.pump.add_ring(self.number, 0, rig.images[0].served)
        self.file = np.frombuffer(os.pread(rig.fd, rig.images[0].pages * 4096, 0), np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rig.pump.remove_channel(self.number)

    def publish(self, pages: NDArray[np.uint32], **options: int) -> int:
        return publish(self.client, pages, **options)

    def check(self, sequence: int, pages: NDArray[np.uint32]) -> None:
        want = self.file.reshape(-1, 4096)[pages]
        np.testing.assert_array_equal(self.client.pages(sequence), want)


def publish(client: _core.RingClient, pages: NDArray[np.uint32], **options: int) -> int:
    zero = np.zeros(len(pages), np.uint32)
    return client.publish(pages, zero, ~zero, **options)


def answer(channel: _core.Channel, sequence: int, *, guardian: bool, status: int = 1) -> None:
    """Store what a server stores when it is done with a request."""
    control = channel.control(0)
    line = p.OFFSET_STATUS_G if guardian else p.OFFSET_STATUS_D
    done = p.OFFSET_DONE_G if guardian else p.OFFSET_DONE_D
    at = line + sequence % p.RING_DEPTH * 8
    control[at : at + 8].view(np.uint64)[0] = sequence << 32 | status
    control[done : done + 4].view(np.uint32)[0] = sequence


def test_header_and_layout() -> None:
    channel = _core.Channel(
        rank=1, world=2, client_id=bytes(range(16)), rings=[(8, 20, 5, 0), (100, 333, 6, 1)]
    )
    data = channel.buffer()
    assert len(data) == channel.bytes == os.fstat(channel.fd).st_size
    assert data[:8].view(np.uint32).tolist() == [p.CHANNEL_MAGIC, p.CHANNEL_ABI]
    assert data[8:16].view(np.uint64)[0] == channel.bytes
    assert data[16:32].view(np.uint32).tolist() == [2, 1, 2, os.getpid()]
    assert bytes(data[32:48]) == bytes(range(16))
    spans = []
    for ring, (rows_max, pages, table, flags) in enumerate([(8, 20, 5, 0), (100, 333, 6, 1)]):
        at = p.OFFSET_RINGS + ring * p.RING_ENTRY_BYTES
        entry = data[at : at + p.RING_ENTRY_BYTES]
        control, descriptors, arena_d, arena_g, stats, samples = entry[:48].view(np.uint64)
        assert entry[48:].view(np.uint32).tolist() == [rows_max, pages, table, flags]
        assert samples % 64 == 0
        assert arena_d % 4096 == arena_g % 4096 == 0
        assert control % 64 == descriptors % 64 == stats % 64 == 0
        spans += [
            (control, p.CONTROL_BYTES),
            (descriptors, p.RING_DEPTH * p.descriptor_bytes(rows_max)),
            (stats, p.STATS_BYTES),
            (samples, p.SAMPLE_HEADER_BYTES + 8 * p.SAMPLE_CAPACITY),
            (arena_d, pages * 4096),
            (arena_g, pages * 4096),
        ]
    spans.sort()
    assert spans[0][0] == p.HEADER_BYTES
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    assert sum(spans[-1]) == channel.bytes


def test_sealed_against_growing_and_shrinking() -> None:
    channel = make_channel()
    seals = fcntl.fcntl(channel.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (0, channel.bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(channel.fd, size)
    assert fcntl.fcntl(channel.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@pytest.mark.parametrize(
    ("rings", "message"),
    [
        ([], "1 to 64 rings"),
        ([(8, 20, 0, 0)] * 65, "1 to 64 rings"),
        ([(8, 20, 0, 0), (0, 20, 0, 0)], "ring 1: rows_max"),
        ([(8, 7, 0, 0)], "ring 0: arena_pages"),
        ([(8, 20, 64, 0)], "ring 0: table"),
        ([((1 << 20) + 1, 1 << 21, 0, 0)], "ring 0: rows_max"),
        ([(8, (1 << 21) + 1, 0, 0)], "ring 0: arena_pages"),
    ],
)
def test_sizes_that_the_protocol_forbids(
    rings: list[tuple[int, int, int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Channel(rank=0, world=1, client_id=bytes(16), rings=rings)
    with pytest.raises(ValueError, match="rank must be below world"):
        _core.Channel(rank=2, world=2, client_id=bytes(16), rings=[(8, 20, 0, 0)])
    with pytest.raises(ValueError, match="16 bytes"):
        _core.Channel(rank=0, world=1, client_id=bytes(15), rings=[(8, 20, 0, 0)])


@pytest.mark.parametrize("first_sequence", [0, 2**32 - 30])
def test_pages_arrive_over_many_turns_of_ring_and_arena(rig: Rig, first_sequence: int) -> None:
    rng = np.random.default_rng(3)
    with Served(rig, first_sequence=first_sequence) as served:
        outstanding: list[tuple[int, NDArray[np.uint32]]] = []
        for turn in range(100):
            # 20 arena pages take two requests of up to 8 pages, whatever their sizes.
            if len(outstanding) == 2:
                sequence, pages = outstanding.pop(0)
                assert served.client.wait(sequence, 10 * SECOND) == p.Status.ok
                served.check(sequence, pages)
                served.client.retire(sequence)
            pages = rng.integers(0, rig.images[0].pages, rng.integers(1, 9)).astype(np.uint32)
            sequence = served.publish(pages, priority=turn % 2)
            assert sequence == (first_sequence + 1 + turn) % 2**32
            outstanding.append((sequence, pages))
        assert served.client.stats() == {"ring_full": 0, "published": 100}


def test_publish_waits_for_room() -> None:
    channel = make_channel(rows_max=8, arena_pages=20)
    client = _core.RingClient(channel, 0, -1)
    eight, one = np.arange(8, dtype=np.uint32), np.zeros(1, np.uint32)
    assert [publish(client, eight), publish(client, eight)] == [1, 2]
    with pytest.raises(TimeoutError, match="no room"):
        publish(client, eight, timeout_ns=1)
    assert client.stats() == {"ring_full": 1, "published": 2}
    assert publish(client, eight[:4]) == 3  # 20 pages in all
    done: list[int] = []
    waiter = threading.Thread(target=lambda: done.append(publish(client, eight)))
    waiter.start()
    while client.stats()["ring_full"] != 2:  # it waits now
        pass
    answer(channel, 1, guardian=False)
    client.retire(1)
    waiter.join(timeout=20)
    assert done == [4]
    for sequence in (2, 3, 4):
        answer(channel, sequence, guardian=False)
        client.retire(sequence)
    for _ in range(8):
        publish(client, one)
    with pytest.raises(TimeoutError, match="no room"):  # eight deep
        publish(client, one, timeout_ns=1)


def test_descriptor_as_published() -> None:
    channel = make_channel(rows_max=8, arena_pages=24, rings=2)
    client = _core.RingClient(channel, 1, -1)
    for sequence in (1, 2, 3):
        pages = np.array([7, 8, 9, 10, 11, 12, 13][:7], np.uint32) + np.uint32(sequence)
        client.publish(pages, pages * 2, pages * 3, 1)
        at = p.OFFSET_RINGS + p.RING_ENTRY_BYTES
        descriptors = int(channel.buffer()[at + 8 : at + 16].view(np.uint64)[0])
        size = p.descriptor_bytes(8)
        start = descriptors + sequence % p.RING_DEPTH * size
        words = channel.buffer()[start : start + size].view(np.uint32)
        first_page = [0, 7, 14][sequence - 1]
        assert words[:4].tolist() == [sequence, 7, first_page, 1]
        step = p.array_bytes(8) // 4
        for k in range(3):
            array = words[16 + k * step : 16 + k * step + 7]
            np.testing.assert_array_equal(array, pages * (k + 1))
        control = channel.control(1)
        assert control[p.OFFSET_DOORBELL :][:4].view(np.uint32)[0] == sequence


@pytest.mark.parametrize("guardian", [False, True])
def test_pages_come_from_the_arena_that_answered(guardian: bool) -> None:
    channel = make_channel()
    client = _core.RingClient(channel, 0, -1)
    data = channel.buffer()
    entry = data[p.OFFSET_RINGS :][: p.RING_ENTRY_BYTES]
    arena_d, arena_g = (int(v) for v in entry[16:32].view(np.uint64))
    data[arena_d : arena_d + 20 * 4096] = 0xDD
    data[arena_g : arena_g + 20 * 4096] = 0x66
    pages = np.zeros(2, np.uint32)
    for sequence in range(1, 30):
        publish(client, pages)
        by_guardian = guardian if sequence % 3 else not guardian
        answer(channel, sequence, guardian=by_guardian)
        if sequence % 2:  # the other server's level steps over it without a status
            done = p.OFFSET_DONE_D if by_guardian else p.OFFSET_DONE_G
            channel.control(0)[done : done + 4].view(np.uint32)[0] = sequence
        assert client.wait(sequence, SECOND) == p.Status.ok
        assert (client.pages(sequence) == (0x66 if by_guardian else 0xDD)).all()
        client.retire(sequence)


def test_one_good_answer_of_two_is_enough() -> None:
    channel = make_channel()
    client = _core.RingClient(channel, 0, -1)
    for sequence, (daemon, guardian, want) in enumerate([(1, 7, 1), (7, 1, 1), (5, 2, 2)], 1):
        publish(client, np.zeros(1, np.uint32))
        answer(channel, sequence, guardian=False, status=daemon)
        answer(channel, sequence, guardian=True, status=guardian)
        assert client.wait(sequence, SECOND) == want
        client.retire(sequence)


@pytest.mark.parametrize("guardian", [False, True])
@pytest.mark.parametrize("first", [(1 << 31) - 3, (1 << 32) - 12])
def test_a_server_that_never_answered_is_not_waited_for(first: int, guardian: bool) -> None:
    """Its level of 0 is ahead of half of all sequences, and near those around 2^32."""
    channel = make_channel()
    client = _core.RingClient(channel, 0, -1, first_sequence=first)
    silent = p.OFFSET_DONE_D if guardian else p.OFFSET_DONE_G
    channel.control(0)[silent : silent + 4].view(np.uint32)[0] = 0
    for ahead in range(1, 24):
        sequence = (first + ahead) % (1 << 32)
        assert publish(client, np.zeros(1, np.uint32)) == sequence
        with pytest.raises(TimeoutError, match=f"no answer to request {sequence}"):
            client.wait(sequence, 0)
        answer(channel, sequence, guardian=guardian)
        assert client.wait(sequence, SECOND) == p.Status.ok
        client.retire(sequence)


def test_wait_times_out_and_is_woken() -> None:
    channel = make_channel()
    client = _core.RingClient(channel, 0, -1, spin_us=0)
    sequence = publish(client, np.zeros(1, np.uint32))
    with pytest.raises(TimeoutError, match="no answer to request 1"):
        client.wait(sequence, 5_000_000)
    waiter = channel.control(0)[p.OFFSET_WAITER :][:4].view(np.uint32)
    assert waiter[0] == 0
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(client.wait(sequence, 30 * SECOND)))
    thread.start()
    while not result:
        if waiter[0] == 1:  # it sleeps, or is about to; it looks again by itself
            answer(channel, sequence, guardian=True)
    thread.join(timeout=20)
    assert result == [p.Status.ok]
    assert waiter[0] == 0


def test_a_parked_pump_is_rung() -> None:
    channel = make_channel()
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    client = _core.RingClient(channel, 0, wake)
    parked = channel.control(0)[p.OFFSET_PARKED :][:4].view(np.uint32)
    publish(client, np.zeros(1, np.uint32))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(wake)
    parked[0] = 1
    publish(client, np.zeros(1, np.uint32))
    assert os.eventfd_read(wake) == 1
    os.close(wake)


def test_misuse_is_refused() -> None:
    channel = make_channel()
    client = _core.RingClient(channel, 0, -1)
    with pytest.raises(ValueError, match="has a client already"):
        _core.RingClient(channel, 0, -1)
    with pytest.raises(ValueError, match="no ring 1"):
        _core.RingClient(channel, 1, -1)
    nine = np.zeros(9, np.uint32)
    with pytest.raises(ValueError, match="1 to 8 rows, got 9"):
        client.publish(nine, nine, nine)
    with pytest.raises(ValueError, match="1 to 8 rows, got 0"):
        client.publish(nine[:0], nine[:0], nine[:0])
    with pytest.raises(ValueError, match="one length"):
        client.publish(nine[:3], nine[:2], nine[:3])
    with pytest.raises(ValueError, match="priority"):
        client.publish(nine[:3], nine[:3], nine[:3], 2)
    with pytest.raises(ValueError, match="not outstanding"):
        client.wait(1, 1)
    with pytest.raises(ValueError, match="retire in order"):
        client.retire(1)
    publish(client, nine[:1])
    publish(client, nine[:1])
    with pytest.raises(ValueError, match="retire in order"):
        client.retire(2)
    with pytest.raises(ValueError, match="not answered"):
        client.pages(1)
    with pytest.raises(ValueError, match="replay"):
        client.replay(nine, 4, 2)
    del client
    with pytest.raises(ValueError, match="requests in flight from an earlier client"):
        _core.RingClient(channel, 0, -1)
    answer(channel, 2, guardian=False)
    client = _core.RingClient(channel, 0, -1)  # everything is answered: taken over
    assert publish(client, nine[:1]) == 3
    del client
    with pytest.raises(ValueError, match="never used"):
        _core.RingClient(channel, 0, -1, first_sequence=5)


def test_replay_reads_everything(rig: Rig) -> None:
    rng = np.random.default_rng(4)
    pages = rng.integers(0, rig.images[0].pages, 1003).astype(np.uint32)
    with Served(rig) as served:
        before = rig.pump.stats()["pages"]
        assert served.client.replay(pages, 2, 8) > 0
        assert served.client.replay(pages[:5], 8, 1) > 0
        assert rig.pump.stats()["pages"] - before == 1008
        for batch, depth in [(9, 1), (3, 8), (0, 1), (1, 0), (1, 9)]:
            with pytest.raises(ValueError, match="replay"):
                served.client.replay(pages, batch, depth)
        pages[500] = rig.images[0].pages
        with pytest.raises(RuntimeError, match="failed: bad_request"):
            served.client.replay(pages, 2, 8)
        assert served.client.replay(pages[:500], 2, 8) > 0

"""Hints: pages that the daemon has read ahead are not read again, and never a wrong row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.pump_rig import ROW_BYTES, ROWS_PER_PAGE, SECOND, Image, Served
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

P = _core.protocol
IMAGE = Image.make(pages=3000)
TAGS = ROWS_PER_PAGE * ROW_BYTES


class Hinted:
    """A ring, and one that hints at its pages."""

    def __init__(self, served: Served, *, memory: int = 256, hint_first: bool = False) -> None:
        rings = [(64, 256, 0, 0), (64, memory, 0, int(P.RING_FLAG_HINT))]
        self.served = served
        self.channel = _core.Channel(rank=0, world=1, client_id=b"h" * 16, rings=rings)
        number = served.pump.add_channel(self.channel.fd)
        for ring in (1, 0) if hint_first else (0, 1):
            served.pump.add_ring(number, ring, served.table)
        wake = served.pump.wake_fd
        self.ring, self.hints = (_core.RingClient(self.channel, n, wake) for n in range(2))

    def hint(self, pages: Any, *, wait: bool = True) -> int:
        numbers = np.asarray(pages, np.uint32)
        zeros = np.zeros_like(numbers)
        sequence = int(self.hints.publish(numbers, zeros, zeros, 1))
        if wait:
            assert self.hints.wait(sequence, 20 * SECOND) == P.Status.ok
        return sequence

    def read(self, pages: Any, rows: NDArray[Any], *, alone: bool = True) -> int:
        """Read rows of pages and compare them; returns how many came from a hint."""
        before = self.served.pump.stats()
        numbers = np.asarray(pages, np.uint32)
        sequence = self.ring.publish(numbers, rows.astype(np.uint32), np.zeros_like(numbers), 1)
        assert self.ring.wait(sequence, 20 * SECOND) == P.Status.ok
        got = self.ring.pages(sequence)
        for page, row, found in zip(pages, rows.tolist(), got, strict=True):
            want = IMAGE.data[page]
            start = row * ROW_BYTES
            assert (found[start : start + ROW_BYTES] == want[start : start + ROW_BYTES]).all()
            assert (found[TAGS + 4 * row :][:4] == want[TAGS + 4 * row :][:4]).all()
        self.ring.retire(sequence)
        after = self.served.pump.stats()
        staged = int(after["staged"] - before["staged"])
        if alone:
            assert after["reads"] - before["reads"] == len(pages) - staged
        return staged


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("hints") / "image", IMAGE, crc_sample=1, queue_depth=32)
    yield made
    made.pump.stop()


@pytest.mark.parametrize("hint_first", [False, True])
def test_hinted_pages_are_not_read_again(served: Served, hint_first: bool) -> None:
    both = Hinted(served, hint_first=hint_first)
    rng = np.random.default_rng(1)
    hinted = rng.choice(1000, 50, replace=False)
    sequence = both.hint(hinted)
    rows = rng.integers(0, ROWS_PER_PAGE, 50)
    assert both.read(hinted, rows) == 50
    mixed = np.concatenate([hinted[:20], np.arange(2000, 2030)])
    rng.shuffle(mixed)
    assert both.read(mixed, rows) == 20
    both.hints.retire(sequence)
    assert both.read(hinted, rows) == 0


def test_memory_goes_round(served: Served) -> None:
    """More hints than fit: the oldest go, and what took their place is not mistaken for them."""
    both = Hinted(served, memory=100)
    rng = np.random.default_rng(2)
    out: list[tuple[int, NDArray[np.int64]]] = []
    for _ in range(40):
        pages = rng.choice(IMAGE.pages, rng.integers(1, 40), replace=False)
        while sum(len(p) for _, p in out) + len(pages) > 100:
            both.hints.retire(out.pop(0)[0])
        out.append((both.hint(pages), pages))
        latest = np.concatenate([p for _, p in out])
        wanted = np.concatenate([rng.choice(latest, 20), rng.choice(IMAGE.pages, 20)])
        rows = rng.integers(0, ROWS_PER_PAGE, 40)
        staged = both.read(wanted, rows)
        assert staged >= 18  # a full set of the table may have lost a page


def test_a_hint_that_is_still_read_is_read_twice(served: Served) -> None:
    both = Hinted(served)
    for start in range(0, 600, 60):
        pages = np.arange(start, start + 60)
        sequence = both.hint(pages, wait=False)
        both.read(pages, np.zeros(60, np.int64), alone=False)
        both.hints.wait(sequence, 20 * SECOND)
        both.hints.retire(sequence)


def test_nonsense_in_a_request_is_read_from_the_device(served: Served) -> None:
    both = Hinted(served)
    both.hint([5])
    zeros = np.zeros(1, np.uint32)
    before = served.pump.stats()["staged"]
    sequence = both.ring.publish(zeros + 5, zeros + 0xFFFF_FFFF, zeros, 1)
    assert both.ring.wait(sequence, 20 * SECOND) == P.Status.ok
    assert served.pump.stats()["staged"] == before


def test_a_hint_of_a_bad_page_is_no_answer(tmp_path: Path) -> None:
    image = Image.make(pages=40, image_id=0x77)
    image.data[7, 4070] ^= 1
    made = Served(tmp_path / "image", image, crc_sample=1)
    both = Hinted(made)
    numbers = np.array([6, 7], np.uint32)
    sequence = both.hints.publish(numbers, numbers * 0, numbers * 0, 1)
    assert both.hints.wait(sequence, 20 * SECOND) == P.Status.wrong_page
    sequence = both.ring.publish(numbers, numbers * 0, numbers * 0, 0)
    assert both.ring.wait(sequence, 20 * SECOND) == P.Status.wrong_page
    assert made.pump.stats()["staged"] == 0
    made.pump.stop()

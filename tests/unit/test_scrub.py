"""The scrub: finds what is wrong, goes on where it stopped, keeps its place and waits for reads."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests import checkpoints
from tests.unit.test_stripes import opened, put
from tierd.config import IoSection, load
from tierd.daemon.plane import DataPlane
from tierd.daemon.scrub import Scrubber
from tierd.io.blocks import BLOCK_PAGES
from tierd.io.device import PAGE_BYTES, Device
from tierd.io.scrub import PIECE_PAGES, Scrub
from tierd.io.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

MIB = 1 << 20
LARGE, SMALL = "m/layers.1.engram", "n/layers.2.engram"
PAGES = 2 * BLOCK_PAGES + 10


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("scrub")
    paths = [folder / "one", folder / "two"]
    for path in paths:
        Store.format(path, size=10 * MIB).close()
    with opened(paths) as stores:
        put(stores, checkpoints.engram(folder / "l", layers=(1,), rows=15 * PAGES))
        put(stores, checkpoints.engram(folder / "s", layers=(2,), rows=100), "n")
    return [path.read_bytes() for path in paths]


@pytest.fixture
def disks(media: list[bytes], tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, data in zip(paths, media, strict=True):
        path.write_bytes(data)
    return paths


def flip(disks: list[Path], page: int) -> str:
    """Flip a bit of a page of the large image; return the device's name."""
    with opened(disks, write=False) as stores:
        (store, run), *_ = stores.image(LARGE).runs(page, 1)
        place, path = run.device_page * 4096 + 77, store.device.path
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    return path


def one_pass(scrub: Scrub, images: list[Any], limit: int = 100) -> list[Any]:
    findings = []
    for _ in range(limit):
        step = scrub.step(images, 5.0)
        assert step is not None
        findings += step.findings
        if step.pass_done:
            return findings
    raise AssertionError("the pass does not end")


def test_a_pass_reads_every_page_and_finds_nothing(disks: list[Path], tmp_path: Path) -> None:
    pieces: list[int] = []
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        while not (step := scrub.step(stores.images, 5.0, pieces.append)).pass_done:  # type: ignore[union-attr]
            assert step is not None
        assert scrub.step([], 6.0) is None
    assert sum(pieces) == PAGES + 7
    assert max(pieces) == PIECE_PAGES
    assert (scrub.passes, scrub.finished_at, scrub.bad) == (1, 5.0, {})


def test_damage_is_found_told_and_forgotten_when_it_is_mended(
    disks: list[Path], tmp_path: Path
) -> None:
    device = flip(disks, BLOCK_PAGES + 3)
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        (found,) = one_pass(scrub, stores.images)
    assert (found.image, found.page, found.device) == (LARGE, BLOCK_PAGES + 3, device)
    assert found.fault == "its checksum is wrong"
    assert list(scrub.bad) == [LARGE]
    scrub.save()
    flip(disks, BLOCK_PAGES + 3)
    again = Scrub(tmp_path)
    assert again.bad == scrub.bad
    with opened(disks, write=False) as stores:
        assert one_pass(again, stores.images) == []
    assert again.bad == {}


def test_it_goes_on_where_it_stopped(disks: list[Path], tmp_path: Path) -> None:
    read: list[int] = []
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        images = stores.images
        scrub.step(images, 1.0, read.append)
        scrub.step(images, 1.0, read.append)
        scrub.save()
        again = Scrub(tmp_path)
        assert (again.image, again.next_page) == (LARGE, 2 * BLOCK_PAGES)
        while not again.step(images, 2.0, read.append).pass_done:  # type: ignore[union-attr]
            pass
    assert sum(read) == PAGES + 7, "no page twice, none left out; and the digest was right"
    assert again.bad == {}


def test_the_digest_spans_a_restart(disks: list[Path], tmp_path: Path) -> None:
    """Lost digests start the image anew; changed ones are not believed."""
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        scrub.step(stores.images, 1.0)
        scrub.save()
        digests = tmp_path / "scrub.digests"
        digests.write_bytes(bytes(len(digests.read_bytes())))
        again = Scrub(tmp_path)
        assert again.next_page == 0
        assert one_pass(again, stores.images) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 9, "bad": {}}'])
def test_a_state_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "scrub.json").write_text(text)
    scrub = Scrub(tmp_path)
    assert (scrub.image, scrub.next_page, scrub.bad, scrub.passes) == ("", 0, {}, 0)


def test_an_image_that_goes_away_in_the_middle(disks: list[Path], tmp_path: Path) -> None:
    flip(disks, 0)
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        both = stores.images
        scrub.step(both, 1.0)
        assert list(scrub.bad) == [LARGE]
        small = [image for image in both if image.name == SMALL]
        assert one_pass(scrub, small) == []
    assert scrub.bad == {}


def test_nothing_is_said_against_an_image_that_was_deleted_meanwhile(
    disks: list[Path], tmp_path: Path
) -> None:
    """Its room may be in use again by the time it is read."""
    flip(disks, 3)
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        step = scrub.step(stores.images, 1.0, still_there=lambda image: image.name != LARGE)
        assert step is not None
        assert (step.findings, scrub.next_page, scrub.bad) == ((), 0, {})
        (found,) = one_pass(scrub, stores.images)
        assert found.page == 3


def test_a_page_that_reads_wrong_once_is_not_damaged(
    disks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrub = Scrub(tmp_path)
    read_into = Device.read_into
    lies = [True]

    def lie(self: Device, offset: int, buffer: np.ndarray) -> None:
        read_into(self, offset, buffer)
        if lies and buffer.size > PAGE_BYTES:
            lies.pop()
            buffer[PAGE_BYTES + 9] ^= 1

    with opened(disks, write=False) as stores:
        monkeypatch.setattr(Device, "read_into", lie)
        assert one_pass(scrub, stores.images) == []
    assert lies == [], "the fault was reached"
    assert scrub.bad == {}


def test_state_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    scrub = Scrub(tmp_path / "none")
    scrub.save()
    assert "No such file" in scrub.save_error
    (tmp_path / "none").mkdir()
    scrub.save()
    assert scrub.save_error == ""


# --- the thread -----------------------------------------------------------------------------------


@pytest.fixture
def plane(disks: list[Path], tmp_path: Path):
    overrides = {
        "daemon.state_dir": str(tmp_path),
        "daemon.runtime_dir": str(tmp_path),
        "devices.paths": list(map(str, disks)),
    }
    made = DataPlane.open(load(environ={}, overrides=overrides).settings)
    yield made
    made.close()


def wait_for(scrubber: Scrubber, state: str) -> dict[str, Any]:
    """Look until it is so; bounded, and no measurement."""
    for _ in range(2000):
        status = scrubber.status()
        if status["state"] == state:
            return status
        threading.Event().wait(0.01)
    raise AssertionError(f"never {state}: {status}")


def test_the_thread_finishes_a_pass_and_rests(plane: DataPlane, tmp_path: Path) -> None:
    scrubber = Scrubber(plane, IoSection(scrub_mib_s=100_000), tmp_path)
    scrubber.start()
    status = wait_for(scrubber, "resting")
    assert (status["passes"], status["bad_pages"], status["fault"]) == (1, 0, "")
    assert sorted(scrubber.take()[1]) == [LARGE, SMALL]
    scrubber.stop()
    again = Scrubber(plane, IoSection(), tmp_path)
    again.start()
    assert wait_for(again, "resting")["passes"] == 1, "the interval has not passed"
    again.stop()
    again.stop()


def test_the_thread_stops_within_a_block_and_goes_on(plane: DataPlane, tmp_path: Path) -> None:
    scrubber = Scrubber(plane, IoSection(scrub_mib_s=1), tmp_path)
    scrubber.start()
    scrubber.stop()  # in the middle of the first block, which takes 4 s at this rate
    assert json.loads((tmp_path / "scrub.json").read_text())["next_page"] % BLOCK_PAGES == 0
    switched = Scrubber(plane, IoSection(scrub=False), tmp_path)
    switched.start()
    assert switched.status()["state"] == "off"
    switched.configure(IoSection(scrub_mib_s=100_000))
    wait_for(switched, "resting")
    switched.stop()


def test_reads_go_first(plane: DataPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While pumps answer requests a piece waits for its whole allowance, then it is read."""
    scrubber = Scrubber(plane, IoSection(scrub_mib_s=100_000), tmp_path)
    naps: list[float] = []
    monkeypatch.setattr(scrubber, "_sleep", naps.append)
    clock = [0.0]

    def monotonic() -> float:
        clock[0] += 0.01
        return clock[0]

    monkeypatch.setattr("tierd.daemon.scrub.time.monotonic", monotonic)
    scrubber._before_read(64)
    assert naps == []
    requests = iter(range(1, 1000))
    busy = lambda: [{"requests": next(requests), "in_flight": 0}]  # noqa: E731
    monkeypatch.setattr(plane, "stats", busy)
    scrubber._before_read(64)
    assert 5 < len(naps) < 30
    monkeypatch.setattr(plane, "stats", lambda: [{"requests": 7, "in_flight": 2}])
    naps.clear()
    scrubber._before_read(64)
    assert len(naps) > 5


def test_the_rate_is_kept(
    plane: DataPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrubber = Scrubber(plane, IoSection(scrub_mib_s=2), tmp_path)
    slept: list[float] = []
    clock = [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(scrubber, "_sleep", sleep)
    monkeypatch.setattr("tierd.daemon.scrub.time.monotonic", lambda: clock[0])
    for _ in range(41):
        scrubber._before_read(64)  # 256 KiB: an eighth of a second at this rate
    # A second's worth may be made up for at once, the rest keeps the rate.
    assert sum(slept) == pytest.approx((41 - 1) / 8 - 1, abs=0.2)


def test_a_pass_ends_when_what_was_left_of_it_is_deleted(disks: list[Path], tmp_path: Path) -> None:
    """Or the scrub would have nothing to do for ever."""
    scrub = Scrub(tmp_path)
    with opened(disks, write=False) as stores:
        images = sorted(stores.images, key=lambda image: image.info.pages)
        while not (step := scrub.step(images, 5.0)).image_done:  # type: ignore[union-attr]
            assert step is not None
        step = scrub.step(images[:1], 6.0)
        assert step is not None
        assert (step.image, step.pages, step.pass_done) == ("", 0, True)
        assert (scrub.passes, scrub.finished_at) == (1, 6.0)
        step = scrub.step(images[:1], 7.0)
        assert step is not None
        assert step.pages == images[0].info.pages

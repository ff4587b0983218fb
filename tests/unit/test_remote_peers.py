"""What a node makes of peers that answer wrongly, slowly or not at all, and of its own faults."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit import remote_rig as rig
from tierd.daemon import remotes
from tierd.errors import PeerSilentError, RdmaPeerError, RdmaPortError
from tierd.io import verbs

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from rig.staged_device(tmp_path_factory.mktemp("peers"))


@pytest.fixture
def there(staged: Path, tmp_path: Path) -> Path:
    return rig.copy_of(staged, tmp_path, "there.img")


@pytest.fixture
def here(staged: Path, tmp_path: Path) -> Path:
    return rig.copy_of(staged, tmp_path, "here.img")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "BACKOFF_S", (0.005, 0.02))
    monkeypatch.setattr(remotes, "RENEW_S", 0.05)
    monkeypatch.setattr(remotes, "LOOK_S", 0.01)


async def test_pages_come_from_the_peer(
    there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        reading = rig.Reading(monkeypatch, here, rig.address(rest))
        await rest.until(reading.linked)
        (image, *_) = reading.plane.images.values()
        engine = rig.Engine(reading.plane, image)
        assert engine.read([0, 1, 2]) == rig.OK
        assert reading.plane.stats()[0]["passed_over"] == 0
        engine.close()
        await asyncio.to_thread(reading.close)
        assert [what for what, *_ in reading.events] == ["peer_up", "peer_down"]


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b'{"session": "a", "revision": Infinity, "agent": "played", "images": []}',
        b"[" * 100_000,
        b"null",
        b'{"session": "a", "revision": 1, "agent": "played", "images": [{"image": null}]}',
    ],
    ids=["infinity", "nested", "null", "image"],
)
def test_answers_that_make_no_sense_end_no_thread(
    here: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """Not even if the good-bye is answered so."""
    with rig.played(rig.says(201, answer)) as peer:
        reading = rig.Reading(monkeypatch, here, peer.url)
        until(lambda: peer.asked.count("POST") >= 3)
        assert reading.peer._thread.is_alive()
        assert peer.url in reading.peer.reason
        reading.close()


def test_a_fault_while_connecting_is_told_and_tried_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's own exception, and one while letting go of what it left."""
    tries: list[int] = []

    class Broken(rig.Reader):
        def connect(self, answer: dict[str, Any]) -> None:
            tries.append(1)
            raise RuntimeError("the driver is odd")

        def close(self) -> None:
            raise RuntimeError("and stays so")

    answer = {"session": "a", "revision": 1, "images": []}
    monkeypatch.setattr(rig, "Reader", Broken)
    with rig.played(rig.says(201, json.dumps(answer).encode())) as peer:
        reading = rig.Reading(monkeypatch, here, peer.url)
        until(lambda: len(tries) >= 3)
        assert "the driver is odd" in reading.peer.reason
        reading.close()


def test_a_device_that_vanishes_is_an_error_of_its_port(tmp_path: Path) -> None:
    with pytest.raises(RdmaPortError, match="GIDs of mlx5_0 port 1 cannot be read"):
        verbs.read_gids("mlx5_0", 1, sys_=tmp_path)


async def test_an_export_that_fails_oddly_keeps_no_other_from_peers(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = rig.Exporter.register
    seen: list[Any] = []

    def odd(exporter: rig.Exporter, memory: Any) -> Any:
        seen.append(memory)
        if len(seen) == 1:
            raise MemoryError
        return register(exporter, memory)

    monkeypatch.setattr(rig.Exporter, "register", odd)
    monkeypatch.setattr(rig, "ready", lambda exported: len(seen) == 2 and settled(exported))
    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        listed = rest.daemon.exports.listing()
        assert sorted(one.state for one in listed) == ["failed", "ready"]
        assert {one.reason for one in listed} == {"", "MemoryError"}


async def test_a_look_that_fails_is_told_and_made_again(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.daemon.exports.LOOK_S", 0.01)
    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        exported = rest.daemon.exports

        def fails() -> Any:
            raise RuntimeError("odd")

        with monkeypatch.context() as patched:
            patched.setattr(exported, "chosen", fails)
            await rest.until(lambda: "odd" in exported.fault)
        await rest.until(lambda: not exported.fault)


def settled(exported: Any) -> bool:
    return all(one.state != "loading" for one in exported.listing())


# --- time -----------------------------------------------------------------------------------------


def drips(sock: socket.socket) -> None:
    """An answer that never ends, with never a pause that is too long."""
    never = threading.Event()
    while not never.wait(0.02):
        sock.sendall(b"H")


def test_a_peer_that_drips_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "TIMEOUT_S", 0.2)
    told: list[str] = []

    def ask() -> None:
        try:
            remotes.Caller(peer.url, rig.TOKEN, "").ask("GET", "/v1/exports")
        except PeerSilentError as error:
            told.append(str(error))

    with rig.played(drips) as peer:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(rig.PATIENCE_S)
        assert not asking.is_alive()
        assert "does not answer: " in told[0]


def test_stopping_waits_for_no_peer_for_long(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, answer = threading.Event(), threading.Event()

    def hangs(_: Any) -> Any:  # as a resolver may
        reached.set()
        answer.wait(rig.PATIENCE_S)
        raise OSError("at last")

    monkeypatch.setattr("tierd.daemon.remotes.http.client.HTTPConnection.connect", hangs)
    reading = rig.Reading(monkeypatch, here, "http://127.0.0.1:9")
    assert reached.wait(rig.PATIENCE_S)
    reading.peer.stop(0.01)
    assert reading.peer._thread.is_alive()
    answer.set()
    reading.close()
    assert not reading.peer._thread.is_alive()


def test_no_good_bye_is_said_to_a_peer_that_was_silent(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "SILENT_S", 0.1)
    session = json.dumps({"session": "a", "revision": 1, "agent": "played", "images": []})
    with rig.played(rig.says(201, session.encode()), lambda _: None) as peer:
        reading = rig.Reading(monkeypatch, here, peer.url)
        until(lambda: peer.asked.count("POST") >= 2)
        assert "DELETE" not in peer.asked
        assert "does not answer" in reading.peer.reason
        reading.close()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_peer_is_read_on(here: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    session = json.dumps({"session": "a", "revision": 1, "agent": "played", "images": []})
    busy = rig.says(status, b'{"detail": "later"}')
    renewed = rig.says(200, b'{"lease_s": 10.0, "revision": 1}')
    with rig.played(rig.says(201, session.encode()), busy, renewed) as peer:
        reading = rig.Reading(monkeypatch, here, peer.url)
        until(lambda: peer.asked.count("PUT") >= 3)
        assert peer.asked.count("POST") == 1
        reading.close()


def test_what_a_peer_says_is_kept_as_one_short_line() -> None:
    said = json.dumps({"detail": "no\nentry \x1b[31m" + "x" * 10_000}).encode()
    with (
        rig.played(rig.says(409, said)) as peer,
        pytest.raises(RdmaPeerError, match=r"refuses \(409\): no entry  \[31mx+$") as caught,
    ):
        remotes.Caller(peer.url, rig.TOKEN, "").ask("GET", "/v1/exports")
    assert len(str(caught.value)) < 500


# --- links ----------------------------------------------------------------------------------------


def test_a_link_that_fails_at_once_is_made_anew_ever_later(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting and probing may go well where reading does not."""
    pauses: list[float] = []
    answer = {"session": "a", "revision": 1, "agent": "played", "images": []}
    with rig.played(rig.says(201, json.dumps(answer).encode())) as peer:
        reading = rig.Reading(monkeypatch, here, peer.url)
        wait = reading.peer._stop.wait

        def waits(seconds: float) -> bool:
            if seconds == remotes.LOOK_S:  # it looks at its links
                reading.plane.pumps[0].drop_link(reading.readers[-1].links[0], "a flap")
            else:
                pauses.append(seconds)
            return wait(0)

        monkeypatch.setattr(reading.peer._stop, "wait", waits)
        until(lambda: len(pauses) >= 5)
        reading.close()
    assert pauses[-1] == remotes.BACKOFF_S[1]


async def test_every_way_to_a_peer_is_tried_before_it_is_used(
    there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: rig.Reader, page: tuple[int, int]) -> None:
        raise RdmaPeerError(f"no page {page[0]}")

    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        with monkeypatch.context() as patched:
            patched.setattr(rig.Reader, "try_ways", broken)
            reading = rig.Reading(monkeypatch, here, rig.address(rest))
            await rest.until(lambda: reading.peer.reason == "no page 0")
            assert not reading.linked()
        await rest.until(reading.linked)
        await asyncio.to_thread(reading.close)


def test_memory_that_a_link_may_not_read_into_is_told_and_the_rest_read_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"session": "a", "revision": 1, "agent": "played", "images": []}
    with rig.played(rig.says(201, json.dumps(answer).encode())) as peer:
        reading = rig.Reading(monkeypatch, here, peer.url)
        until(lambda: reading.peer.up)
        (reader,) = reading.readers
        real = reader.links
        reader.links = [SimpleNamespace(up=True, failure="", trouble="RLIMIT_MEMLOCK is 64 KiB")]
        until(lambda: reading.peer.reason == "RLIMIT_MEMLOCK is 64 KiB")
        assert reading.peer.up
        reader.links = real
        reading.close()


def until(condition: Any) -> None:
    """Wait for what another thread does."""
    never = threading.Event()
    for _ in range(int(rig.PATIENCE_S / 0.01)):
        if condition():
            return
        never.wait(0.01)
    raise AssertionError("not in time")

"""What a node exports while its images, its device and its memory come and go."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import mmap
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit import remote_rig as rig
from tierd.api.access import Access
from tierd.config import load
from tierd.daemon import exports as exporting_side
from tierd.daemon.by_verbs import VerbsExporter
from tierd.daemon.tokens import read_token
from tierd.errors import ConfigError, RdmaMemoryError, RdmaMissingError, RdmaPeerError
from tierd.io import _core, linux, verbs
from tierd.io import exports as memories
from tierd.io.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST = "v41/layers.1.engram"
ASKED = {"version": 1, "transport": "nixl", "port": None, "links": [], "agent": ""}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from rig.staged_device(tmp_path_factory.mktemp("exports"))


@pytest.fixture
def there(staged: Path, tmp_path: Path) -> Path:
    return rig.copy_of(staged, tmp_path, "there.img")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting_side, "LOOK_S", 0.01)


async def test_nobody_waits_for_memory_or_queue_pairs_that_are_given_up(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REST takes the lock in its loop, and giving up 100 GiB takes seconds."""
    free: list[str] = []

    class Responder:
        def close(self) -> None:
            note("responder")

    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        exported = rest.daemon.exports

        def note(what: str) -> None:
            if exported._lock.acquire(blocking=False):
                exported._lock.release()
                free.append(what)

        accept = rig.Exporter.accept

        def accepts(exporter: rig.Exporter, asked: dict[str, Any]) -> Any:
            note("accept")
            return [Responder()], accept(exporter, asked)[1]

        monkeypatch.setattr(rig.Exporter, "accept", accepts)
        monkeypatch.setattr(rig.Region, "close", lambda _: note("region"))
        one, other, last = (exported.open_session(ASKED, "peer")["session"] for _ in range(3))
        assert free == ["accept"] * 3
        assert exported.close_session(one)
        exported._sessions[other].until = 0.0
        await rest.until(lambda: free.count("responder") == 2)
        await asyncio.to_thread(rest.daemon.plane.delete, FIRST)
        await rest.until(lambda: "region" in free)
        assert exported.renew(last) is not None
        exported.stop()
    assert free[3:] == ["responder", "responder", "region", "responder", "region"]


async def test_an_image_that_is_deleted_while_it_loads_is_no_fault(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud: list[str] = []
    asked, answer = threading.Event(), threading.Event()
    read_into = Device.read_into

    def read(device: Device, *args: Any) -> Any:
        if threading.current_thread().name == "tierd-exports":
            asked.set()
            assert answer.wait(rig.PATIENCE_S)
        return read_into(device, *args)

    monkeypatch.setattr(exporting_side.log, "error", lambda event, **_: loud.append(event))
    monkeypatch.setattr(rig, "ready", lambda _: True)
    async with rig.exporting_node(
        monkeypatch, there, tmp_path, **{"exports.images": [FIRST]}
    ) as rest:
        exported = rest.daemon.exports
        with monkeypatch.context() as patched:
            patched.setattr(Device, "read_into", read)
            exported.stop()  # and once more, with a device that hangs
            exported._stop.clear()
            exported.start()
            await rest.until(asked.is_set)
            with monkeypatch.context() as more:  # the delete reads roots, which do not hang here
                more.setattr(rest.daemon.plane.store_set, "delete", lambda *_, **__: None)
                more.setattr(rest.daemon.plane, "refresh", lambda: None)
                rest.daemon.plane.delete(FIRST)
            answer.set()
            await rest.until(lambda: exported.listing() == [])
    assert loud == []


async def test_what_failed_is_loaded_again_later(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = rig.Exporter.register
    tries: list[Any] = []

    def full(exporter: rig.Exporter, memory: Any) -> Any:
        tries.append(memory)
        if len(tries) == 1:
            raise RdmaMemoryError("not now")
        return register(exporter, memory)

    monkeypatch.setattr(rig.Exporter, "register", full)
    monkeypatch.setattr(exporting_side, "RETRY_S", 0.05)
    async with rig.exporting_node(monkeypatch, there, tmp_path):
        assert len(tries) == 3


async def test_a_device_that_was_reset_is_opened_anew(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(exporter: rig.Exporter, _: Any) -> Any:
        raise RdmaMemoryError(f"no queue pairs for the peer: {exporter.kind}")

    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        exported = rest.daemon.exports
        exporter = exported._exporter
        before = exported.open_session(ASKED, "peer")
        with monkeypatch.context() as patched:
            patched.setattr(rig.Exporter, "accept", dead)
            with pytest.raises(RdmaMemoryError):  # the card is merely full
                exported.open_session(ASKED, "peer")
            assert exported._exporter is exporter
            patched.setattr(rig.Exporter, "gone", True)
            with pytest.raises(RdmaMemoryError):
                exported.open_session(ASKED, "peer")
        assert exported.renew(before["session"]) is None
        monkeypatch.setattr(rig.Exporter, "gone", False)
        await rest.until(lambda: rig.ready(exported) and exported._exporter is not exporter)
        assert exporter.closed
        assert all(region.closed for region in exporter.regions)
        after = exported.open_session(ASKED, "peer")
        assert after["revision"] > before["revision"]
        assert len(after["images"]) == 2


async def test_memory_that_peers_may_still_read_is_freed_later(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL's engine reads what a peer names; when the daemon stops, the engine ends first."""
    freed: list[str] = []
    close = memories.ImageMemory.close

    def closes(memory: memories.ImageMemory) -> None:
        freed.append("memory")
        close(memory)

    monkeypatch.setattr(memories.ImageMemory, "close", closes)
    monkeypatch.setattr(rig.Exporter, "close", lambda _: freed.append("engine"))
    monkeypatch.setattr(rig.Exporter, "linger_s", 3600.0)
    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        exported = rest.daemon.exports
        revision = exported.revision
        await asyncio.to_thread(rest.daemon.plane.delete, FIRST)
        await rest.until(lambda: len(exported.listing()) == 1)
        assert exported.revision == revision + 1
        ((until, leaving),) = exported._leaving
        assert leaving.region is None
        assert leaving.memory is not None
        assert freed == []
        exported._leaving = [(until - 3600, leaving)]
        await rest.until(lambda: freed == ["memory"])
    assert freed == ["memory", "engine", "memory"]


@pytest.mark.parametrize("answer", [0, errno.ENOMEM, errno.EINVAL])
def test_huge_pages_are_there_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """And where the kernel cannot say so, it has at least reserved them."""
    seen: list[int] = []

    def populate(memory: Any) -> int:
        seen.append(memory.nbytes)
        return answer

    monkeypatch.setattr(memories, "_MAP_HUGETLB", 0)  # this machine may have none
    monkeypatch.setattr(memories, "populate", populate)
    memory = memories.ImageMemory(3)
    assert seen == [memories.HUGE_BYTES]
    assert (memory.page_kind == "huge pages") == (answer != errno.ENOMEM)
    memory.close()
    memory.close()
    assert memory.pages.size == 0


def test_the_kernel_backs_memory_when_it_is_told_to() -> None:
    size = 8 << 20
    memory = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:4096] = 7
    done = linux.populate(memory, piece_bytes=1 << 20)
    if done == errno.EINVAL:
        pytest.skip("a kernel before 5.14")
    assert done == 0
    assert memory[:4096].all()
    assert linux.populate(memory[: size // 2 + 1].view()[1:]) == errno.EINVAL  # not a page's start


def test_free_huge_pages_are_not_taken_for_normal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the image would overcommit, and the kernel would end somebody."""
    size = 1 << 20
    monkeypatch.setattr(memories, "_huge", no_huge_pages)
    monkeypatch.setattr(
        memories, "memory_available", lambda: memories.HUGE_BYTES + memories.memory_spare() - 1
    )
    with pytest.raises(RdmaMemoryError, match="does not fit the 1025 MiB of memory"):
        memories.ImageMemory(size // 4096)


def no_huge_pages(_: int) -> Any:
    raise OSError(12, "Cannot allocate memory")


# --- the device -----------------------------------------------------------------------------------


class Card:
    """What the core says of a card: which contexts still work, and what it refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = self.unreachable = False
        self.context: object | None = object()
        self.made: list[Any] = []
        monkeypatch.setattr(_core, "VerbsResponder", self._make)
        monkeypatch.setattr(verbs, "open_context", lambda _: self.context)
        monkeypatch.setattr(verbs, "find_port", self._find)
        self.port = verbs.Port("mlx5_0", 1, "InfiniBand", 4096, 3, 16, ())

    def _find(self, *_: Any) -> verbs.Port:
        if self.context is None:
            raise RdmaMissingError("there is no RDMA device mlx5_0")
        return self.port

    def _make(self, context: object, _: int) -> Any:
        if self.full or context is not self.context:
            raise _core.VerbsError("making a queue pair refused (EIO)")
        self.made.append(SimpleNamespace(names=[(9, 9)], connect=self._connect, open=True))
        self.made[-1].close = lambda one=self.made[-1]: setattr(one, "open", False)
        return self.made[-1]

    def _connect(self, **_: Any) -> None:
        if self.unreachable:
            raise _core.VerbsError("finding the way to the peer (RTR) refused (ETIMEDOUT)")


@pytest.mark.skipif(not _core.VERBS, reason="built without RDMA")
def test_a_card_that_is_gone_is_told_from_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    exporter = VerbsExporter.open(load(environ={}).settings.exports)
    theirs = dataclasses.replace(card.port, lid=77, device="mlx5_7")
    asked = {**ASKED, "port": theirs.to_json(), "links": [[[1, 1]], [[2, 2]]]}

    def refused(kind: type[Exception], text: str) -> None:
        with pytest.raises(kind, match=text):
            exporter.accept(asked)
        assert not any(one.open for one in card.made)

    card.port = dataclasses.replace(card.port, lid=5)  # it got another address
    assert exporter.accept(asked)[1]["port"]["lid"] == 5
    for one in card.made:
        one.close()
    card.unreachable = True
    refused(RdmaPeerError, r"\(RTR\).*here mlx5_0 port 1.*there mlx5_7 port 1")
    assert not exporter.is_gone()
    card.unreachable, card.full = False, True
    refused(RdmaMemoryError, "no queue pairs for the peer")
    assert not exporter.is_gone()
    card.full, card.context = False, None  # taken away
    refused(RdmaMissingError, "there is no RDMA device")
    assert exporter.is_gone()
    card.context = object()  # and back, as another one
    refused(RdmaMemoryError, "no queue pairs for the peer")
    assert exporter.is_gone()


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("s" * 32 + "\n" + "t" * 32, 0o600, "holds something else than one token"),
        ("s" * 32 + " " + "t" * 32, 0o600, "holds something else than one token"),
        ("s" * 32 + "\u00e4", 0o600, "holds something else than one token"),
        ("short", 0o600, "holds 5 characters"),
        ("", 0o600, "holds 0 characters"),
        ("s" * 32, 0o644, "has mode 0644"),
    ],
)
def test_a_token_is_one_word_that_its_owner_alone_reads(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    """A header with a line end would be refused with the token in the message."""
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        read_token("remote.token_file", str(path))
    assert "ssss" not in str(caught.value)


def test_a_token_may_end_with_a_line(tmp_path: Path) -> None:
    assert read_token("remote.token_file", rig.secret(tmp_path / "t", "s" * 32 + "\n")) == b"s" * 32


def test_peers_and_the_operator_have_tokens_of_their_own(tmp_path: Path) -> None:
    given = rig.exporting(tmp_path)
    given["exports.token_file"] = given["api.token_file"]
    settings = load(environ={}, overrides=given).settings
    with pytest.raises(ConfigError, match=r"holds the token of api\.token_file"):
        Access(settings.api, settings.exports)


async def test_a_newer_peer_hears_of_versions_whatever_else_it_says(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.exporting_node(monkeypatch, there, tmp_path) as rest:
        newer = {"version": 2, "more": [1, 2], "links": "none"}
        body = await rest.problem("POST", "/v1/exports/sessions", 409, json=newer)
        assert "speaks version 2 of the export protocol" in body["detail"]
        await rest.problem("POST", "/v1/exports/sessions", 422, json={**ASKED, "more": 1})
        await rest.problem("POST", "/v1/exports/sessions", 422, json={**ASKED, "version": "1"})
        await rest.problem("POST", "/v1/exports/sessions", 422, json=[1])

"""One owner each: locks and sockets, whoever was there before and however it died."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from tierd.daemon import claims, systemd
from tierd.errors import ConfigError, DaemonError, SocketBusyError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

spawn = multiprocessing.get_context("spawn")


def hold_lock(path: Path, ready: Connection) -> None:
    claim = claims.Claim.take(path, "x")
    ready.send(os.getpid())
    signal.pause()
    del claim


def hold_socket(path: Path, ready: Connection) -> None:
    listener = claims.Listener.open(path, socket.SOCK_SEQPACKET, mode=0o600)
    ready.send(os.getpid())
    signal.pause()
    listener.close()


def hold_bare_socket(path: Path, ready: Connection) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
        sock.listen()
        ready.send(os.getpid())
        signal.pause()


class Holder:
    """Another process that holds something until it is killed."""

    def __init__(self, target: Callable[[Path, Connection], None], path: Path) -> None:
        here, there = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(path, there), daemon=True)
        self.process.start()
        self.pid = here.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def test_a_lock_has_one_holder_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "daemon.lock"
    holder = Holder(hold_lock, path)
    with pytest.raises(SocketBusyError) as caught:
        claims.Claim.take(path, "a daemon named x runs already")
    text = str(caught.value)
    assert text.startswith("a daemon named x runs already")
    assert f"{path} is held by pid {holder.pid}; run: kill {holder.pid}" in text
    holder.kill()
    claim = claims.Claim.take(path, "x")
    assert path.read_text().split()[0] == str(os.getpid())
    claim.release()
    claim.release()
    assert not path.exists()


def test_a_lock_never_names_a_process_that_came_later(tmp_path: Path) -> None:
    path = tmp_path / "daemon.lock"
    holder = Holder(hold_lock, path)
    path.write_text(f"{os.getpid()} 1\n")  # the number is in use again, by us
    with pytest.raises(SocketBusyError) as caught:
        claims.Claim.take(path, "x")
    assert "by pid" not in str(caught.value)
    holder.kill()


def test_a_lock_removed_between_open_and_lock_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "daemon.lock"
    first = claims.Claim.take(path, "x")
    real_open = os.open
    opened = []

    def open_then_lose(*args: object, **kwargs: object) -> int:
        fd = real_open(*args, **kwargs)
        if not opened:  # the holder before us goes right here
            first.release()
        opened.append(fd)
        return fd

    monkeypatch.setattr(os, "open", open_then_lose)
    second = claims.Claim.take(path, "x")
    assert len(opened) == 2
    monkeypatch.undo()
    with pytest.raises(SocketBusyError):
        claims.Claim.take(path, "x")
    second.release()


def test_a_socket_has_one_owner_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    holder = Holder(hold_socket, path)
    with pytest.raises(SocketBusyError, match=f"{path}: in use by a daemon.*pid {holder.pid}"):
        claims.Listener.open(path, socket.SOCK_SEQPACKET, mode=0o600)
    holder.kill()
    assert path.exists(), "a killed owner leaves its socket behind"
    listener = claims.Listener.open(path, socket.SOCK_SEQPACKET, mode=0o640)
    assert path.stat().st_mode & 0o777 == 0o640
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
        assert claims.peer_pid(client) == os.getpid()
    listener.close()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_stranger_on_the_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    holder = Holder(hold_bare_socket, path)
    with pytest.raises(SocketBusyError, match=f"in use by pid {holder.pid}"):
        claims.Listener.open(path, socket.SOCK_SEQPACKET, mode=0o600)
    assert path.exists()
    holder.kill()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    path.write_text("precious")
    with pytest.raises(DaemonError, match="is not a socket"):
        claims.Listener.open(path, socket.SOCK_STREAM, mode=0o600)
    assert path.read_text() == "precious"


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with pytest.raises(ConfigError, match=r"engine\.socket_group: there is no group nosuchgroup"):
        claims.Listener.open(path, socket.SOCK_STREAM, mode=0o600, group="nosuchgroup")
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_was_replaced_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    listener = claims.Listener.open(path, socket.SOCK_STREAM, mode=0o600)
    path.unlink()
    path.write_text("somebody else's")
    listener.close()
    assert path.read_text() == "somebody else's"


def test_a_directory_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaemonError, match=r"set daemon\.runtime_dir"):
        claims.make_directory(tmp_path / "file" / "run", "daemon.runtime_dir")


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@tierd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        systemd.notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    systemd.notify("STOPPING=1")  # nobody listens any more: no matter

"""Messages over SOCK_SEQPACKET: whole or refused, and no descriptor is ever left behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import AttachError
from tierd.io import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_arrives_whole_with_its_descriptors(pair: Pair) -> None:
    left, right = pair
    reader, writer = os.pipe()
    wire.send(left, {"op": "attach", "n": [1, 2]}, [reader, writer])
    message, fds = wire.receive(right)
    assert message == {"op": "attach", "n": [1, 2]}
    assert len(fds) == 2
    os.write(fds[1], b"x")
    assert os.read(reader, 1) == b"x"
    assert not any(os.get_inheritable(fd) for fd in fds)
    wire.close_all([reader, writer, *fds])


def test_messages_keep_their_bounds(pair: Pair) -> None:
    left, right = pair
    for number in range(3):
        wire.send(left, {"n": number})
    assert [wire.receive(right)[0]["n"] for _ in range(3)] == [0, 1, 2]


def test_the_largest_message_passes_and_one_more_byte_does_not(pair: Pair) -> None:
    left, right = pair
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    room = wire.MESSAGE_BYTES_MAX - len(json.dumps({"x": ""}, separators=(",", ":")))
    wire.send(left, {"x": "a" * room})
    assert len(wire.receive(right)[0]["x"]) == room
    with pytest.raises(AttachError, match="at most 65536"):
        wire.send(left, {"x": "a" * (room + 1)})
    left.send(b" " * (wire.MESSAGE_BYTES_MAX + 1))
    with pytest.raises(AttachError, match="larger than 65536"):
        wire.receive(right)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 60_000, b'{"a":1}x']
)
def test_malformed_messages_are_refused_and_their_descriptors_closed(
    pair: Pair, data: bytes
) -> None:
    left, right = pair
    before = open_descriptors()
    socket.send_fds(left, [data], [left.fileno()] * 3)
    with pytest.raises(AttachError, match="malformed"):
        wire.receive(right)
    assert open_descriptors() == before


@pytest.mark.parametrize("count", [2, 3, 100, 253])
def test_surplus_descriptors_are_closed(pair: Pair, count: int) -> None:
    left, right = pair
    before = open_descriptors()
    socket.send_fds(left, [b"{}"], [left.fileno()] * count)
    with pytest.raises(AttachError, match="more than 1 file descriptors"):
        wire.receive(right, fds_max=1)
    assert open_descriptors() == before


def test_a_closed_peer_is_told_apart(pair: Pair) -> None:
    left, right = pair
    left.close()
    with pytest.raises(ConnectionError):
        wire.receive(right)
    with pytest.raises(ConnectionError):
        wire.send(right, {})


def test_nothing_blocks_on_a_non_blocking_socket(pair: Pair) -> None:
    left, right = pair
    left.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.receive(left)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 100_000:
            wire.send(left, {"x": "a" * 1000})
            sent += 1
    assert 0 < sent < 100_000
    assert wire.receive(right)[0]["x"] == "a" * 1000


@given(data=st.binary(max_size=200), fds=st.integers(0, 3))
def test_any_bytes_are_a_message_or_refused(data: bytes, fds: int) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        before = open_descriptors()
        socket.send_fds(left, [data], [left.fileno()] * fds)
        try:
            message, received = wire.receive(right, fds_max=2)
        except (AttachError, ConnectionError):
            pass
        else:
            assert json.loads(data) == message
            assert len(received) == fds <= 2
            wire.close_all(received)
        assert open_descriptors() == before

"""Messages of the attach protocol: one JSON object a packet, file descriptors beside it.

The sockets are ``SOCK_SEQPACKET``, so a message arrives whole or not at all. Fault model: the
peer may send anything. Whatever descriptors arrive with a message that is refused are closed
here, since nobody else will ever know their numbers. Nothing of ``send`` or ``receive`` blocks
on a non-blocking socket: ``BlockingIOError`` passes through to whoever polls.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import TYPE_CHECKING, Any

from tierd.errors import AttachError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ABI = 2
# A daemon serves engines of this version and of the one before.
ABI_OLDEST = 1
MESSAGE_BYTES_MAX = 64 * 1024
# The kernel passes at most 253 descriptors with one message (SCM_MAX_FD).
FDS_MAX = 253
_FD_BYTES = array.array("i").itemsize


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the descriptors stay open here.

    Raises:
        AttachError: the message is larger than 64 KiB, or has too many descriptors.
        BlockingIOError: the socket is non-blocking and the peer does not read.
        ConnectionError: the peer is gone.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise AttachError(f"message of {len(data)} bytes; at most {MESSAGE_BYTES_MAX} are sent")
    if len(fds) > FDS_MAX:
        raise AttachError(f"message with {len(fds)} descriptors; at most {FDS_MAX} are sent")
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], extra, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, *, fds_max: int = FDS_MAX) -> tuple[dict[str, Any], list[int]]:
    """Receive one message; the descriptors (close-on-exec) belong to the caller.

    Raises:
        AttachError: not one JSON object of at most 64 KiB with at most ``fds_max`` descriptors.
        BlockingIOError: the socket is non-blocking and nothing has arrived.
        ConnectionError: the peer has closed the connection.
    """
    # Room for one byte and one descriptor more than allowed shows which limit was broken.
    room = socket.CMSG_SPACE(min(fds_max + 1, FDS_MAX) * _FD_BYTES)
    data, extra, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = _descriptors(extra)
    try:
        return _parse(data, flags, fds, fds_max), fds
    except BaseException:
        close_all(fds)
        raise


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def _descriptors(extra: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            # A truncated message may end in the middle of a number, which is then none.
            fds.frombytes(data[: len(data) // _FD_BYTES * _FD_BYTES])
    return fds.tolist()


def _parse(data: bytes, flags: int, fds: list[int], fds_max: int) -> dict[str, Any]:
    if not data and not fds:
        raise ConnectionResetError("the peer has closed the connection")
    if flags & socket.MSG_TRUNC or len(data) > MESSAGE_BYTES_MAX:
        raise AttachError(f"malformed message: larger than {MESSAGE_BYTES_MAX} bytes")
    if flags & socket.MSG_CTRUNC or len(fds) > fds_max:
        raise AttachError(f"malformed message: more than {fds_max} file descriptors")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AttachError(f"malformed message: not JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise AttachError(f"malformed message: a JSON {type(message).__name__}, not an object")
    return message

"""The engine's connection to a daemon, and what the daemon sent over it.

A link lives as long as its daemon; the keeper makes another one when that is over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Self

from tierd.errors import AttachError, DaemonGoneError
from tierd.io import wire
from tierd.types import ImageInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_TIMEOUT_S = 60.0  # registering large arenas takes the daemon a while
DETACH_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_NOTICE_AFTER_S = 1.0
_START = "; run: systemctl start tierd"

log = logging.getLogger("tierd")


class Link:
    """The socket to the daemon, and what the daemon sent over it.

    Attributes:
        boot_id: identity of the daemon's run.
        daemon_pid: the daemon's process.
        client_id: the daemon's name for this client; empty before attach.
        wake_fd: the pump's eventfd; -1 before attach.
        device_fds: read-only descriptors that hold leases, in the order of ``devices``.
        devices: path by UUID.
        map: the image map of protocol.md.
        dram: index of an image in memory -> (descriptor, bytes).
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock: socket.socket | None = sock
        self._path = path
        self.boot_id = ""
        self.daemon_pid = 0
        self.client_id = ""
        self.wake_fd = -1
        self.device_fds: list[int] = []
        self.devices: dict[str, str] = {}  # uuid -> path
        self.map: dict[str, Any] = {}
        self.lossy: dict[str, str] = {}  # image id in hex -> path of its seen-set
        self.dram: dict[int, tuple[int, int]] = {}

    @classmethod
    def connect(cls, path: str, wait_s: float) -> Self:
        """Connect and greet, waiting for a daemon that is not there yet.

        Raises:
            AttachError: no daemon within ``wait_s`` seconds, or one of another ABI.
        """
        link = cls.open(path, wait_s)
        try:
            link.greet()
        except BaseException:
            link.close()
            raise
        return link

    @classmethod
    def open(cls, path: str, wait_s: float) -> Self:
        """Connect without a word, so that :meth:`interrupt` can end the greeting, too.

        Raises:
            AttachError: no daemon within ``wait_s`` seconds.
        """
        sock = _connect(path, wait_s)
        sock.settimeout(ANSWER_TIMEOUT_S)
        return cls(sock, path)

    def greet(self) -> None:
        """Learn who the daemon is.

        Raises:
            AttachError: no answer, or a daemon of another ABI.
        """
        answer, fds = self.ask({"op": "hello", "abi": wire.ABI})
        wire.close_all(fds)
        if answer.get("abi") != wire.ABI:
            raise AttachError(
                f"{self._path}: the daemon speaks attach ABI {answer.get('abi')}, this engine's "
                f"tierd {wire.ABI}; install the same tierd on both sides"
            )
        self.boot_id = str(answer.get("boot_id", ""))
        self.daemon_pid = int(answer.get("pid", 0))

    def ask(
        self, message: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a message and return its answer, with descriptors that the caller closes."""
        if self._sock is None:
            raise AttachError("the client has been closed")
        return _exchange(self._sock, self._path, message, fds)

    def images(self, model: str | None) -> list[ImageInfo]:
        """Return the images that the daemon serves, of one model or of all."""
        answer, fds = self.ask({"op": "images", "model": model})
        try:
            listed = answer.get("images")
            if listed is None:
                listed = json.loads(_read_fd(fds[0], int(answer["images_bytes"])))
            return [ImageInfo.from_json(image) for image in listed]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise AttachError(f"{self._path}: unusable image list: {error!r}") from None
        finally:
            wire.close_all(fds)

    def attach(self, request: dict[str, Any], channel_fd: int) -> None:
        """Hand over the channel and take what the daemon sends for it."""
        answer, fds = self.ask(request, [channel_fd])
        devices, dram = answer.get("devices"), answer.get("dram", [])
        if not isinstance(devices, list) or len(fds) != 2 + len(devices) + len(dram):
            wire.close_all(fds)
            raise AttachError(f"{self._path}: the daemon's answer lacks descriptors")
        self.wake_fd, map_fd, *rest = fds
        self.device_fds, dram_fds = rest[: len(devices)], rest[len(devices) :]
        self.dram = {
            int(one["image"]): (fd, int(one["bytes"]))
            for one, fd in zip(dram, dram_fds, strict=True)
        }
        self.devices = {device["uuid"]: device["path"] for device in devices}
        try:
            self.map = json.loads(_read_fd(map_fd, int(answer["map_bytes"])))
        finally:
            os.close(map_fd)
        self.client_id = str(answer.get("client", ""))
        self.lossy = {str(image): str(path) for image, path in answer.get("lossy", {}).items()}

    def detach(self) -> None:
        """Detach if the daemon still lives; it drops a closed socket's client anyway."""
        if self._sock is None:
            return
        self._sock.settimeout(DETACH_TIMEOUT_S)
        with contextlib.suppress(AttachError):
            _, fds = self.ask({"op": "detach"})
            wire.close_all(fds)
        self.close()

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return -1 if self._sock is None else self._sock.fileno()

    def interrupt(self) -> None:
        """Let whoever waits for an answer go on, from any thread."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close everything; the daemon then drops the client. Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self.wake_fd >= 0:
            os.close(self.wake_fd)
            self.wake_fd = -1
        wire.close_all([*self.device_fds, *(fd for fd, _ in self.dram.values())])
        self.device_fds = []
        self.dram = {}

    def device_of(self, image: ImageInfo) -> str:
        """Return the path of the device that holds most of an image, for error texts."""
        for entry in self.map.get("images", []):
            if int(entry["image_id"], 16) == image.image_id and entry["devices"]:
                return self.devices.get(entry["devices"][0]["uuid"], "DEVICE")
        return "DEVICE"


def _connect(path: str, wait_s: float) -> socket.socket:
    deadline = time.monotonic() + wait_s
    noticed = False
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            reason = _connect_error(path, error)
            if error.errno not in {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}:
                raise AttachError(reason) from None
            left = deadline - time.monotonic()
            if left <= 0:
                waited = f" (waited {wait_s:.3g} s)" if wait_s > 0 else ""
                raise AttachError(reason.replace(_START, waited + _START)) from None
            if not noticed and wait_s - left > _NOTICE_AFTER_S:
                log.warning("waiting up to %g s for a daemon at %s", wait_s, path)
                noticed = True
            time.sleep(min(_RETRY_S, left))
        else:
            return sock


def _connect_error(path: str, error: OSError) -> str:
    match error.errno:
        case errno.ENOENT:
            return f"{path}: no such socket: tierd does not run here, or listens elsewhere{_START}"
        case errno.ECONNREFUSED:
            return f"{path}: nobody listens: tierd has stopped without removing its socket{_START}"
        case errno.EAGAIN:
            return f"{path}: too many engines are connecting at once{_START}"
        case errno.EACCES:
            return (
                f"{path}: permission denied: join the group of engine.socket_group, or run as root"
            )
        case errno.EPROTOTYPE:
            return (
                f"{path}: not an engine socket (is it the REST socket?); use engine.socket's path"
            )
        case _:
            return f"{path}: cannot connect: {error.strerror or error}"


def _exchange(
    sock: socket.socket, path: str, message: dict[str, Any], fds: Sequence[int] = ()
) -> tuple[dict[str, Any], list[int]]:
    try:
        wire.send(sock, message, fds)
        answer, received = wire.receive(sock)
    except TimeoutError:
        text = f"{path}: the daemon did not answer {message['op']} in {ANSWER_TIMEOUT_S:g} s"
        raise AttachError(text + "; run: tierd status") from None
    except OSError as error:
        text = f"{path}: the daemon went away during {message['op']}: {error}"
        raise DaemonGoneError(text + "; run: journalctl -u tierd -n 20") from None
    if answer.get("ok") is not True:
        wire.close_all(received)
        reason = answer.get("message") or answer.get("error") or "no reason given"
        raise AttachError(f"{path}: the daemon refused {message['op']}: {reason}")
    return answer, received


def _read_fd(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.pread(fd, size - len(data), len(data))
        if not part:
            raise AttachError(f"the daemon's memory file has {len(data)} of {size} bytes")
        data += part
    return data

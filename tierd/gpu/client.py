"""The engine's side of attach: find the daemon, agree on images, hand over the channel.

    client = Client.attach(path, images, engine="transformers", cache_rows=65536, rows_max=4096)
    table = client.table("layers.1.engram")
    table.kick(ids)            # when the token ids are known
    table.gather(ids, out)     # where the layer needs the rows

The daemon may start later than the engine: attach waits for it, at most ``wait_s``. With
``TableOptions(device="cuda:0")`` the tables take and give tensors of that GPU, and may be captured
in its graphs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from tierd.errors import AttachError
from tierd.gpu import caches, tracing
from tierd.gpu.tables import TableOptions, by_names, move_quotas
from tierd.gpu.twin_tables import TableClient, make_twins
from tierd.io import _core, samples, wire
from tierd.types import ImageInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierd.gpu.audit import Audit, ImageRows, RowJudge
    from tierd.gpu.tables import Table

DEFAULT_SOCKET = "/run/tierd/engine.sock"
IMAGES_MAX = 64  # one ring each; a table number has 6 bits
ANSWER_TIMEOUT_S = 60.0  # registering large arenas takes the daemon a while
_RETRY_S = 0.05
_NOTICE_AFTER_S = 1.0
_START = "; run: systemctl start tierd"

log = logging.getLogger("tierd")


class Client:
    """One engine rank, attached. Made by :meth:`attach`; also a context manager.

    Attributes:
        client_id: the daemon's name for this client.
        boot_id: identity of the daemon's run; another one after it was restarted.
        daemon_pid: the daemon's process.
    """

    def __init__(
        self, link: _Link, channel: Any, images: Sequence[ImageInfo], tables: dict[str, Table]
    ) -> None:
        self._link = link
        self._channel = channel
        self._images = tuple(images)
        self._tables = tables
        self._pid = os.getpid()
        self._recorder: tracing.Recorder | None = None
        self.client_id: str = ""
        self.boot_id = link.boot_id
        self.daemon_pid = link.daemon_pid

    @classmethod
    def attach(
        cls,
        socket_path: str | os.PathLike[str],
        images: Sequence[ImageInfo],
        *,
        engine: str,
        cache_rows: int,
        rows_max: int,
        rank: int = 0,
        world: int = 1,
        wait_s: float = 30.0,
        arena_pages: int | None = None,
        options: TableOptions | None = None,
    ) -> Self:
        """Attach to a daemon and make a table of each image.

        Args:
            socket_path: the daemon's engine socket.
            images: at most 64, as :func:`list_images` returned them; one ring each.
            engine: name of the engine, for people.
            cache_rows: slots for the tables of each row size together (see gpu/caches.py).
            rows_max: missing rows that one request may list; larger ids go in sub-batches.
            rank: this rank's number.
            world: ranks of the engine.
            wait_s: how long to wait for a daemon that is not there yet, seconds.
            arena_pages: pages of each arena; None makes room for two full requests.
            options: how the tables are wanted: on which device, which rows, audited or not.

        Raises:
            AttachError: no daemon, or it refused; the text says which and what to do.
            HookError: no such GPU, not enough memory on it, or a graph is being captured.
        """
        images = tuple(images)
        _check_images(images)
        options = options or TableOptions()
        options.check(images)
        device = _check_device(options)
        link = _Link.connect(os.fspath(socket_path), wait_s)
        try:
            return cls._attach_over(
                link,
                images,
                engine=engine,
                cache_rows=cache_rows,
                rows_max=rows_max,
                rank=rank,
                world=world,
                arena_pages=2 * rows_max if arena_pages is None else arena_pages,
                options=options,
                device=device,
            )
        except BaseException:
            link.close()
            raise

    @classmethod
    def _attach_over(
        cls,
        link: _Link,
        images: tuple[ImageInfo, ...],
        *,
        engine: str,
        cache_rows: int,
        rows_max: int,
        rank: int,
        world: int,
        arena_pages: int,
        options: TableOptions,
        device: torch.device | None,
    ) -> Self:
        flags = 0 if device is None else int(_core.protocol.RING_FLAG_GPU)
        rings = [(rows_max, arena_pages, number, flags) for number in range(len(images))]
        try:
            channel = _core.Channel(
                rank=rank, world=world, client_id=uuid.uuid4().bytes, rings=rings
            )
        except (ValueError, OSError) as error:
            raise AttachError(f"no channel of {len(rings)} rings can be made: {error}") from None
        if options.sample_rate is not None:
            _set_sample_rate(channel, options.sample_rate)
        request = {
            "op": "attach",
            "abi": wire.ABI,
            "engine": engine,
            "rank": rank,
            "world": world,
            "expected_ranks": world,
            "caches": [
                {"sets": part.sets, "row_bytes": part.row_bytes, "ways": part.quotas}
                for part in caches.plan([image.table for image in images], cache_rows)
            ],
            "images": [
                {"image_id": f"{image.image_id:016x}", "generation": image.generation}
                for image in images
            ],
        }
        answer = link.attach(request, channel.fd)
        tables = _make_tables(
            images, channel, link, cache_rows=cache_rows, options=options, device=device
        )
        client = cls(link, channel, images, tables)
        client.client_id = answer["client"]
        client.record(tracing.recorder(images, engine))
        return client

    def record(self, recorder: tracing.Recorder | None) -> None:
        """Let a recorder note every kick of the CPU twins from now on, until the client closes."""
        self._recorder = recorder
        for table in self._tables.values():
            if isinstance(table, TableClient):
                table.recorder = recorder

    def table(self, name: str) -> Table:
        """Return a table by its name, such as ``layers.1.engram``, or by ``model/table``.

        Raises:
            AttachError: this client did not attach it.
        """
        if name not in self._tables:
            known = ", ".join(image.table.name for image in self._images)
            raise AttachError(f"table {name} is not attached; there are: {known}")
        return self._tables[name]

    def set_quotas(self, quotas: dict[str, int]) -> None:
        """Change several tables' ways per set together: what some give up, others may take.

        Args:
            quotas: table name -> ways, of 32 in each cache.

        Raises:
            AttachError: a table that this client did not attach.
            HookError, ValueError: more ways than a set has; some may have changed.
        """
        move_quotas(self._tables, quotas)

    @property
    def attached(self) -> tuple[ImageInfo, ...]:
        """The images of this client, in ring order."""
        return self._images

    def images(self, model: str | None = None) -> list[ImageInfo]:
        """Return the images that the daemon serves, attached or not."""
        return self._link.images(model)

    def close(self) -> None:
        """Detach: the daemon drains the rings and lets go of the channel. Idempotent.

        In a forked child this only closes its copies: the connection is its parent's as well.
        """
        for table in self._tables.values():
            table.close()
        if self._recorder is not None and os.getpid() == self._pid:
            self._recorder.close()
        if os.getpid() == self._pid:
            self._link.detach()
        else:
            self._link.close()
        self._channel = None  # its memory goes now, not when this object does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def list_images(
    socket_path: str | os.PathLike[str], model: str | None = None, *, wait_s: float = 0.0
) -> list[ImageInfo]:
    """Return the images that a daemon serves, of one model or of all.

    Raises:
        AttachError: no daemon within ``wait_s`` seconds.
    """
    link = _Link.connect(os.fspath(socket_path), wait_s)
    try:
        return link.images(model)
    finally:
        link.close()


class _Link:
    """The socket to the daemon, and what the daemon sent over it."""

    def __init__(self, sock: socket.socket, path: str, hello: dict[str, Any]) -> None:
        self._sock: socket.socket | None = sock
        self._path = path
        self.boot_id = str(hello.get("boot_id", ""))
        self.daemon_pid = int(hello.get("pid", 0))
        self.wake_fd = -1
        self.device_fds: list[int] = []
        self.devices: dict[str, str] = {}  # uuid -> path
        self.map: dict[str, Any] = {}
        self.dram: dict[int, tuple[int, int]] = {}  # image -> (descriptor, bytes)

    @classmethod
    def connect(cls, path: str, wait_s: float) -> Self:
        sock = _connect(path, wait_s)
        try:
            sock.settimeout(ANSWER_TIMEOUT_S)
            answer, fds = _exchange(sock, path, {"op": "hello", "abi": wire.ABI})
            wire.close_all(fds)
            if answer.get("abi") != wire.ABI:
                raise AttachError(
                    f"{path}: the daemon speaks attach ABI {answer.get('abi')}, this engine's "
                    f"tierd {wire.ABI}; install the same tierd on both sides"
                )
            return cls(sock, path, answer)
        except BaseException:
            sock.close()
            raise

    def ask(
        self, message: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        if self._sock is None:
            raise AttachError("the client has been closed")
        return _exchange(self._sock, self._path, message, fds)

    def images(self, model: str | None) -> list[ImageInfo]:
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

    def attach(self, request: dict[str, Any], channel_fd: int) -> dict[str, Any]:
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
        return answer

    def detach(self) -> None:
        """Detach if the daemon still lives; it drops a closed socket's client anyway."""
        if self._sock is None:
            return
        with contextlib.suppress(AttachError):
            _, fds = self.ask({"op": "detach"})
            wire.close_all(fds)
        self.close()

    def close(self) -> None:
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


def _check_device(options: TableOptions) -> torch.device | None:
    if options.device is None:
        return None
    from tierd.gpu import device_tables  # noqa: PLC0415 - the CPU twin does without triton

    return device_tables.check_device(options.device)


def _set_sample_rate(channel: Any, rate: float) -> None:
    protocol = _core.protocol
    memory = channel.buffer()
    for ring in range(channel.ring_count):
        at = protocol.OFFSET_RINGS + ring * protocol.RING_ENTRY_BYTES + 40  # RingEntry.samples
        samples.set_sample_rate(memory, int(memory[at : at + 8].view("<u8")[0]), rate)


def _make_tables(
    images: tuple[ImageInfo, ...],
    channel: Any,
    link: _Link,
    *,
    cache_rows: int,
    options: TableOptions,
    device: torch.device | None,
) -> dict[str, Table]:
    audits: dict[int, Audit] = {}
    try:
        if options.audit_every:
            for index, image in enumerate(images):
                audits[index] = _make_audit(image, link, options, device)
        shared: dict[str, Any] = {
            "options": options,
            "cache_rows": cache_rows,
            "audits": audits,
        }
        if device is None:
            paths = {index: link.device_of(image) for index, image in enumerate(images)}
            twins = make_twins(images, channel, wake_fd=link.wake_fd, devices=paths, **shared)
            return by_names(images, twins)
        from tierd.gpu import device_tables  # noqa: PLC0415 - as above

        made = device_tables.make_tables(images, channel, device, dram=link.dram, **shared)
        return by_names(images, made)
    except BaseException:
        for audit in audits.values():
            audit.close()
        raise


def _make_audit(
    image: ImageInfo, link: _Link, options: TableOptions, device: torch.device | None
) -> Audit:
    """Build what audits a table: an oracle over the devices, and who asks it."""
    from tierd.gpu import audit  # noqa: PLC0415 - only who audits needs torch here

    entry = next(
        entry for entry in link.map["images"] if int(entry["image_id"], 16) == image.image_id
    )
    fds = dict(zip(link.devices, link.device_fds, strict=True))
    rows: ImageRows = audit.image_rows(image, entry, fds)
    judge: RowJudge = audit.RowJudge(
        image, rows.read, owned=options.rows_of(image), canonical_zero=options.canonical_zero
    )
    if device is None:
        return audit.HostAudit(judge, options.audit_every, rows.close)
    from tierd.gpu.device_audit import DeviceAudit  # noqa: PLC0415 - as above

    return DeviceAudit(judge, options.audit_every, device, rows.close)


def _check_images(images: tuple[ImageInfo, ...]) -> None:
    if not images:
        raise AttachError("no image to attach; run: tierd images")
    if len(images) > IMAGES_MAX:
        raise AttachError(f"{len(images)} images; one client attaches at most {IMAGES_MAX}")
    names = [image.name for image in images]
    for name in names:
        if names.count(name) > 1:
            raise AttachError(f"image {name} is listed twice")


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
                waited = f" (waited {wait_s:g} s)" if wait_s > 0 else ""
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
        raise AttachError(text + "; run: journalctl -u tierd -n 20") from None
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

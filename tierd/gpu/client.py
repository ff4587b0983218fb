"""The engine's side of attach: find the daemon, agree on images, hand over the channel.

    client = Client.attach(path, images, engine="transformers", cache_rows=65536, rows_max=4096)
    table = client.table("layers.1.engram")
    table.kick(ids)            # when the token ids are known
    table.gather(ids, out)     # where the layer needs the rows

The daemon may start later than the engine: attach waits for it, at most ``wait_s``. With
``TableOptions(device="cuda:0")`` the tables take and give tensors of that GPU, and may be captured
in its graphs. Once attached, the engine outlives its daemons: see gpu/keeper.py.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tierd.errors import AttachError, DaemonGoneError
from tierd.gpu import caches, tracing
from tierd.gpu.hints import HintRing, hint_rows
from tierd.gpu.keeper import Keeper
from tierd.gpu.link import Link
from tierd.gpu.tables import TableOptions, by_names, move_quotas
from tierd.gpu.twin_tables import TableClient, make_twins
from tierd.io import _core, samples, seen, wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from tierd.gpu.audit import Audit, ImageRows, RowJudge
    from tierd.gpu.tables import Table
    from tierd.types import ImageInfo

log = logging.getLogger("tierd")

DEFAULT_SOCKET = "/run/tierd/engine.sock"
IMAGES_MAX = 64  # one ring each; a table number has 6 bits


class Client:
    """One engine rank, attached. Made by :meth:`attach`; also a context manager.

    Attributes:
        keeper: the guardian, and the connection to whichever daemon is there.
    """

    def __init__(
        self, keeper: Keeper, channel: Any, images: Sequence[ImageInfo], tables: dict[str, Table]
    ) -> None:
        self.keeper = keeper
        self._channel = channel
        self._images = tuple(images)
        self._tables = tables
        self._pid = os.getpid()
        self._recorder: tracing.Recorder | None = None
        self._hints: dict[str, HintRing] = {}
        # Also when the engine ends without a close: the daemon then knows that it was no accident.
        self._finalizer = weakref.finalize(self, keeper.close)

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
        expected_ranks: int | None = None,
        wait_s: float = 30.0,
        arena_pages: int | None = None,
        options: TableOptions | None = None,
    ) -> Self:
        """Attach to a daemon and make a table of each image.

        Args:
            socket_path: the daemon's engine socket.
            images: at most 64, from :func:`list_images`; one ring each.
            engine: its name, for people.
            cache_rows: slots for the tables of each row size together (see gpu/caches.py).
            rows_max: missing rows that one request may list; larger ids go in sub-batches.
            rank: this rank's number.
            world: ranks of the engine.
            expected_ranks: how many of them the daemon of this node should see; None says all.
            wait_s: seconds to wait for a daemon that is not there yet.
            arena_pages: pages of each arena; None makes room for two full requests.
            options: how the tables are wanted: on which device, which rows, audited or not.

        Raises:
            AttachError: no daemon, or it refused; the text says which and what to do.
            HookError: no such GPU, not enough memory on it, or a graph is being captured.
        """
        images, options = tuple(images), options or TableOptions()
        _check_images(images)
        options.check(images)
        device, path = _check_device(options), os.fspath(socket_path)
        for link in _links(path, wait_s):
            try:
                return cls._attach_over(
                    path, link, images, engine=engine, cache_rows=cache_rows, rows_max=rows_max,
                    rank=rank, world=world,
                    expected_ranks=world if expected_ranks is None else expected_ranks,
                    arena_pages=2 * rows_max if arena_pages is None else arena_pages,
                    options=options, device=device,
                )  # fmt: skip
            except BaseException as error:
                link.close()
                if not isinstance(error, DaemonGoneError):
                    raise
                gone = error
        raise gone

    @classmethod
    def _attach_over(
        cls,
        path: str,
        link: Link,
        images: tuple[ImageInfo, ...],
        *,
        engine: str,
        cache_rows: int,
        rows_max: int,
        rank: int,
        world: int,
        expected_ranks: int,
        arena_pages: int,
        options: TableOptions,
        device: torch.device | None,
    ) -> Self:
        channel = _make_channel(
            len(images),
            rank=rank,
            world=world,
            rows_max=rows_max,
            arena_pages=arena_pages,
            options=options,
            on_gpu=device is not None,
        )
        if options.sample_rate is not None:
            _set_sample_rate(channel, options.sample_rate)
        request = {
            "op": "attach",
            "abi": wire.ABI,
            "engine": engine,
            "rank": rank,
            "world": world,
            "expected_ranks": expected_ranks,
            "caches": [
                {"sets": part.sets, "row_bytes": part.row_bytes, "ways": part.quotas}
                for part in caches.plan([image.table for image in images], cache_rows)
            ],
            "images": [
                {"image_id": f"{image.image_id:016x}", "generation": image.generation}
                for image in images
            ],
        }
        link.attach(request, channel.fd)
        tables = _make_tables(
            images, channel, link, cache_rows=cache_rows, options=options, device=device
        )
        keeper = Keeper(path, link, channel, request)
        for table in tables.values():
            if isinstance(table, TableClient):  # a GPU rings no pump
                keeper.on_rewake(table.rewaker())
        client = cls(keeper, channel, images, tables)
        client.record(tracing.recorder(images, engine))
        _skip_unseen(client, link.lossy)
        if options.hint_pages:
            client._open_hints(link.wake_fd, options.hint_pages)
        return client

    def _open_hints(self, wake_fd: int, pages: int) -> None:
        for number, image in enumerate(self._images):
            hints = HintRing(
                self._channel,
                len(self._images) + number,
                wake_fd,
                rows=image.table.rows,
                per_page=image.rows_per_page,
                pages=pages,
            )
            self._hints[image.name] = hints
            self.keeper.on_rewake(hints.rewake)

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

    def hint(self, name: str, ids: Any) -> int:
        """Tell the daemon which rows a prefill will read, a chunk ahead; from one thread.

        Args:
            name: the table, as for :meth:`table`.
            ids: integer row numbers in host memory, any shape.

        Returns:
            Pages asked for; 0 where the client was attached without ``hint_pages``.
        """
        ring = self._hints.get(self.table(name).info.name)
        return 0 if ring is None else ring.give(ids)

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
    def client_id(self) -> str:
        """The daemon's name for this client."""
        return self.keeper.link.client_id

    @property
    def boot_id(self) -> str:
        """Identity of the daemon's run; another one after it was restarted."""
        return self.keeper.link.boot_id

    @property
    def daemon_pid(self) -> int:
        """The daemon's process, or that of the last one."""
        return self.keeper.link.daemon_pid

    @property
    def attached(self) -> tuple[ImageInfo, ...]:
        """The images of this client, in ring order."""
        return self._images

    def images(self, model: str | None = None) -> list[ImageInfo]:
        """Return the images that the daemon serves, attached or not."""
        return self.keeper.link.images(model)

    def close(self) -> None:
        """Detach: the daemon drains the rings and lets go of the channel. Idempotent.

        In a forked child this only closes its copies: the connection is its parent's as well.
        """
        for table in self._tables.values():
            table.close()
        if self._recorder is not None and os.getpid() == self._pid:
            self._recorder.close()
        self._hints.clear()
        self._finalizer()
        self._channel = None  # its memory goes now, not when this object does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_channel(
    images: int,
    *,
    rank: int,
    world: int,
    rows_max: int,
    arena_pages: int,
    options: TableOptions,
    on_gpu: bool,
) -> Any:
    """Make a channel with a ring an image and, with hints, as many rings for those."""
    flags = int(_core.protocol.RING_FLAG_GUARDED)
    if on_gpu:
        flags |= int(_core.protocol.RING_FLAG_GPU)
    rings = [(rows_max, arena_pages, number, flags) for number in range(images)]
    if options.hint_pages:
        listed, flag = hint_rows(options.hint_pages), int(_core.protocol.RING_FLAG_HINT)
        rings += [(listed, options.hint_pages, number, flag) for number in range(images)]
    try:
        return _core.Channel(rank=rank, world=world, client_id=uuid.uuid4().bytes, rings=rings)
    except (ValueError, OSError) as error:
        raise AttachError(f"no channel of {len(rings)} rings can be made: {error}") from None


def _skip_unseen(client: Client, lossy: dict[str, str]) -> None:
    """Let the tables leave out what the daemon's operator wants left out."""
    for image in client.attached:
        path = lossy.get(f"{image.image_id:016x}")
        table = client.table(image.name)
        if path is None:
            continue
        made = seen.load(Path(path))
        if (made.rows, made.fingerprint) != (image.table.rows, image.fingerprint):
            raise AttachError(  # the file is another one than the daemon has read
                f"{path}: a seen-set of another checkpoint's table than {image.name}; "
                "run: systemctl restart tierd"
            )
        table.skip_unseen(made.bits)
        log.warning("LOSSY: rows of %s that no trace saw are zero (%s)", image.name, path)


def list_images(
    socket_path: str | os.PathLike[str], model: str | None = None, *, wait_s: float = 0.0
) -> list[ImageInfo]:
    """Return the images that a daemon serves, of one model or of all.

    Raises:
        AttachError: no daemon within ``wait_s`` seconds.
    """
    for link in _links(os.fspath(socket_path), wait_s):
        try:
            return link.images(model)
        except DaemonGoneError as error:
            gone = error
        finally:
            link.close()
    raise gone


def _links(path: str, wait_s: float) -> Iterator[Link]:
    """Yield a link, and others while the daemons die in the middle of what is done with it.

    The first comes within ``wait_s`` seconds, or AttachError does; after that time no other comes.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            yield Link.connect(path, max(0.0, deadline - time.monotonic()))
        except DaemonGoneError:
            if time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            return


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
    link: Link,
    *,
    cache_rows: int,
    options: TableOptions,
    device: torch.device | None,
) -> dict[str, Table]:
    audits: dict[int, Audit] = {}
    try:
        if options.audit_every:
            for index, image in enumerate(images):
                if (one := _make_audit(image, link, options, device)) is not None:
                    audits[index] = one
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
    image: ImageInfo, link: Link, options: TableOptions, device: torch.device | None
) -> Audit | None:
    """Build what audits a table: an oracle over the devices, and who asks it."""
    from tierd.gpu import audit  # noqa: PLC0415 - only who audits needs torch here

    entry: dict[str, Any] = next(
        (entry for entry in link.map["images"] if int(entry["image_id"], 16) == image.image_id),
        {"devices": []},
    )
    if not entry["devices"]:
        log.warning("%s is not audited: it lies at peers, whose devices are not here", image.name)
        return None
    fds = dict(zip(link.devices, link.device_fds, strict=True))
    rows: ImageRows = audit.image_rows(image, entry, fds)
    judge: RowJudge = audit.RowJudge(
        image, rows.read, owned=options.rows_of(image),
        canonical_zero=options.canonical_zero, scale_zero=options.scale_zero,
    )  # fmt: skip
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

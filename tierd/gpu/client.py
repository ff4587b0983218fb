"""The engine's side of attach: find the daemon, agree on images, hand over the channel.

    client = Client.attach(path, images, engine="transformers", cache_rows=65536, rows_max=4096)
    table = client.table("layers.1.engram")
    table.kick(ids)            # when the token ids are known
    table.gather(ids, out)     # where the layer needs the rows

The daemon may start later than the engine: attach waits for it, at most ``wait_s``. Once
attached, the engine outlives its daemons: see gpu/keeper.py.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref
from typing import TYPE_CHECKING, Any, Self

from tierd.errors import AttachError, RowError
from tierd.gpu import caches
from tierd.gpu.keeper import Keeper
from tierd.gpu.link import Link
from tierd.io import _core, wire
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierd.types import ImageInfo

DEFAULT_SOCKET = "/run/tierd/engine.sock"
IMAGES_MAX = 64  # one ring each; a table number has 6 bits


class Client:
    """One engine rank, attached. Made by :meth:`attach`; also a context manager.

    Attributes:
        keeper: the guardian, and the connection to whichever daemon is there.
    """

    def __init__(
        self,
        keeper: Keeper,
        channel: Any,
        images: Sequence[ImageInfo],
        tables: dict[str, TableClient],
    ) -> None:
        self.keeper = keeper
        self._channel = channel
        self._images = tuple(images)
        self._tables = tables
        # Also when the engine ends without a close: the daemon then knows that it was no accident.
        self._finalizer = weakref.finalize(self, keeper.close)
        for table in tables.values():
            table.belong(self)

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

        Raises:
            AttachError: no daemon, or it refused; the text says which and what to do.
        """
        images = tuple(images)
        _check_images(images)
        path = os.fspath(socket_path)
        link = Link.connect(path, wait_s)
        try:
            return cls._attach_over(
                path,
                link,
                images,
                engine=engine,
                cache_rows=cache_rows,
                rows_max=rows_max,
                rank=rank,
                world=world,
                arena_pages=2 * rows_max if arena_pages is None else arena_pages,
            )
        except BaseException:
            link.close()
            raise

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
        arena_pages: int,
    ) -> Self:
        flags = _core.protocol.RING_FLAG_GUARDED
        rings = [(rows_max, arena_pages, number, flags) for number in range(len(images))]
        try:
            channel = _core.Channel(
                rank=rank, world=world, client_id=uuid.uuid4().bytes, rings=rings
            )
        except (ValueError, OSError) as error:
            raise AttachError(f"no channel of {len(rings)} rings can be made: {error}") from None
        request = {
            "op": "attach",
            "abi": wire.ABI,
            "engine": engine,
            "rank": rank,
            "world": world,
            "expected_ranks": world,
            "images": [
                {"image_id": f"{image.image_id:016x}", "generation": image.generation}
                for image in images
            ],
        }
        link.attach(request, channel.fd)
        tables = _make_tables(images, channel, link, cache_rows)
        keeper = Keeper(path, link, channel, request)
        for table in {id(table): table for table in tables.values()}.values():
            keeper.on_rewake(table.rewaker())
        return cls(keeper, channel, images, tables)

    def table(self, name: str) -> TableClient:
        """Return a table by its name, such as ``layers.1.engram``, or by ``model/table``.

        Raises:
            AttachError: this client did not attach it.
        """
        if name not in self._tables:
            known = ", ".join(image.table.name for image in self._images)
            raise AttachError(f"table {name} is not attached; there are: {known}")
        return self._tables[name]

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
        self._finalizer()
        self._channel = None  # its memory goes now, not when this object does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TableClient:
    """One attached table.

    Attributes:
        info: the image it reads.
        quota: ways of each set of the cache that it may hold.
    """

    def __init__(self, info: ImageInfo, twin: Any, *, quota: int, device: str) -> None:
        self.info = info
        self.quota = quota
        self._twin = twin
        self._device = device
        self._client: Client | None = None

    def belong(self, client: Client) -> None:
        """Keep the client for as long as its table is used."""
        self._client = client

    def rewaker(self) -> Callable[[int], None]:
        """Return what makes kicks wake another daemon's pump; it does not keep the client."""
        rewake: Callable[[int], None] = self._open().rewake
        return rewake

    @property
    def raw(self) -> bool:
        """Whether rows are served as bytes rather than as bf16."""
        return self.info.table.row_format == RowFormat.RAW

    def kick(self, ids: Any) -> None:
        """Start reading the rows that are not cached.

        Args:
            ids: int64 or int32 row numbers of any shape; numpy or a CPU torch tensor.

        Raises:
            IndexError: an id is outside the table; nothing has changed then.
            RowError: an earlier request that was in the way failed.
        """
        with self._explained():
            self._open().kick(ids)

    def gather(self, ids: Any, out: Any) -> None:
        """Wait for the rows and write them to ``out``.

        Args:
            ids: int64 or int32 row numbers of any shape, usually those that were kicked.
            out: numpy or CPU torch, contiguous; bf16 (or 16-bit integers) [*ids.shape, dim], and
                for raw tables u8 [*ids.shape, row_bytes].

        Raises:
            IndexError: an id is outside the table.
            RowError: a row could not be read, or is not what was staged. ``out`` is undefined.
        """
        with self._explained():
            self._open().gather(ids, out)

    def set_quota(self, ways: int) -> None:
        """Change how many ways of each set this table may hold; nothing is flushed."""
        self._open().set_quota(ways)
        self.quota = ways

    def stats(self) -> dict[str, int]:
        """Return the counters of protocol.md's RingStats, since attach."""
        return dict(self._open().stats())

    def close(self) -> None:
        """Refuse further use; :meth:`Client.close` calls this."""
        self._twin = None
        self._client = None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the core's failures into an error that says which image, and what to run."""
        try:
            yield
        except RuntimeError as error:
            cure = f"run: tierd verify --device {self._device} {self.info.name}"
            if "timeout" in str(error):
                cure = "run: tierd status"
            raise RowError(f"{self.info.name}: {error}; {cure}") from None

    def _open(self) -> Any:
        if self._twin is None:
            raise RowError(f"{self.info.name}: the client has been closed")
        return self._twin


def list_images(
    socket_path: str | os.PathLike[str], model: str | None = None, *, wait_s: float = 0.0
) -> list[ImageInfo]:
    """Return the images that a daemon serves, of one model or of all.

    Raises:
        AttachError: no daemon within ``wait_s`` seconds.
    """
    link = Link.connect(os.fspath(socket_path), wait_s)
    try:
        return link.images(model)
    finally:
        link.close()


def _make_tables(
    images: Sequence[ImageInfo], channel: Any, link: Link, cache_rows: int
) -> dict[str, TableClient]:
    made: dict[int, TableClient] = {}
    for part in caches.plan([image.table for image in images], cache_rows):
        cache = _core.RowCache(sets=part.sets, row_bytes=part.row_bytes)
        for index, quota in part.quotas.items():
            image = images[index]
            twin = _core.TwinTable(
                cache,
                channel,
                index,
                link.wake_fd,
                table=index,
                image_id=image.image_id,
                generation=image.generation,
                rows=image.table.rows,
                dim=image.table.dim,
                row_format=image.table.row_format.value,
                quota=quota,
            )
            device = link.device_of(image)
            made[index] = TableClient(image, twin, quota=quota, device=device)
    tables = {}
    names = [image.table.name for image in images]
    for index, image in enumerate(images):
        tables[image.name] = made[index]
        if names.count(image.table.name) == 1:  # two models may name their tables alike
            tables[image.table.name] = made[index]
    return tables


def _check_images(images: tuple[ImageInfo, ...]) -> None:
    if not images:
        raise AttachError("no image to attach; run: tierd images")
    if len(images) > IMAGES_MAX:
        raise AttachError(f"{len(images)} images; one client attaches at most {IMAGES_MAX}")
    names = [image.name for image in images]
    for name in names:
        if names.count(name) > 1:
            raise AttachError(f"image {name} is listed twice")

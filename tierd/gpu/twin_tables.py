"""An attached client's tables on the CPU: the twin of the GPU path, in the native core."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import RowError
from tierd.gpu import caches
from tierd.io import _core, seen
from tierd.types import RowFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tierd.gpu.audit import Audit
    from tierd.gpu.tables import TableOptions
    from tierd.gpu.tracing import Recorder
    from tierd.types import ImageInfo


class TableClient:
    """One attached table.

    Attributes:
        info: the image it reads.
        recorder: notes every kick; None: nobody does.
        skipped: lookups of rows that lossy skipping left out.
    """

    def __init__(
        self, info: ImageInfo, twin: Any, *, device: str, audit: Audit | None = None
    ) -> None:
        self.info = info
        self.recorder: Recorder | None = None
        self.skipped = 0
        self._seen: NDArray[np.uint8] | None = None
        self._twin = twin
        self._device = device
        self._audit = audit

    def rewaker(self) -> Callable[[int], None]:
        """Return what makes kicks wake another daemon's pump; it does not keep this alive."""
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
            self._open().kick(ids if self._seen is None else self._wanted(self._seen, ids))
        if self.recorder is not None:
            self.recorder.note(self.info, ids)

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
        if self._seen is not None:
            self._gather_wanted(self._seen, ids, out)
            return
        with self._explained():
            self._open().gather(ids, out)
        if self._audit is not None:
            self._audit.observe(ids, out)

    def skip_unseen(self, bits: NDArray[np.uint8]) -> None:
        """Leave out, from now on, rows that a seen-set does not have: they are zero, not read.

        The audit ends with it: rows then differ from the image on purpose.
        """
        self._seen = bits

    def is_read(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which rows [n] are served as they are stored: those that are not left out."""
        if self._seen is None:
            return np.ones(len(rows), np.bool_)
        return seen.is_wanted(self._seen, rows)

    @staticmethod
    def _wanted(bits: NDArray[np.uint8], ids: Any) -> NDArray[np.int64]:
        rows = np.asarray(ids, np.int64).reshape(-1)
        return rows[seen.is_wanted(bits, rows)]

    def _gather_wanted(self, bits: NDArray[np.uint8], ids: Any, out: Any) -> None:
        rows = np.asarray(ids, np.int64).reshape(-1)
        wanted = seen.is_wanted(bits, rows)
        target = out if isinstance(out, np.ndarray) else _memory_of(out, raw=self.raw)
        dim = self.info.table.dim
        # Of memory that is not contiguous, reshape gives a copy: the rows would go nowhere.
        if target.shape != (*np.shape(ids), dim) or not target.flags.c_contiguous:
            raise ValueError(
                f"the output must be contiguous of shape {(*np.shape(ids), dim)}, got "
                f"{target.shape}{'' if target.flags.c_contiguous else ', not contiguous'}"
            )
        flat = target.reshape(len(rows), dim)
        found = np.empty((int(wanted.sum()), dim), flat.dtype)
        with self._explained():
            self._open().gather(rows[wanted], found)
        flat[wanted] = found
        flat[~wanted] = 0
        self.skipped += len(rows) - len(found)

    def warm(self, ids: Any) -> None:
        """Bring rows into the cache without using them; comes not between kick and gather.

        Raises:
            IndexError, RowError: as :meth:`gather`.
        """
        numbers = np.asarray(ids)
        if self._seen is not None:
            numbers = self._wanted(self._seen, numbers)
        spec = self.info.table
        out = np.empty((*numbers.shape, spec.dim), np.uint8 if self.raw else np.uint16)
        with self._explained():
            self._open().gather(numbers, out)

    def set_quota(self, ways: int) -> None:
        """Change how many ways of each set this table may hold; nothing is flushed."""
        self._open().set_quota(ways)

    @property
    def quota(self) -> int:
        """Ways of each set of the cache that it may hold; they follow the daemon's wish."""
        return self.stats()["quota"] - 1

    def stats(self) -> dict[str, int]:
        """Return the counters of protocol.md's RingStats, since attach."""
        return dict(self._open().stats())

    def close(self) -> None:
        """Refuse further use; :meth:`Client.close` calls this."""
        self._twin = None
        if self._audit is not None:
            self._audit.close()
            self._audit = None

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


def _memory_of(out: Any, *, raw: bool) -> NDArray[Any]:
    """Return a tensor's memory as numpy, which has no bf16: its bits."""
    import torch  # noqa: PLC0415 - who passes a tensor has it

    return np.asarray((out if raw else out.view(torch.int16)).numpy())


def make_twins(
    images: tuple[ImageInfo, ...],
    channel: Any,
    *,
    wake_fd: int,
    devices: Mapping[int, str],
    options: TableOptions,
    cache_rows: int,
    audits: Mapping[int, Audit],
) -> dict[int, TableClient]:
    """Make the tables of a channel; image i is ring i.

    Args:
        images: in ring order.
        channel: ``_core.Channel``.
        wake_fd: the pump's eventfd.
        devices: index -> path of the image's device, for error texts.
        options: of the client.
        cache_rows: slots for the tables of each row size together.
        audits: index -> what audits the table.
    """
    made: dict[int, TableClient] = {}
    for part in caches.plan([image.table for image in images], cache_rows):
        cache = _core.RowCache(sets=part.sets, row_bytes=part.row_bytes)
        for index, quota in part.quotas.items():
            image = images[index]
            twin = _core.TwinTable(
                cache,
                channel,
                index,
                wake_fd,
                table=index,
                image_id=image.image_id,
                generation=image.generation,
                rows=image.table.rows,
                dim=image.table.dim,
                row_format=image.table.row_format.value,
                quota=quota,
                canonical_zero=options.canonical_zero,
            )
            made[index] = TableClient(image, twin, device=devices[index], audit=audits.get(index))
    return made

"""Trace files: which rows were looked up, kick by kick. Written inside an engine, read by tools.

Layout (little-endian): 8 bytes ``tierdtrc``, u32 version, u32 length of the header, the header
(JSON: model, tables, what made it), then blocks. A block is u32 kicks, u32 ids, u32 stored bytes,
then zlib of: per kick u16 table, u16 flags (1: prefill), u32 ids; then all ids, u32 each where the
largest table has no more rows than that, else u64.

Fault model: the engine may be killed at any time, so the last block may be cut short; what comes
before it is good, and the reader says that something is missing. Hashed row numbers hardly
compress; a trace of V4.1 takes about 70 B a token and layer, 40 MB for 1,000 steps of 128 and two
layers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tierd.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

MAGIC = b"tierdtrc"
VERSION = 1
_HEAD = struct.Struct("<8sII")
_BLOCK = struct.Struct("<III")
_KICK = np.dtype([("table", "<u2"), ("flags", "<u2"), ("count", "<u4")])
_PREFILL = 1
_BLOCK_IDS = 1 << 18
_HEADER_MAX = 1 << 24
_BLOCK_MAX = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class TracedTable:
    """What a trace says of a table.

    Attributes:
        fingerprint: of the checkpoint's table; "" where none was known.
    """

    name: str
    layer: int
    rows: int
    row_bytes: int
    pages: int
    fingerprint: str = ""


class TraceWriter:
    """Writes one trace; threads may share it."""

    def __init__(self, path: Path, model: str, tables: Sequence[TracedTable], **made_by: Any):
        """Begin a file.

        Args:
            path: is replaced.
            model: the name under which the tables are staged.
            tables: their numbers in the trace are their places here.
            made_by: JSON-ready, for people: engine, what was run.

        Raises:
            TraceError: the file cannot be written.
        """
        self._path = path
        self._lock = threading.Lock()
        self._kicks: list[tuple[int, int, int]] = []
        self._ids: list[NDArray[Any]] = []
        self._waiting = 0
        wide = any(table.rows > 1 << 32 for table in tables)
        self._type = np.dtype("<u8" if wide else "<u4")
        header = {
            "model": model,
            "tables": [dataclasses.asdict(table) for table in tables],
            "id_bytes": self._type.itemsize,
            **made_by,
        }
        text = json.dumps(header).encode()
        try:
            self._file = path.open("wb")
            self._file.write(_HEAD.pack(MAGIC, VERSION, len(text)) + text)
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror}") from None

    def add(self, table: int, ids: ArrayLike, *, prefill: bool = False) -> None:
        """Note one kick.

        Args:
            table: its place in ``tables``.
            ids: row numbers of any shape, in order.
            prefill: whether they belong to a prompt.
        """
        rows = np.asarray(ids).reshape(-1).astype(self._type)
        with self._lock:
            self._kicks.append((table, _PREFILL if prefill else 0, len(rows)))
            self._ids.append(rows)
            self._waiting += len(rows)
            if self._waiting >= _BLOCK_IDS:
                self._write_block()

    def _write_block(self) -> None:
        kicks = np.array(self._kicks, _KICK)
        data = zlib.compress(kicks.tobytes() + np.concatenate(self._ids).tobytes(), 1)
        head = _BLOCK.pack(len(kicks), self._waiting, len(data))
        self._kicks, self._ids, self._waiting = [], [], 0
        try:
            self._file.write(head + data)
            self._file.flush()
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Write what waits. Idempotent."""
        with self._lock:
            if self._file.closed:
                return
            if self._kicks:
                self._write_block()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace in memory.

    Attributes:
        model: whose tables these are.
        tables: in the order of their numbers.
        made_by: the rest of the header.
        table: u16 [kicks].
        prefill: bool [kicks].
        count: u32 [kicks], ids of each.
        ids: int64, of all kicks back to back.
        cut: whether the file ends in the middle of a block.
    """

    model: str
    tables: tuple[TracedTable, ...]
    made_by: dict[str, Any]
    table: NDArray[np.uint16]
    prefill: NDArray[np.bool_]
    count: NDArray[np.uint32]
    ids: NDArray[np.int64]
    cut: bool

    def of_table(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
        """Return one table's ids, int64 [lookups], and for each its kick and whether prefill."""
        mine = self.table == number
        which = np.repeat(mine, self.count)
        kicks = np.repeat(np.arange(int(mine.sum())), self.count[mine])
        return self.ids[which], kicks, np.repeat(self.prefill[mine], self.count[mine])


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceError: no such file, not a trace, or of another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) < _HEAD.size or data[:8] != MAGIC:
        raise TraceError(f"{path}: not a trace; run: tierd trace record --help")
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise TraceError(f"{path}: a trace of version {version}; this tierd reads {VERSION}")
    try:
        header = json.loads(data[_HEAD.size : _HEAD.size + min(length, _HEADER_MAX)])
        tables = tuple(TracedTable(**table) for table in header.pop("tables"))
        model, id_bytes = header.pop("model"), int(header.pop("id_bytes"))
        kicks, ids, cut = _blocks(data, _HEAD.size + length, {4: "<u4", 8: "<u8"}[id_bytes])
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise TraceError(f"{path}: a damaged trace: {error}") from None
    if len(kicks) and int(kicks["table"].max()) >= len(tables):
        raise TraceError(f"{path}: a damaged trace: it names tables that it does not describe")
    return Trace(
        model, tables, header, kicks["table"], (kicks["flags"] & _PREFILL) != 0, kicks["count"],
        ids, cut,
    )  # fmt: skip


def _blocks(data: bytes, at: int, id_type: str) -> tuple[Any, NDArray[np.int64], bool]:
    kicks, ids = [np.empty(0, _KICK)], [np.empty(0, np.int64)]
    while at + _BLOCK.size <= len(data):
        kick_count, id_count, size = _BLOCK.unpack_from(data, at)
        at += _BLOCK.size
        if at + size > len(data):
            return np.concatenate(kicks), np.concatenate(ids), True
        unpacked = zlib.decompressobj().decompress(data[at : at + size], _BLOCK_MAX)
        split = kick_count * _KICK.itemsize
        if len(unpacked) != split + id_count * np.dtype(id_type).itemsize:
            raise ValueError("a block is not as long as it says")
        kicks.append(np.frombuffer(unpacked[:split], _KICK))
        ids.append(np.frombuffer(unpacked[split:], id_type).astype(np.int64))
        at += size
    if sum(int(k["count"].sum()) for k in kicks) != sum(map(len, ids)):
        raise ValueError("kicks and ids do not add up")
    return np.concatenate(kicks), np.concatenate(ids), at != len(data)


def trace_path(template: str) -> str:
    """Return a path of this process: ``{pid}`` stands for its number."""
    return template.replace("{pid}", str(os.getpid()))

"""History in SQLite: what happened, when. Deleting the file loses nothing but history.

Fault model: the disk under the file may be full, read-only, slow or gone, and the file may be
damaged. None of that may touch serving, so one worker thread does all the writing, behind a
bounded queue; when it cannot write, events are counted as lost and ``degraded`` says why, until
writing works again. A file that is no database is moved aside.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlite_utils import Database

QUEUE_MAX = 1024
READ_MAX = 1000
# The oldest events are dropped when this many more than events_max are there: not at each write.
_TRIM_SLACK = 100
_STOP = None


class Catalog:
    """The history of one daemon. :meth:`record` never blocks and never raises.

    Attributes:
        degraded: why history is not being kept, "" while it is.
        lost: events that could not be written.
        listener: told of every event, in the writer's thread, with its id (0 if it was lost).
    """

    listener: Callable[[dict[str, Any]], None] | None = None

    def __init__(self, path: Path, *, events_max: int = 100_000) -> None:
        self._path = path
        self._events_max = events_max
        self._queue: queue.Queue[dict[str, Any] | threading.Event | None] = queue.Queue(QUEUE_MAX)
        self._database: Database | None = None
        self._inode = -1
        self._newest = 0
        self.degraded = ""
        self.lost = 0
        self._thread = threading.Thread(target=self._work, name="tierd-catalog", daemon=True)
        self._thread.start()

    def record(self, kind: str, subject: str = "", **details: Any) -> None:
        """Keep an event.

        Args:
            kind: one word, such as started, staged, attached, job; docs/operating/rest.md has all.
            subject: the image, client or device that it is about.
            details: JSON-ready values.
        """
        row = {
            "time": time.time(),
            "kind": kind,
            "subject": subject,
            "details": json.dumps(details, default=str),
        }
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.lost += 1
            self.degraded = f"{self._path}: the disk is too slow: {QUEUE_MAX} events wait"

    def events(
        self, limit: int = 100, kind: str | None = None, after: int = 0, *, oldest: bool = False
    ) -> list[dict[str, Any]]:
        """Return the newest events, newest first; an empty list where history cannot be read.

        Opens its own connection, so any thread may call it.

        Args:
            limit: as many at most.
            kind: of this kind only.
            after: with a larger id than this only.
            oldest: the oldest of these instead, oldest first.
        """
        query = "select id, time, kind, subject, details from events where id > ?"
        values: list[Any] = [after]
        if kind is not None:
            query, values = query + " and kind = ?", [after, kind]
        query += f" order by id {'asc' if oldest else 'desc'} limit ?"
        try:
            uri = f"{self._path.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                rows = connection.execute(query, [*values, min(limit, READ_MAX)]).fetchall()
        except sqlite3.Error:
            return []
        names = ("id", "time", "kind", "subject", "details")
        return [dict(zip(names, (*row[:4], json.loads(row[4])), strict=True)) for row in rows]

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until what was recorded so far is written or lost; False when it takes too long."""
        reached = threading.Event()
        try:
            self._queue.put(reached, timeout=timeout_s)
        except queue.Full:
            return False
        return reached.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits and stop; a hanging disk is left behind after ``timeout_s``."""
        with contextlib.suppress(queue.Full):
            self._queue.put(_STOP, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not _STOP:
            if isinstance(item, threading.Event):
                item.set()
                continue
            number = 0
            try:
                number = self._write(item)
                self.degraded = ""
            except (sqlite3.Error, OSError) as error:
                self.lost += 1
                self.degraded = f"{self._path}: {error}"
                self._drop_connection()
            if self.listener is not None:
                self.listener({**item, "id": number, "details": json.loads(item["details"])})
        self._drop_connection()

    def _write(self, row: dict[str, Any]) -> int:
        if self._database is not None and _inode(self._path) != self._inode:
            self._drop_connection()  # deleted or replaced under us
        if self._database is None:
            self._database = self._open()
            self._inode = _inode(self._path)
            empty = self._database.execute("select max(id) from events").fetchone()[0] is None
            if empty and self._newest:  # deleted under us: it goes on behind what readers have seen
                row = {**row, "id": self._newest + 1}
        table = self._database.table("events")
        table.insert(row)
        newest = self._database.execute("select max(id), min(id) from events").fetchone()
        if newest[0] - newest[1] >= self._events_max + _TRIM_SLACK:
            table.delete_where("id <= ?", [newest[0] - self._events_max])
        self._newest = int(newest[0])
        return self._newest

    def _open(self) -> Database:
        try:
            return _create(self._path)
        except sqlite3.DatabaseError as error:
            # OperationalError is the disk (full, read-only); only the rest is a damaged file.
            if isinstance(error, sqlite3.OperationalError):
                raise
            aside = self._path.with_name(f"{self._path.name}.damaged-{int(time.time())}")
            self._path.replace(aside)
            for suffix in ("-wal", "-shm"):  # they belong to the damaged file
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            return _create(self._path)

    def _drop_connection(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.conn.close()
            self._database = None


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1


def _create(path: Path) -> Database:
    # Imported by the worker, once the daemon is up: it costs as much as all the rest of a start.
    from sqlite_utils import Database  # noqa: PLC0415

    # The worker makes, uses and closes the connection; WAL lets readers in beside it.
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        # Events are appended: SQLite's own 2 MiB of cached pages would only be memory kept.
        connection.execute("pragma cache_size = -128")
        database = Database(connection)
        columns = {"id": int, "time": float, "kind": str, "subject": str, "details": str}
        events = database.table("events")
        events.create(columns, pk="id", if_not_exists=True)
        events.create_index(["kind"], if_not_exists=True)
    except BaseException:
        connection.close()
        raise
    return database

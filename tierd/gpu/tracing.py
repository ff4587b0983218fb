"""Records what an engine kicks, when ``TIERD_TRACE`` names a file (``tierd trace record`` sets it).

Only kicks of tables on the CPU are seen: on a GPU they happen inside captured graphs, and the
daemon knows them by their samples. One file a process; ``{pid}`` in the name keeps several
processes apart. Recording costs a copy and some compression per kick: it is for runs that make a
trace, not for serving.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.io.tracefile import TracedTable, TraceWriter, trace_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.types import ImageInfo

VARIABLE = "TIERD_TRACE"


class Recorder:
    """The trace of one client's tables."""

    def __init__(self, path: Path, images: Sequence[ImageInfo], engine: str) -> None:
        tables = [
            TracedTable(
                image.table.name,
                image.table.layer,
                image.table.rows,
                image.table.row_bytes,
                image.pages,
                image.fingerprint,
            )
            for image in images
        ]
        self._writer = TraceWriter(path, images[0].model, tables, engine=engine)
        self._numbers = {image.image_id: number for number, image in enumerate(images)}
        atexit.register(self._writer.close)

    def note(self, image: ImageInfo, ids: Any) -> None:
        """Note one kick; ids whose second axis is longer than 1 are a prompt's."""
        shape: tuple[int, ...] = tuple(getattr(ids, "shape", ()))
        prefill = len(shape) > 1 and shape[1] > 1
        self._writer.add(self._numbers[image.image_id], ids, prefill=prefill)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._writer.close()


_lock = threading.Lock()
_opened: set[str] = set()


def recorder(images: Sequence[ImageInfo], engine: str) -> Recorder | None:
    """Return a recorder for a client that attaches now; None unless ``TIERD_TRACE`` asks for it.

    A process that attaches several times (two models) writes a file for each: ``.2`` and so on
    are put behind the name.
    """
    template = os.environ.get(VARIABLE)
    if not template:
        return None
    with _lock:
        path = trace_path(template)
        number = 1
        while (name := path if number == 1 else f"{path}.{number}") in _opened:
            number += 1
        _opened.add(name)
    return Recorder(Path(name), images, engine)

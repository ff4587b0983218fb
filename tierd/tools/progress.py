"""Progress bars: how much is done, how fast, how long it will take; on terminals only."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Report = Callable[[int, int | None], None]


@contextlib.contextmanager
def bar(title: str, *, quiet: bool) -> Iterator[Report | None]:
    """Show a bar on the error stream; the callback takes (done, total) in bytes.

    Yields None where there is no terminal, or ``quiet`` says that none is wanted.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    # Slow to import, and only for terminals.
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)

"""What the hook reads from its environment, or is given by ``activate``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tierd.errors import HookError

DEFAULT_SOCKET = "/run/tierd/engine.sock"
DEFAULT_CACHE_ROWS = 65_536
_DIGITS = 12
WAIT_S = 10.0
"""A daemon that restarts is back in seconds; a model that loads waits this long for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class HookSettings:
    """How a model finds its tables.

    Attributes:
        socket: path of the daemon's engine socket.
        model: the name under which the tables were staged; None accepts any.
        cache_rows: slots of the row cache for the tables of each row size.
        wait_s: how long to wait for a daemon that is not there, seconds.
        hint_pages: memory of the daemon for each table's hints, in pages; None: the engine's
            default.
        audit_every: every so many gathers, compare rows with the image; 0 never does.
    """

    socket: str
    model: str | None
    cache_rows: int
    wait_s: float
    hint_pages: int | None = None
    audit_every: int = 0


_overrides: dict[str, Any] = {}


def override(**values: str | int | None) -> None:
    """Let these values go before the environment's; None leaves the environment's."""
    _overrides.clear()
    _overrides.update({key: value for key, value in values.items() if value is not None})


def current(*, cache_rows: int = DEFAULT_CACHE_ROWS) -> HookSettings:
    """Return the settings for a model that is loaded now.

    Args:
        cache_rows: the engine's default, where the environment names no number.

    Raises:
        HookError: a value that cannot be used.
    """
    values: dict[str, Any] = {
        "socket": os.environ.get("TIERD_SOCKET") or DEFAULT_SOCKET,
        "model": os.environ.get("TIERD_MODEL") or None,
        "cache_rows": count("TIERD_CACHE_ROWS", cache_rows),
        "wait_s": float(count("TIERD_WAIT_S", int(WAIT_S), what="seconds")),
        "audit_every": count("TIERD_AUDIT_EVERY", 0, what="gathers", least=0),
    }
    if os.environ.get("TIERD_HINT_PAGES"):
        values["hint_pages"] = count("TIERD_HINT_PAGES", 0, what="pages", least=0)
    return HookSettings(**(values | _overrides))


def count(name: str, default: int, *, what: str = "rows", least: int = 1) -> int:
    """Return a whole number from the environment.

    Raises:
        HookError: it is no such number, or less than ``least``.
    """
    text = os.environ.get(name) or str(default)
    # More digits than any of these numbers has would only fail later, and less clearly.
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or int(text) < least:
        raise HookError(f"{name}={text!r} is not a number of {what}, such as {default}")
    return int(text)


def switch(name: str) -> bool:
    """Return whether a switch of the environment is on.

    Raises:
        HookError: it is neither 1 nor 0, and nobody can say what was meant.
    """
    text = os.environ.get(name, "")
    if text not in {"", "0", "1"}:
        raise HookError(f"{name}={text!r} is neither 1 nor 0")
    return text == "1"

"""What the hook reads from its environment, or is given by ``activate``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tierd.errors import HookError

DEFAULT_SOCKET = "/run/tierd/engine.sock"
DEFAULT_CACHE_ROWS = 65_536
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
    """

    socket: str
    model: str | None
    cache_rows: int
    wait_s: float


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
    }
    return HookSettings(**(values | _overrides))


def count(name: str, default: int, *, what: str = "rows") -> int:
    """Return a whole number above 0 from the environment.

    Raises:
        HookError: it is no such number.
    """
    text = os.environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise HookError(f"{name}={text!r} is not a number of {what}, such as {default}")
    return int(text)

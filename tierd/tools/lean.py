"""What a daemon's start can do without: a quarter of its imports serve nobody there.

structlog draws tracebacks with rich where it finds it; the daemon's are JSON or plain text.
aiohttp's client reads the system's certificates when it is imported; the daemon is a server. Both
are told for the time of the import that there is no such thing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNUSED = ("rich", "better_exceptions")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Import structlog and aiohttp within, before anything else does; later imports are whole."""
    hidden = [name for name in _UNUSED if name not in sys.modules]
    before = {name: os.environ.get(name) for name in _CERTIFICATES}
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # so that it cannot be imported
    os.environ.update(dict.fromkeys(_CERTIFICATES, os.devnull))
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

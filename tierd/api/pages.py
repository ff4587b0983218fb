"""The dashboard's files, served at / with everything forbidden that they do not need.

They come from the package's folder ``dashboard``, each read and compressed once.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from functools import lru_cache
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

from tierd.api.access import PUBLIC

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
HEADERS = {
    # No script, style, picture or connection but the daemon's own; no frame around the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Asked for again at each load, answered with 304 while it is the same.
    "Cache-Control": "no-cache",
}


class Page(NamedTuple):
    """One file: its bytes, compressed too, and their tag."""

    plain: bytes
    packed: bytes
    etag: str
    content_type: str


def names() -> list[str]:
    """Return the files that are served."""
    return sorted(
        entry.name
        for entry in resources.files("tierd.api").joinpath("dashboard").iterdir()
        if entry.name.rpartition(".")[2] in TYPES
    )


@lru_cache
def read(name: str) -> Page:
    """Return a file of the dashboard."""
    plain = resources.files("tierd.api").joinpath("dashboard", name).read_bytes()
    etag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
    return Page(plain, gzip.compress(plain, 9, mtime=0), etag, TYPES[name.rpartition(".")[2]])


def add_to(app: web.Application) -> None:
    """Serve every file at its name, and the page itself at /."""
    for name in names():
        path = "/" if name == "index.html" else f"/dashboard/{name}"
        app.router.add_route("GET", path, _handler(name))
        PUBLIC.add(path)


def _handler(name: str) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        page = await asyncio.to_thread(read, name)
        headers = {**HEADERS, "ETag": page.etag, "Vary": "Accept-Encoding"}
        if page.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        packed = "gzip" in request.headers.get("Accept-Encoding", "")
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(
            body=page.packed if packed else page.plain,
            content_type=page.content_type,
            charset="utf-8",
            headers=headers,
        )

    return handle

"""Asks a daemon's REST interface over its Unix socket; standard library only, so it starts fast."""

from __future__ import annotations

import errno
import http.client
import json
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tierd.errors import DaemonError

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 10.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def get(socket_path: Path, resource: str) -> dict[str, Any]:
    """Return a resource.

    Args:
        socket_path: the daemon's REST socket.
        resource: such as ``/v1/status``; quoted here.

    Raises:
        DaemonError: no daemon there, or it answered with a problem.
    """
    connection = _UnixConnection(socket_path)
    try:
        connection.request("GET", quote(resource, safe="/?=&"))
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DaemonError(_explain(socket_path, error)) from None
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise DaemonError(f"{socket_path}: answered {resource} with no JSON object")
    if response.status != http.client.OK:
        raise DaemonError(str(body.get("detail") or f"{resource}: HTTP {response.status}"))
    return body


def _explain(path: Path, error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    match number:
        case errno.ENOENT | errno.ECONNREFUSED:
            return f"{path}: no daemon listens there; run: systemctl start tierd"
        case errno.EACCES:
            return f"{path}: permission denied; run as root, or join engine.socket_group's group"
        case _:
            return f"{path}: no usable answer: {error!r}"

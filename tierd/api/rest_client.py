"""Asks a daemon's REST interface over its Unix socket; standard library only, so it starts fast."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tierd.errors import DaemonError, NoDaemonError, RestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 10.0
# Longer than the silence after which the daemon sends a comment.
STREAM_TIMEOUT_S = 60.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
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
        NoDaemonError: no daemon listens there.
        RestError: it answered with a problem.
        DaemonError: there is no usable answer.
    """
    return change(socket_path, "GET", resource)


def change(
    socket_path: Path,
    method: str,
    resource: str,
    body: dict[str, Any] | None = None,
    *,
    match: str | None = None,
) -> dict[str, Any]:
    """Send a request and return its answer; raises as :func:`get` does.

    Args:
        socket_path: the daemon's REST socket.
        method: such as POST.
        resource: quoted here.
        body: sent as JSON.
        match: ETag of the state that the change was decided on.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if match is not None:
        headers["If-Match"] = match
    data = None if body is None else json.dumps(body)
    connection = _UnixConnection(socket_path, TIMEOUT_S)
    try:
        connection.request(method, quote(resource, safe="/?=&%"), data, headers)
        response = connection.getresponse()
        return _judge(socket_path, resource, response.status, json.loads(response.read()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _explain(socket_path, error) from None
    finally:
        connection.close()


def follow(socket_path: Path, resource: str) -> Iterator[dict[str, Any]]:
    """Yield the data of a resource's server-sent events until the daemon ends them.

    Raises as :func:`get` does.
    """
    connection = _UnixConnection(socket_path, STREAM_TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            headers = {"Accept": "text/event-stream"}
            connection.request("GET", quote(resource, safe="/?=&%"), headers=headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                _judge(socket_path, resource, response.status, json.loads(response.read()))
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _explain(socket_path, error) from None


def _judge(path: Path, resource: str, status: int, body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise DaemonError(f"{path}: answered {resource} with no JSON object")
    if status >= http.client.BAD_REQUEST:
        raise RestError(str(body.get("detail") or f"{resource}: HTTP {status}"))
    return body


def _explain(path: Path, error: Exception) -> DaemonError:
    number = error.errno if isinstance(error, OSError) else None
    match number:
        case errno.ENOENT | errno.ECONNREFUSED:
            return NoDaemonError(f"{path}: no daemon listens there; run: systemctl start tierd")
        case errno.EACCES:
            text = "permission denied; run as root, or join engine.socket_group's group"
            return DaemonError(f"{path}: {text}")
        case _:
            return DaemonError(f"{path}: no usable answer: {error!r}")

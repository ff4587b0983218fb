"""Who asks, and whether they may change things.

On the Unix socket the kernel says who the peer is: root, the daemon's own user and members of
``api.admin_group`` may change things, everybody else who can connect may read. On TCP whoever
shows the token may do everything, who shows a key that was made from it may read, and nobody else
anything. The dashboard's own files are anybody's: they are in the package that everybody can get.
"""

from __future__ import annotations

import dataclasses
import grp
import hmac
import os
import socket
import struct
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api.problems import Problem
from tierd.daemon.tokens import read_token
from tierd.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from tierd.config import ApiSection
    from tierd.config.remote import ExportsSection

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59
_GROUPS_MAX = 256  # as many as Python lets getsockopt return
KEY_LASTS_S = 30 * 86_400  # a page that is kept open all day, for a month
_KEY_PREFIX = "read."


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: for logs and limits: ``uid 1000``, or an address.
        may_change: whether changes are allowed.
        peer: it is another node, which may do what peers may and nothing else.
    """

    name: str
    may_change: bool
    peer: bool = False


CALLER = web.RequestKey("caller", Caller)


class Access:
    """The rules of one daemon."""

    def __init__(self, settings: ApiSection, exports: ExportsSection) -> None:
        """Read the token and look the group up.

        Raises:
            ConfigError: a token file can be read by others, is missing or too short, both hold
                one token, or there is no such group.
        """
        self._group = _group_id(settings.admin_group) if settings.admin_group else None
        self._token = b""
        self._peers = b""
        if settings.listen:
            self._token = read_token("api.token_file", settings.token_file)
            if exports.images:
                self._peers = read_token("exports.token_file", exports.token_file)
            if hmac.compare_digest(self._token, self._peers):
                raise ConfigError(
                    f"exports.token_file: {exports.token_file} holds the token of api.token_file, "
                    "so whoever has it would be taken for a peer; "
                    f"run: (umask 077; openssl rand -hex 32 > {exports.token_file})"
                )

    def identify(self, request: web.Request) -> Caller:
        """Return who asks.

        Raises:
            Problem: 401; a TCP peer without the token.
        """
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if sock is None:  # it has gone already
            return Caller("gone", may_change=False)
        if sock.family == socket.AF_UNIX:
            return self._local(sock)
        return self._remote(request)

    def _local(self, sock: socket.socket) -> Caller:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(raw)
        allowed = uid in {0, os.geteuid()}
        if not allowed and self._group is not None:
            packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
            others = struct.unpack(f"{len(packed) // 4}I", packed)
            allowed = self._group in {gid, *others}
        return Caller(f"uid {uid}", may_change=allowed)

    def _remote(self, request: web.Request) -> Caller:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        token = given.strip().encode(errors="replace") if kind.lower() == "bearer" else b""
        if self._peers and hmac.compare_digest(token, self._peers):
            return Caller(f"peer {request.remote}", may_change=False, peer=True)
        right = bool(self._token) and hmac.compare_digest(token, self._token)
        if not right and self.is_key(given.strip()):
            return Caller(f"address {request.remote}", may_change=False)
        if not right:
            if request.path in PUBLIC:
                return Caller(f"address {request.remote}", may_change=False)
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "the token is missing or wrong; send it as: Authorization: Bearer TOKEN "
                "(it stands in the file that api.token_file names; a peer's in exports.token_file)",
                headers={"WWW-Authenticate": 'Bearer realm="tierd"'},
            )
        return Caller(f"address {request.remote}", may_change=True)

    def make_key(self) -> tuple[str, float] | None:
        """Return a key that reads and the Unix time when it ends; None where there is no token.

        It is made from the token, so it outlives the daemon and ends with the token.
        """
        if not self._token:
            return None
        ends = int(time.time()) + KEY_LASTS_S
        return f"{_KEY_PREFIX}{ends}.{self._sign(ends)}", float(ends)

    def is_key(self, given: str) -> bool:
        """Tell whether it is a key that was made here and has not ended."""
        ends, _, signature = given.removeprefix(_KEY_PREFIX).partition(".")
        if not self._token or not given.startswith(_KEY_PREFIX) or not ends.isascii():
            return False
        if not ends.isdecimal() or len(ends) > 12 or int(ends) < time.time():
            return False
        signed = self._sign(int(ends)).encode()
        return hmac.compare_digest(signature.encode(errors="replace"), signed)

    def _sign(self, ends: int) -> str:
        return hmac.new(self._token, f"tierd read {ends}".encode(), "sha256").hexdigest()


# Paths that need nothing on TCP: the dashboard's files, which say nothing of this daemon.
PUBLIC: set[str] = set()
ACCESS = web.AppKey("access", Access)


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find out who asks before anything else happens."""
    request[CALLER] = request.app[ACCESS].identify(request)
    return await handler(request)


def require(request: web.Request, *, changes: bool, peers: bool) -> None:
    """Refuse a change by somebody who may only read, and a peer whatever is not for peers.

    Raises:
        Problem: 403.
    """
    # The metrics listener asks nobody who they are, and has nothing that changes.
    caller = request.get(CALLER, Caller("anybody", may_change=False))
    if caller.peer and not peers:
        raise Problem(HTTPStatus.FORBIDDEN, "the token of exports opens /v1/exports alone")
    if changes and not caller.may_change and not caller.peer:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"{caller.name} may read but not change anything here; run as root, or join the "
            "group that api.admin_group names",
        )


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"api.admin_group: there is no group {name}; run: getent group") from None

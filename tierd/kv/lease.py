"""A lease of the node's host pool, asked of the daemon; it lives as long as its connection."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from tierd.errors import KvPoolError
from tierd.io import wire
from tierd.io.pool import PoolLayout, PoolView

if TYPE_CHECKING:
    from pathlib import Path

    from tierd.kv.shape import KvShape

TIMEOUT_S = 30.0


class PoolLease:
    """A part of the host pool.

    Attributes:
        number: the lease's name in REST and in the daemon's log.
        view: its pages; the memory stays when the daemon goes.
    """

    def __init__(self, sock: socket.socket, number: int, view: PoolView) -> None:
        self._sock = sock
        self.number = number
        self.view = view

    @classmethod
    def ask(cls, engine_socket: Path, shape: KvShape, tokens: int, *, engine: str) -> Self:
        """Lease room for so many tokens.

        Args:
            engine_socket: the daemon's engine socket.
            shape: of the KV cache.
            tokens: of all requests together, full context.
            engine: who asks, for people.

        Raises:
            KvPoolError: no daemon there, or it has no such room; its own words.
        """
        pages = shape.blocks(tokens)
        size = PoolLayout.bytes_for(pages, shape.layers, shape.block_bytes)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(engine_socket))
            wire.send(sock, {"op": "kv_lease", "engine": engine, "bytes": size})
            answer, fds = wire.receive(sock, fds_max=1)
            try:
                if not answer.get("ok"):
                    raise KvPoolError(str(answer.get("message") or "the daemon refused a KV lease"))
                view = PoolView(
                    fds[0], answer["offset"], answer["bytes"], layers=shape.layers,
                    block_bytes=shape.block_bytes,
                )  # fmt: skip
            finally:
                wire.close_all(fds)
        except OSError as error:
            sock.close()
            raise KvPoolError(
                f"{engine_socket}: no KV lease: {error.strerror or error}; "
                "run: systemctl start tierd"
            ) from None
        except BaseException:
            sock.close()
            raise
        return cls(sock, int(answer["lease"]), view)

    def close(self) -> None:
        """Give the lease back. Nothing may use its memory any more."""
        self._sock.close()

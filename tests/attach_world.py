"""An engine socket's server in a test's process, with a controller: no daemon is started."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from tierd.catalog import Catalog
from tierd.config import load
from tierd.daemon import claims
from tierd.daemon.attach import AttachServer
from tierd.daemon.plane import DataPlane
from tierd.daemon.steering import Steering
from tierd.io import wire

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 10.0


class World:
    """An engine socket's server and a controller in this process, without a daemon's loop."""

    def __init__(self, device: Path, directory: Path, **more: Any) -> None:
        overrides = {
            "daemon.runtime_dir": str(directory),
            "devices.paths": [str(device)],
            **more,
        }
        settings = load(environ={}, overrides=overrides).settings
        self.catalog = Catalog(directory / "catalog.db")
        self.plane = DataPlane.open(settings)
        self.server = AttachServer(settings, self.plane, self.catalog, boot_id="boot")
        self.path = settings.paths.engine_socket
        self.server.start(claims.Listener.open(self.path, socket.SOCK_SEQPACKET, mode=0o600))
        self.steering = Steering(settings.controller, self.plane, self.server, self.catalog)
        self.socks: list[socket.socket] = []

    async def attach(
        self, channel: Any, caches: list[dict[str, Any]], *, hear: bool = True
    ) -> dict[str, Any]:
        """Ask to attach all images; return the answer, its descriptors closed."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socks.append(sock)
        sock.connect(str(self.path))
        sock.settimeout(PATIENCE_S)
        images = [image.info for image in self.plane.images.values()]
        message = {
            "op": "attach", "abi": wire.ABI, "engine": "test", "rank": 0, "world": 1,
            "expected_ranks": 1, "caches": caches,
            "images": [
                {"image_id": f"{one.image_id:016x}", "generation": one.generation} for one in images
            ],
        }  # fmt: skip
        wire.send(sock, message, [channel.fd])
        if not hear:
            return {}
        found, fds = await asyncio.to_thread(wire.receive, sock)
        wire.close_all(fds)
        return found

    async def gone(self) -> None:
        """Close all connections and wait until the server has noticed."""
        for sock in self.socks:
            sock.close()
        self.socks.clear()
        while self.server.clients:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Wait until no session is left, of those too that had not attached."""
        while self.server._sessions:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """Take everything down."""
        await self.gone()
        await self.server.stop(0.0)
        self.plane.close()
        self.catalog.close()

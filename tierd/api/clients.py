"""GET /v1/clients: who is attached, and how each ring does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api import schemas
from tierd.api.common import DAEMON, moment, reply

if TYPE_CHECKING:
    from tierd.daemon.attach import AttachedClient

routes = web.RouteTableDef()


@routes.get("/v1/clients")
async def get_clients(request: web.Request) -> web.Response:
    """Answer with every attached client."""
    attached = request.app[DAEMON].attach.clients.values()
    return reply(schemas.Clients(clients=[_client(client) for client in attached]))


def _client(client: AttachedClient) -> schemas.Client:
    return schemas.Client(
        client=client.client_id,
        pid=client.pid,
        engine=client.engine,
        rank=client.rank,
        world=client.world,
        attached_at=moment(client.since),
        pump=client.attached.pump,
        channel_bytes=client.view.bytes,
        rings=[_ring(client, ring) for ring in range(len(client.view.rings))],
    )


def _ring(client: AttachedClient, ring: int) -> schemas.Ring:
    layout, stats = client.view.rings[ring], client.view.stats(ring)
    return schemas.Ring(
        image=client.attached.images[ring].info.name,
        rows_max=layout.rows_max,
        arena_pages=layout.arena_pages,
        server=client.view.server(ring),
        outstanding=client.view.outstanding(ring),
        hit_ratio=stats["hits"] / stats["lookups"] if stats["lookups"] else None,
        **stats,
    )

"""/v1/clients: who is attached, and how each ring does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.api import schemas
from tierd.api.common import moment
from tierd.api.routing import Call, Routes
from tierd.errors import NoClientError

if TYPE_CHECKING:
    from tierd.daemon.attach import AttachedClient

routes = Routes("clients", "Attached engine ranks.")


@routes.get("/v1/clients", schemas.Clients)
async def get_clients(call: Call) -> schemas.Clients:
    """Every attached client."""
    attached = call.daemon.attach.clients.values()
    return schemas.Clients(clients=[_client(client) for client in attached])


@routes.get("/v1/clients/{client}", schemas.Client)
async def get_client(call: Call) -> schemas.Client:
    """One client, by its id."""
    found = call.daemon.attach.clients.get(call.part("client"))
    if found is None:
        raise NoClientError(
            f"there is no client {call.part('client')[:40]!r} here; run: tierd status"
        )
    return _client(found)


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

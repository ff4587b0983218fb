"""GET /v1/clients: who is attached, and how each ring does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from tierd.api import schemas
from tierd.api.common import DAEMON, moment, reply

if TYPE_CHECKING:
    from collections.abc import Collection

    from tierd.daemon.attach import AttachedClient

routes = web.RouteTableDef()


@routes.get("/v1/clients")
async def get_clients(request: web.Request) -> web.Response:
    """Answer with every attached client."""
    attached = request.app[DAEMON].attach.clients.values()
    clients = [_client(client) for client in attached]
    return reply(schemas.Clients(clients=clients, engines=_engines(attached)))


def _engines(attached: Collection[AttachedClient]) -> list[schemas.Engine]:
    """Count ranks by engine: a rank that serves itself is one that is missing here."""
    by_name: dict[str, list[AttachedClient]] = {}
    for client in attached:
        by_name.setdefault(client.engine, []).append(client)
    engines = []
    for name, clients in sorted(by_name.items()):
        ranks = {client.rank for client in clients}
        expected = max(client.expected_ranks for client in clients)
        # Where a node has but a part of the ranks, nobody here knows which part.
        whole = all(client.expected_ranks == client.world for client in clients)
        engines.append(
            schemas.Engine(
                engine=name,
                attached_ranks=len(ranks),
                expected_ranks=expected,
                missing_ranks=sorted(set(range(expected)) - ranks) if whole else [],
            )
        )
    return engines


def _client(client: AttachedClient) -> schemas.Client:
    return schemas.Client(
        client=client.client_id,
        pid=client.pid,
        engine=client.engine,
        rank=client.rank,
        world=client.world,
        expected_ranks=client.expected_ranks,
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
        outstanding=client.view.outstanding(ring),
        hit_ratio=stats["hits"] / stats["lookups"] if stats["lookups"] else None,
        **stats,
    )

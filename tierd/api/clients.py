"""/v1/clients: who is attached, and how each ring does."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from tierd.api import schemas
from tierd.api.common import moment
from tierd.api.routing import Call, Routes
from tierd.errors import NoClientError

if TYPE_CHECKING:
    from collections.abc import Collection

    from tierd.daemon.attach import AttachedClient

routes = Routes("clients", "Attached engine ranks.")


@routes.get("/v1/clients", schemas.Clients)
async def get_clients(call: Call) -> schemas.Clients:
    """Every attached client, and how many ranks of how many each engine has attached."""
    attached = call.daemon.attach.clients.values()
    clients = [_client(client) for client in attached]
    return schemas.Clients(clients=clients, engines=_engines(attached))


@routes.get("/v1/clients/{client}", schemas.Client)
async def get_client(call: Call) -> schemas.Client:
    """One client, by its id."""
    found = call.daemon.attach.clients.get(call.part("client"))
    if found is None:
        raise NoClientError(
            f"there is no client {call.part('client')[:40]!r} here; run: tierd status"
        )
    return _client(found)


def _engines(attached: Collection[AttachedClient]) -> list[schemas.Engine]:
    """Count ranks by engine: a rank that serves itself is one that is missing here.

    Several servers of one engine and size are counted together, as many as the most frequent rank
    has copies.
    """
    by_name: dict[tuple[str, int], list[AttachedClient]] = {}
    for client in attached:
        by_name.setdefault((client.engine, client.world), []).append(client)
    engines = []
    for (name, _), clients in sorted(by_name.items()):
        ranks = collections.Counter(client.rank for client in clients)
        servers = max(ranks.values())
        expected = max(client.expected_ranks for client in clients)
        # Where a node has but a part of the ranks, nobody here knows which part.
        whole = all(client.expected_ranks == client.world for client in clients)
        missing = [rank for rank in range(expected) if ranks[rank] < servers]
        engines.append(
            schemas.Engine(
                engine=name,
                attached_ranks=len(clients),
                expected_ranks=expected * servers,
                missing_ranks=missing if whole else [],
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
        server=client.view.server(ring),
        outstanding=client.view.outstanding(ring),
        ways=client.view.ways(ring),
        hit_ratio=stats["hits"] / stats["lookups"] if stats["lookups"] else None,
        **stats,
    )

"""/v1/kv: the host pool of KV, who leases it, and what moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.api import schemas
from tierd.api.routing import Call, Routes

if TYPE_CHECKING:
    from tierd.daemon.kv import KvLeases
    from tierd.io.pool import Lease

routes = Routes("kv", "The host pool of KV (docs/kv.md).")


@routes.get("/v1/kv", schemas.Kv)
async def get_kv(call: Call) -> schemas.Kv:
    """The pool, its leases, and what their owners have counted."""
    leases = call.daemon.attach.kv
    return schemas.Kv(
        pool_bytes=leases.pool_bytes,
        free_bytes=leases.free_bytes,
        totals=_counters(leases.totals()),
        leases=[_lease(leases, lease) for lease in leases.leases()],
    )


def _lease(leases: KvLeases, lease: Lease) -> schemas.KvLease:
    return schemas.KvLease(
        lease=lease.number,
        owner=lease.owner,
        offset=lease.offset,
        bytes=lease.bytes,
        counters=_counters(leases.counters(lease.number)),
    )


def _counters(counted: dict[str, int]) -> schemas.KvCounters:
    steps, wanted, judged = (counted[name] for name in ("steps", "wanted", "judged"))
    return schemas.KvCounters(
        **counted,
        bytes_per_step=counted["bytes"] / steps if steps else None,
        resident_ratio=counted["hit"] / wanted if wanted else None,
        agreement_ratio=counted["agreed"] / judged if judged else None,
    )

"""Leases of the host KV pool: who has which part, and what its owner has counted.

An engine rank asks for a lease over the engine socket (docs/protocol.md) and has it for as long as
that connection lives. The daemon never touches the KV: it gives memory out, takes it back when
its owner goes, and adds up the counters that owners leave in their leases' heads.
"""

from __future__ import annotations

import asyncio
import collections
import os
from typing import TYPE_CHECKING, Annotated, Any

import structlog
from pydantic import BaseModel, Field, ValidationError

from tierd.errors import AttachError, KvPoolError
from tierd.io.pool import COUNTERS, HostPool

if TYPE_CHECKING:
    from tierd.io.pool import Lease

log = structlog.get_logger("tierd.daemon.kv")

# Counters that are levels: those of an owner that has gone say nothing any more.
LEVELS = frozenset({"requests", "sparse_requests", "pages_used"})


class LeaseRequest(BaseModel):
    """The kv_lease message; unknown keys are those of newer engines and are ignored."""

    engine: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[ -~]+$")]
    bytes: int = Field(ge=1, lt=1 << 48, strict=True)


class KvLeases:
    """The node's pool and its leases.

    Attributes:
        departed: counters of leases that are gone, added up.
    """

    def __init__(self, pool_bytes: int) -> None:
        """Make the pool; 0 bytes: none, and every lease is refused.

        Raises:
            KvPoolError: the system refuses a memfd of that size.
        """
        self._pool = HostPool(pool_bytes) if pool_bytes else None
        self.departed: collections.Counter[str] = collections.Counter()

    @property
    def pool_bytes(self) -> int:
        """Size of the pool."""
        return self._pool.bytes if self._pool else 0

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has leased."""
        return self._pool.free_bytes if self._pool else 0

    def leases(self) -> list[Lease]:
        """Return what is leased now."""
        return list(self._pool.leases.values()) if self._pool else []

    def counters(self, number: int) -> dict[str, int]:
        """Return what a lease's owner has counted."""
        assert self._pool is not None
        return self._pool.counters(number)

    def totals(self) -> dict[str, int]:
        """Return the sums over all leases since the daemon's start."""
        sums = collections.Counter(self.departed)
        for lease in self.leases():
            sums.update(self.counters(lease.number))
        return {name: sums[name] for name in COUNTERS}

    def grant(self, message: dict[str, Any], pid: int) -> tuple[Lease, dict[str, Any], list[int]]:
        """Answer a kv_lease message: the lease, the answer, and the memfd to send with it.

        Raises:
            AttachError: not such a message.
            KvPoolError: there is no pool, or it has no such part free.
        """
        try:
            request = LeaseRequest.model_validate(message)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise AttachError(f"kv_lease: {place}: {first['msg'].lower()}") from None
        if self._pool is None:
            raise KvPoolError("this daemon has no KV pool; set kv.pool_bytes and start it again")
        lease = self._pool.lease(request.bytes, f"{request.engine} (pid {pid})")
        log.info("kv leased", lease=lease.number, bytes=lease.bytes, owner=lease.owner)
        answer = {"ok": True, "lease": lease.number, "offset": lease.offset, "bytes": lease.bytes}
        return lease, answer, [os.dup(self._pool.fd)]

    async def release(self, lease: Lease) -> None:
        """Take a lease back; its memory goes to the system before anybody else may have it.

        What its owner counted is departed as soon as the lease is gone: sums never fall. A part
        whose memory the system does not take stays closed: its KV must not reach another engine.
        """
        assert self._pool is not None
        counted = self._pool.counters(lease.number)
        self._pool.withdraw(lease.number)
        self.departed.update({n: v for n, v in counted.items() if n not in LEVELS})
        try:
            await asyncio.to_thread(self._pool.punch, lease)
        except OSError as error:
            log.error("kv memory not returned", lease=lease.number, error=str(error))
            return
        self._pool.free(lease)
        log.info("kv released", lease=lease.number, owner=lease.owner)

    def close(self) -> None:
        """Let go of the pool; engines that have mapped it keep their memory."""
        if self._pool is not None:
            self._pool.close()

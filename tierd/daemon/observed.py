"""What the controller knows of one attached client: counters, samples and curves, per ring.

Counters and samples are read on the event loop (a copy of some kilobytes); curves are brought up to
date in a worker thread. A client's numbers are its own word: they steer advice, never a read.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tierd.controller.curves import RATE, CurveSampler, Phase, sampled

if TYPE_CHECKING:
    from tierd.daemon.attach import AttachedClient
    from tierd.types import RowSamples

_COUNTED = ("lookups", "hits", "misses", "bypasses", "steps", "late_steps", "stall_ns")
# Means follow the last few hundred steps.
MEAN_STEPS = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class RingLook:
    """One ring between two looks."""

    gained: dict[str, int]
    samples: RowSamples | None


@dataclasses.dataclass(slots=True)
class RingState:
    """What has become of one ring's looks.

    Attributes:
        sampler: live curves.
        steps: seen since the client attached.
        lookups, misses: per step, recent mean; misses are pages to read.
        stall_ms: per step, recent mean.
        stalled_ms: in all, since the last look.
        lost: samples that were overwritten before they were read.
        waiting: counted, of a step that has not ended.
    """

    sampler: CurveSampler
    steps: int = 0
    lookups: float = 0.0
    misses: float = 0.0
    stall_ms: float = 0.0
    stalled_ms: float = 0.0
    lost: int = 0
    waiting: dict[str, int] = dataclasses.field(default_factory=dict)

    def take(self, look: RingLook, half_life: float) -> None:
        """Take one look in.

        Args:
            look: what was counted and sampled.
            half_life: lookups after which the curves forget half.
        """
        self.stalled_ms = look.gained["stall_ns"] / 1e6
        # A look may fall between a step's lookups and its end: they wait for the step they are of.
        gained = {name: self.waiting.get(name, 0) + more for name, more in look.gained.items()}
        self.waiting = gained if gained["steps"] == 0 else {}
        if steps := gained["steps"]:
            self.steps += steps
            keep = min(0.5 ** (steps / MEAN_STEPS), 1 - steps / self.steps)
            self.lookups = keep * self.lookups + (1 - keep) * gained["lookups"] / steps
            missed = (gained["misses"] + gained["bypasses"]) / steps
            self.misses = keep * self.misses + (1 - keep) * missed
            stall = gained["stall_ns"] / 1e6 / steps
            self.stall_ms = keep * self.stall_ms + (1 - keep) * stall
        if look.samples is not None:
            self._sample(look.samples, look.gained["lookups"], half_life)

    def _sample(self, samples: RowSamples, lookups: int, half_life: float) -> None:
        """Feed the sampler, at no more than ``RATE``: that is what keeps its cost small."""
        rate = min(samples.rate, RATE)
        if rate <= 0:
            return
        if abs(rate - self.sampler.rate) > 1e-9:  # the client samples otherwise than before
            self.sampler = CurveSampler(rate=rate)
        self.sampler.half_life = max(half_life, 1.0)
        chosen = sampled(samples.rows, rate)
        rows, prefill = samples.rows[chosen], samples.prefill[chosen]
        self.lost += samples.lost
        # What was lost was looked up too, but nothing is known of it: it is as if it had not been.
        read = len(samples.rows) / max(len(samples.rows) + samples.lost, 1)
        total = max(len(rows), 1)
        # In the order of the lookups; a phase is a run of them.
        starts = np.flatnonzero(np.diff(prefill)) + 1
        for part, kind in zip(np.split(rows, starts), np.split(prefill, starts), strict=True):
            if not len(part):
                continue
            phase = Phase.PREFILL if kind[0] else Phase.DECODE
            self.sampler.add(part, lookups=lookups * read * len(part) / total, phase=phase)


class ClientWatch:
    """One client's rings, from look to look.

    Attributes:
        client: the client.
        rings: what has become of its looks, in ring order.
        ways: per ring, ways per set that the client says are in force; None where it says nothing.
    """

    def __init__(self, client: AttachedClient) -> None:
        self.client = client
        # Ring i reads image i; rings of hints, which come behind them, are no table's lookups.
        images = client.attached.images
        self.rings = [RingState(CurveSampler()) for _ in images]
        self.ways: list[int | None] = [None for _ in images]
        self._last = [dict.fromkeys(_COUNTED, 0) for _ in images]

    def look(self) -> list[RingLook]:
        """Read what happened since the last look; on the event loop, while the client is there."""
        self.ways = [self.client.view.ways(ring) for ring in range(len(self.rings))]
        looks = []
        for ring, last in enumerate(self._last):
            now = self.client.view.stats(ring)
            # A client that writes nonsense there gains nothing by it.
            gained = {name: max(0, now[name] - last[name]) for name in _COUNTED}
            self._last[ring] = now
            looks.append(RingLook(gained, self.client.view.read_samples(ring)))
        return looks

    def take(self, looks: list[RingLook], *, seconds: float, half_life_s: float) -> int:
        """Bring means and curves up to date; in a worker thread. Returns the steps gained."""
        for state, look in zip(self.rings, looks, strict=True):
            rate = look.gained["lookups"] / max(seconds, 1e-3)
            state.take(look, rate * half_life_s)
        return max((look.gained["steps"] for look in looks), default=0)

"""SIGHUP: which changes of the configuration take effect now, and which want a restart."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tierd import config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierd.config import Settings

# Everything else decides what was opened, bound or started when the daemon started.
LIVE = frozenset(
    {
        "daemon.drain_ms",
        "engine.expected_ranks",
        "channel.rows_max",
        "channel.arena_pages_max",
        "channel.clients_max",
        "io.scrub",
        "io.scrub_mib_s",
        "io.scrub_interval_h",
        "log.level",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Reload:
    """What a new configuration changes.

    Attributes:
        settings: the present ones with the live changes in them.
        changed: ``section.key`` that take effect.
        waiting: ``section.key`` that differ and take effect at the next start.
    """

    settings: Settings
    changed: list[str]
    waiting: list[str]


def compare(present: Settings, wanted: Settings) -> Reload:
    """Return what goes from one configuration to the other while the daemon runs."""
    before, after = config.in_force(present), config.in_force(wanted)
    differing = [key for key in after if after[key] != before[key]]
    changed = [key for key in differing if key in LIVE]
    waiting = [key for key in differing if key not in LIVE]
    return Reload(_merge(present, wanted, changed), changed, waiting)


def _merge(present: Settings, wanted: Settings, keys: Iterable[str]) -> Settings:
    sections: dict[str, dict[str, Any]] = {}
    for name in keys:
        section, key = name.split(".", 1)
        sections.setdefault(section, {})[key] = getattr(getattr(wanted, section), key)
    update = {
        section: getattr(present, section).model_copy(update=values)
        for section, values in sections.items()
    }
    return present.model_copy(update=update)

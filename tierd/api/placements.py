"""/v1/placements: where tables are read from, and the windows that the operator sets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import Field

from tierd.api import schemas, tiers
from tierd.api.common import EDITS
from tierd.api.jobs import ChangeQuery, Name
from tierd.api.parse import Body
from tierd.api.routing import Call, Routes

if TYPE_CHECKING:
    from tierd.daemon.served import ServedImage
    from tierd.daemon.service import Daemon

WINDOW_US_MAX = 10_000_000.0

routes = Routes("placements", "Where each table is read from, and by when.")


class Wanted(Body):
    """One table's new placement."""

    image: Name = Field(description="MODEL/TABLE.")
    window_us: float | None = Field(
        ge=0, le=WINDOW_US_MAX, description="Its window; null leaves it to the controller."
    )


class PlacementsEdit(Body):
    """Changes that are made together, or not at all."""

    placements: list[Wanted] = Field(min_length=1, max_length=256)


@routes.get("/v1/placements", schemas.Placements, tagged=True)
async def get_placements(call: Call) -> schemas.Placements:
    """Every table's placement."""
    return _all(call.daemon)


@routes.add(
    "PATCH",
    "/v1/placements",
    schemas.Placements,
    query=ChangeQuery,
    body=PlacementsEdit,
    tagged=True,
)
async def patch_placements(call: Call) -> schemas.Placements | schemas.DryRun:
    """Set windows of tables, all of them or none.

    They are kept on the devices; engines that attach from then on get them.
    """
    plane = call.daemon.plane
    async with call.request.app[EDITS]:
        call.require_match(_all(call.daemon))
        wanted = {one.image: one.window_us for one in call.body.placements}
        before = {}
        for name in wanted:
            image = plane.named(name)
            image.require_local()
            before[name] = image.window_us
        changed = {name: window for name, window in wanted.items() if window != before[name]}
        if call.query.dry_run:
            lines = [
                f"{name}: window {_us(before[name])} -> {_us(w)}" for name, w in changed.items()
            ]
            return schemas.DryRun(changes=lines)
        if changed:
            await asyncio.to_thread(plane.place, changed)
            call.daemon.catalog.record("placed", "", windows_us=changed)
        return _all(call.daemon)


def _all(daemon: Daemon) -> schemas.Placements:
    served = sorted(daemon.plane.images.values(), key=lambda image: image.info.name)
    return schemas.Placements(placements=[_placement(daemon, image) for image in served])


def _placement(daemon: Daemon, image: ServedImage) -> schemas.Placement:
    return schemas.Placement(
        image=image.info.name, tiers=tiers.answer(daemon, image), window_us=image.window_us
    )


def _us(window: float | None) -> str:
    return "none" if window is None else f"{window:g} us"

"""Where a table is read from, in order, and why in that order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.api import schemas

if TYPE_CHECKING:
    from tierd.daemon.dram import Held
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.remote_tiers import RemoteTier
    from tierd.daemon.served import ServedImage
    from tierd.daemon.service import Daemon


def answer(daemon: Daemon, image: ServedImage) -> list[schemas.Tier]:
    """Return a table's tiers; a page that fails in one is read from the next."""
    plane = daemon.plane
    disks = [
        schemas.Tier(
            tier="disk",
            devices=[store.device.path for store in each.stores],
            why="it lies on these devices" if number == 0 else "a copy",
        )
        for number, each in enumerate((image.striped, *image.copies))
        if image.local
    ]
    remotes = [_remote(plane, image, tier) for tier in image.remotes.values()]
    held = daemon.attach.dram.of(image)
    dram = [] if held is None else [_dram(held)]
    return [*dram, *remotes, *disks] if plane.remote_first else [*dram, *disks, *remotes]


def first(image: ServedImage, plane: DataPlane) -> str:
    """Return the kind of the tier that is read now."""
    linked = any(tier.linked for tier in image.remotes.values())
    return "remote" if not image.local or (linked and plane.remote_first) else "disk"


def _dram(held: Held) -> schemas.Tier:
    why = {
        "ready": "dram.images names it: GPUs that attach read it without a cache",
        "loading": f"loading: {held.loaded} of {held.image.info.pages} pages",
        "failed": f"away: {held.reason}",
    }
    return schemas.Tier(tier="dram", devices=[], why=why[held.state])


def _remote(plane: DataPlane, image: ServedImage, tier: RemoteTier) -> schemas.Tier:
    if not tier.linked:
        why = f"away: {tier.reason}"
    elif not image.local:
        why = "it lies on no device here"
    elif plane.remote_first:
        why = "remote.order is first: its memory answers before a disk does"
    else:
        why = "remote.order is last: it is read when every device here fails"
    if tier.linked and tier.reason:
        why = f"{why}; some of its reads are refused: {tier.reason}"
    return schemas.Tier(
        tier="remote",
        devices=[tier.peer],
        why=why,
        linked=tier.linked,
        read_us=tier.probe_us if tier.linked else None,
        read_pages=tier.probe_pages,
        transport=tier.transport,
        mtu=tier.mtu,
        gid=tier.gid,
    )

"""Tables in peers' memory, as the data plane keeps them: which of what a peer offers fits here.

An image fits a table here if it is the very same staging: id, generation and digest. One of a name
that nothing here has is adopted: a table that lies nowhere but at peers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tierd.io.extent_table import StoredImage
from tierd.io.store_set import StripedImage

if TYPE_CHECKING:
    from tierd.types import ImageInfo

NOT_REACHED = "the peer has not been reached yet"


@dataclasses.dataclass(eq=False, slots=True)
class RemoteTier:
    """One image at one peer, as a table's tier.

    Attributes:
        peer: as configured.
        devices: its number in each pump.
        seen: the peer has said whether it has the image.
        linked: the pumps can read from it.
        reason: why not; "" if they can.
        probe_us: how long reading ``probe_pages`` drawn pages took when it was linked.
        transport: how its bytes move.
        mtu, gid: what was agreed on; 0 and "" where the transport says nothing of them.
    """

    peer: str
    devices: list[int] = dataclasses.field(default_factory=list)
    seen: bool = False
    linked: bool = False
    reason: str = NOT_REACHED
    probe_us: float = 0.0
    probe_pages: int = 0
    transport: str = ""
    mtu: int = 0
    gid: str = ""


def nowhere_here(info: ImageInfo) -> StripedImage:
    """Return an image that no device of this node holds."""
    return StripedImage(StoredImage(info, (), "complete", ()), ())


def difference(here: ImageInfo, there: ImageInfo) -> str:
    """Say why the pages of one are not those of the other; "" if they are."""
    if here.generation != there.generation:
        return f"it has generation {there.generation} there, {here.generation} here"
    if here.digest != there.digest or here.fingerprint != there.fingerprint:
        return "it has other rows there than here, under the same id"
    if (here.pages, here.table.row_bytes) != (there.pages, there.table.row_bytes):
        return "it has another shape there than here"
    return ""

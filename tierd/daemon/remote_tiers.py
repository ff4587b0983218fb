"""Tables in peers' memory, as the data plane keeps them: which of what a peer offers fits here.

An image fits a table here if it is the very same staging: id, generation and digest. One of a name
that nothing here has is adopted: a table that lies nowhere but at peers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tierd.io import _core
from tierd.io.extent_table import StoredImage
from tierd.io.layout import Geometry
from tierd.io.store_set import StripedImage

if TYPE_CHECKING:
    from tierd.types import ImageInfo

NAME_MAX = 512
PAGES_MAX = 1 << 32
NO_NUMBER = (
    "a pump tells 256 places apart, this node's devices and the images at peers together, and they "
    "are used up; name fewer of remote.peers"
)
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


def strange(info: ImageInfo) -> str:
    """Say what keeps an image that a peer offers from being one; "" if nothing does.

    Its types were never looked at, and a pump makes tables of its sizes.
    """
    table = info.table
    numbers = [info.image_id, info.generation, info.pages, info.page_version]
    numbers += [table.rows, table.row_bytes, table.layer]
    texts = [info.model, table.name, info.digest, info.fingerprint]
    if not all(type(one) is int and one >= 0 for one in numbers):
        return "its numbers are none"
    if not all(
        isinstance(one, str) and len(one) <= NAME_MAX and one.isprintable() for one in texts
    ):
        return "its names are none"
    if info.image_id >= 1 << 64 or info.generation >= 1 << 32 or table.layer >= 1 << 16:
        return "its numbers are too large"
    if info.page_version > _core.PAGE_VERSION:
        return f"its pages have format {info.page_version}, this tierd reads {_core.PAGE_VERSION}"
    try:
        pages = Geometry.of(table.row_bytes, table.rows).pages
    except (TypeError, ValueError, ZeroDivisionError):
        pages = 0
    if pages != info.pages or not 0 < pages <= PAGES_MAX:
        return f"{table.rows} rows of {table.row_bytes} B do not take {info.pages} pages"
    return ""


def difference(here: ImageInfo, there: ImageInfo) -> str:
    """Say why the pages of one are not those of the other; "" if they are."""
    if here.generation != there.generation:
        return f"it has generation {there.generation} there, {here.generation} here"
    if here.digest != there.digest or here.fingerprint != there.fingerprint:
        return "it has other rows there than here, under the same id"
    if (here.pages, here.table.row_bytes) != (there.pages, there.table.row_bytes):
        return "it has another shape there than here"
    return ""

"""An image as the daemon serves it: its tiers, its leases, and where others are told it lies."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tierd.daemon.remote_tiers import RemoteTier
    from tierd.io.extent_table import Part, StoredImage
    from tierd.io.store import Store
    from tierd.io.store_set import StripedImage
    from tierd.types import ImageInfo

# Until a probe has measured them, windows are taken to grow by this much a layer: only their
# order matters to a pump, and deeper layers do read later.
LAYER_NS = 200_000
WINDOW_KEY = "window_us"  # in a placement on the device


@dataclasses.dataclass(slots=True, eq=False)
class ServedImage:
    """An image and where it lies.

    Attributes:
        striped: the image and the stores that hold it: its first tier.
        leases: descriptors; while one is open, its extents are not reused, and it is not deleted.
        copies: the same pages on other devices: its next tiers, in order.
        window_us: what the operator said that its window is; None leaves it to others.
        tables: its handle in each pump.
        clients: how many clients have attached it now.
        remotes: the same pages in peers' memory, by peer. An image that lies on no device here
            has a striped image without shares.
    """

    striped: StripedImage
    leases: list[int]
    copies: list[StripedImage] = dataclasses.field(default_factory=list)
    window_us: float | None = None
    tables: list[int] = dataclasses.field(default_factory=list)
    clients: int = 0
    remotes: dict[str, RemoteTier] = dataclasses.field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether devices here hold it."""
        return bool(self.striped.shares)

    @property
    def place(self) -> str:
        """Where its pages lie, for people."""
        return self.store.device.path if self.local else ", ".join(self.remotes)

    @property
    def info(self) -> ImageInfo:
        """What the home device's root says of it."""
        return self.striped.info

    @property
    def store(self) -> Store:
        """The store on its home device."""
        return self.striped.home

    @property
    def extents(self) -> int:
        """In how many contiguous runs its pages lie, on all its devices."""
        return sum(len(share.extents) for share in self.striped.shares)

    def require_local(self) -> None:
        """Refuse what can only be done where the image lies.

        Raises:
            ImageError: it lies at peers alone.
        """
        if not self.local:
            raise ImageError(
                f"image {self.info.name} lies on no device here but in the memory of {self.place}; "
                "do this there"
            )

    def lease(self) -> None:
        """Take the leases, for as long as a pump may read it."""
        for store, held in by_store([self]):
            self.leases.append(store.reader_fd(held))

    def release(self) -> None:
        """Give the leases up."""
        while self.leases:
            os.close(self.leases.pop())

    @property
    def window_ns(self) -> int:
        """Time from step start until its layer reads, as far as known."""
        if self.window_us is not None:
            return round(self.window_us * 1000)
        return (self.info.table.layer + 1) * LAYER_NS


def image_map(images: Sequence[ServedImage]) -> dict[str, Any]:
    """Return the image map of protocol.md."""
    return {
        "images": [
            {
                "image_id": f"{image.info.image_id:016x}",
                "generation": image.info.generation,
                "row_bytes": image.info.table.row_bytes,
                "rows": image.info.table.rows,
                "devices": _shares_json(image.striped),
                "copies": [_shares_json(copy) for copy in image.copies],
            }
            for image in images
        ]
    }


def placed_window_us(image: StripedImage) -> float | None:
    """Return the window in an image's placement, if the operator has set one."""
    if not image.shares:
        return None
    window = image.home.placements.get(image.name, {}).get(WINDOW_KEY)
    return float(window) if isinstance(window, int | float) else None


def _shares_json(image: StripedImage) -> list[dict[str, Any]]:
    return [
        {"uuid": share.uuid, "extents": image.extent_rows(index).tolist()}
        for index, share in enumerate(image.shares)
    ]


def by_store(images: Sequence[ServedImage]) -> list[tuple[Store, list[StoredImage | Part]]]:
    """Return the stores that hold these images and their copies, and what each holds of them."""
    found: dict[str, tuple[Store, list[StoredImage | Part]]] = {}
    tiers = [image.striped for image in images]
    tiers += [copy for image in images for copy in image.copies]
    for image in tiers:
        for share in image.shares:
            assert share.store is not None, "images that are served are whole"
            assert share.holding is not None, "and committed"
            found.setdefault(share.uuid, (share.store, []))[1].append(share.holding)
    return list(found.values())


def extent_array(image: StripedImage, devices: dict[str, int]) -> NDArray[np.uint64]:
    """Rows for the pump: uint64 [n, 4] of (page in the image, pages, device, device page)."""
    parts = []
    for index, share in enumerate(image.shares):
        rows = image.extent_rows(index)
        parts.append(np.insert(rows, 2, np.uint64(devices[share.uuid]), axis=1))
    rows = np.concatenate(parts)
    return np.ascontiguousarray(rows[np.argsort(rows[:, 0])])

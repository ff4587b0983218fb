"""The extent table: what a root names, and so what survives. Its data, its JSON, its checks.

docs/format.md describes every key. Version 1 of the format knew images of one device; what it
wrote is read as it is.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Self

from tierd.io.layout import UNIT_BYTES, Areas, occupied
from tierd.io.stripes import DEVICES_MAX, share_pages
from tierd.types import Extent, ImageInfo

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

    from tierd.io.superblock import Root

TABLE_FORMAT = "tierd extent table"


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The last (image id, generation) given to a name: the next one is a generation further.

    It outlives the image, so that pages of a deleted or half-staged image never pass for those
    of a later one of the same name.
    """

    image_id: int
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """What a device other than the home device holds of an image.

    Attributes:
        uuid: the device's.
        path: its name when the image was staged; for people, nothing relies on it.
        extents: in local page numbers (:mod:`tierd.io.stripes`).
    """

    uuid: str
    path: str
    extents: tuple[Extent, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredImage:
    """An image as the home device's extent table names it.

    Attributes:
        info: the manifest.
        extents: its pages on the home device, in local page numbers, sorted.
        state: ``complete``; anything else is not served.
        devices: UUIDs of all devices that hold a part of it, the home device first.
        members: the others, in that order.
    """

    info: ImageInfo
    extents: tuple[Extent, ...]
    state: str
    devices: tuple[str, ...]
    members: tuple[Member, ...] = ()

    @property
    def name(self) -> str:
        """``model/table``."""
        return self.info.name

    @property
    def identity(self) -> tuple[int, int]:
        """(image id, generation)."""
        return self.info.image_id, self.info.generation


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Extents here of an image whose home is another device.

    They count only if the home's root names this device and these extents for the same image and
    generation; without its home a part is kept as it is.
    """

    image_id: int
    generation: int
    home: str
    extents: tuple[Extent, ...]
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Wipe:
    """Extents here of a deleted image that are not free before zeroes are seen in them.

    Attributes:
        name: the image's, as it was.
        image_id: of its identity; ``generation`` is the rest of it.
        devices: UUIDs of all devices that held a part of the image, its home first.
        extents: in local page numbers.
    """

    name: str
    image_id: int
    generation: int
    devices: tuple[str, ...]
    extents: tuple[Extent, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ExtentTable:
    """What a root names: everything that must survive, by name."""

    images: dict[str, StoredImage] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    placements: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    identities: dict[str, Identity] = dataclasses.field(default_factory=dict)
    wipes: tuple[Wipe, ...] = ()

    def all_extents(self) -> Iterator[Extent]:
        """Every extent in use on this device."""
        for image in self.images.values():
            yield from image.extents
        for part in self.parts:
            yield from part.extents
        for wipe in self.wipes:
            yield from wipe.extents

    def pack(self, ident: uuid.UUID, sequence: int) -> bytes:
        """Return the table's JSON; uuid and sequence tie it to its root."""
        document = {
            "format": TABLE_FORMAT,
            "uuid": str(ident),
            "sequence": sequence,
            "images": [_image_json(image) for _, image in sorted(self.images.items())],
            "parts": [_part_json(part) for part in self.parts],
            "placements": self.placements,
            "identities": {
                name: {"image_id": f"{identity.image_id:016x}", "generation": identity.generation}
                for name, identity in sorted(self.identities.items())
            },
            "wipes": [_wipe_json(wipe) for wipe in self.wipes],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes, root: Root) -> Self:
        """Read and check a table; ValueError, KeyError or TypeError if it makes no sense."""
        document = json.loads(data)
        if document["uuid"] != str(root.uuid) or document["sequence"] != root.sequence:
            raise ValueError("it belongs to another root")
        images = {image.name: image for image in map(_image, document["images"])}
        parts = tuple(map(_part, document["parts"]))
        identities = {
            str(name): Identity(int(entry["image_id"], 16), int(entry["generation"]))
            for name, entry in document["identities"].items()
        }
        wipes = tuple(map(_wipe, document.get("wipes", ())))
        table = cls(images, parts, dict(document["placements"]), identities, wipes)
        table.check(root)
        return table

    def check(self, root: Root) -> None:
        """Raise ValueError if extents leave the data area, overlap, or do not cover their image."""
        areas = Areas.of(root.device_bytes)
        position = 0
        for start, end in sorted(occupied(extent) for extent in self.all_extents()):
            if start % UNIT_BYTES or start < areas.data_start or end > areas.data_end:
                raise ValueError(f"an extent at byte {start} lies outside the data area")
            if start < position:
                raise ValueError(f"two extents overlap at byte {start}")
            position = end
        for image in self.images.values():
            _check_cover(image, str(root.uuid))


def _check_cover(image: StoredImage, home: str) -> None:
    devices = (home, *(member.uuid for member in image.members))
    if image.devices != devices or len(set(devices)) != len(devices) or len(devices) > DEVICES_MAX:
        raise ValueError(f"{image.name} names its devices twice, or others than its members")
    shares = (image.extents, *(member.extents for member in image.members))
    for index, extents in enumerate(shares):
        page = 0
        for extent in extents:
            if extent.pages <= 0 or extent.first_page < page:
                raise ValueError(f"extents of {image.name} are out of order")
            if extent.first_page != page:
                raise ValueError(f"page {page} of {image.name} is in no extent")
            page = extent.first_page + extent.pages
        expected = share_pages(image.info.pages, index, len(shares))
        if page != expected:
            raise ValueError(f"extents of {image.name} hold {page} pages, not {expected}")


def _image_json(image: StoredImage) -> dict[str, Any]:
    return {
        "info": image.info.to_json(),
        "state": image.state,
        "devices": list(image.devices),
        "extents": _rows(image.extents),
        "members": [
            {"uuid": member.uuid, "path": member.path, "extents": _rows(member.extents)}
            for member in image.members
        ],
    }


def _image(entry: dict[str, Any]) -> StoredImage:
    members = tuple(
        Member(str(member["uuid"]), str(member["path"]), _extents(member["extents"]))
        for member in entry.get("members", ())
    )
    return StoredImage(
        ImageInfo.from_json(entry["info"]),
        _extents(entry["extents"]),
        str(entry["state"]),
        tuple(map(str, entry["devices"])),
        members,
    )


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "image_id": f"{part.image_id:016x}",
        "generation": part.generation,
        "name": part.name,
        "home": part.home,
        "extents": _rows(part.extents),
    }


def _part(entry: dict[str, Any]) -> Part:
    return Part(
        int(entry["image_id"], 16),
        int(entry["generation"]),
        str(entry["home"]),
        _extents(entry["extents"]),
        str(entry.get("name", "")),
    )


def _wipe_json(wipe: Wipe) -> dict[str, Any]:
    return {
        "name": wipe.name,
        "image_id": f"{wipe.image_id:016x}",
        "generation": wipe.generation,
        "devices": list(wipe.devices),
        "extents": _rows(wipe.extents),
    }


def _wipe(entry: dict[str, Any]) -> Wipe:
    return Wipe(
        str(entry["name"]),
        int(entry["image_id"], 16),
        int(entry["generation"]),
        tuple(map(str, entry["devices"])),
        _extents(entry["extents"]),
    )


def _rows(extents: tuple[Extent, ...]) -> list[tuple[int, int, int]]:
    return [(extent.first_page, extent.pages, extent.device_page) for extent in extents]


def _extents(rows: list[list[int]]) -> tuple[Extent, ...]:
    return tuple(Extent(int(first), int(pages), int(where)) for first, pages, where in rows)

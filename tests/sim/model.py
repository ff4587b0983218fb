"""What must hold: the states a store may be in, and what an image's pages must be."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.io import _core, layout
from tierd.io.device import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tests.sim.pool import Source
    from tierd.io.store_set import StoreSet, StripedImage
    from tierd.types import TableSpec


class Violation(AssertionError):  # noqa: N818 - it is not an error of the simulator
    """Something that must hold does not.

    Attributes:
        kind: wrong_row, hang, leak, durability, refusal or silence.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclasses.dataclass(eq=False)
class Known:
    """An image as the model knows it.

    Attributes:
        rows: what was staged, uint8 [rows, row_bytes].
        identity: (image id, generation), learnt when the image is first seen.
    """

    source: Source
    spec: TableSpec
    identity: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.source.model}/{self.spec.name}"

    @property
    def rows(self) -> NDArray[np.uint8]:
        return self.source.rows[self.spec.name]


@dataclasses.dataclass(frozen=True)
class State:
    """Everything that a root names; replaced, never changed."""

    images: dict[str, Known] = dataclasses.field(default_factory=dict)
    placements: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def with_image(self, known: Known) -> State:
        return State({**self.images, known.name: known}, self.placements)

    def without(self, name: str) -> State:
        return State(_dropped(self.images, name), _dropped(self.placements, name))

    def with_placement(self, name: str, placement: dict[str, Any] | None) -> State:
        placements = _dropped(self.placements, name)
        if placement is not None:
            placements[name] = placement
        return State(self.images, placements)

    def fits(self, stores: StoreSet) -> bool:
        """Whether the stores together say the same, by name, table and identity."""
        found = {image.name: image for image in stores.images}
        placements = {n: p for store in stores.stores for n, p in store.placements.items()}
        if set(found) != set(self.images) or placements != self.placements:
            return False
        if len(found) != len(stores.images):
            return False  # one name on two homes
        return all(_same(self.images[name], image) for name, image in found.items())


def _dropped(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != name}


def _same(known: Known, image: StripedImage) -> bool:
    info = image.info
    return (
        image.stored.state == "complete"
        and not image.fault
        and info.table == known.spec
        and (info.fingerprint == known.source.fingerprints[known.spec.name])
        and known.identity in (None, (info.image_id, info.generation))
    )


@dataclasses.dataclass
class SetModel:
    """What the devices of one set may hold together.

    Attributes:
        state: what it holds, if nothing is in doubt.
        doubt: what else it may hold after a change that was cut off or failed.
        history: every state since the devices were formatted; damage may bring an older one back.
        used: identities seen under each name; none may be given out again.
        devices: UUIDs of the devices of each image, its home first.
        marks: scars in roots and tables when the last whole change succeeded.
    """

    state: State = dataclasses.field(default_factory=State)
    doubt: list[State] = dataclasses.field(default_factory=list)
    history: list[State] = dataclasses.field(default_factory=list)
    used: dict[str, set[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    devices: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    marks: int = 0

    def candidates(self) -> list[State]:
        return [self.state, *self.doubt]

    def settle(self, state: State) -> None:
        """Nothing is in doubt any more."""
        passed = [doubtful is state for doubtful in self.doubt]
        if any(passed):
            self.history += self.doubt[: passed.index(True)]
        self.state = state
        self.doubt = []
        if not self.history or self.history[-1] is not state:
            self.history.append(state)


# --- pages ---------------------------------------------------------------------------------------


def packed(known: Known) -> NDArray[np.uint8]:
    """The pages of an image, uint8 [pages, 4096], as the core packs them."""
    assert known.identity is not None
    rows = known.rows
    count = -(-len(rows) // int(_core.rows_per_page(rows.shape[1])))
    pages = np.empty(count * PAGE_BYTES, np.uint8)
    flat = np.ascontiguousarray(rows).reshape(-1)
    _core.pack_pages(flat, rows.shape[1], 0, *known.identity, pages)
    return pages.reshape(count, PAGE_BYTES)


def right_pages(known: Known, pages: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which pages hold the rows and the trailer that they must, by this test's own reading."""
    assert known.identity is not None
    rows = known.rows
    row_bytes = rows.shape[1]
    stride = -(-row_bytes // 4) * 4
    per_page = (PAGE_BYTES - 32) // (stride + 4)
    padded = np.zeros((len(pages) * per_page, row_bytes), np.uint8)
    padded[: len(rows)] = rows
    found = pages[:, : per_page * stride].reshape(len(pages), per_page, stride)[:, :, :row_bytes]
    right = (found == padded.reshape(len(pages), per_page, row_bytes)).all(axis=(1, 2))
    for number in np.flatnonzero(right):
        right[number] = pages[number, -32:-4].tobytes() == trailer_of(known, int(number))
    return right


def trailer_of(known: Known, page: int) -> bytes:
    """The 28 bytes before a page's checksum."""
    assert known.identity is not None
    per_page = (PAGE_BYTES - 32) // (-(-known.rows.shape[1] // 4) * 4 + 4)
    count = min(per_page, len(known.rows) - page * per_page)
    image_id, generation = known.identity
    return struct.pack("<IHHQQI", 0x50445254, 1, count, image_id, page, generation)


def places(image: StripedImage) -> Iterator[tuple[int, str, int]]:
    """(page of the image, path of the device, page of that device) for every page."""
    count = len(image.shares)
    for index, share in enumerate(image.shares):
        for extent in share.extents:
            for local in range(extent.first_page, extent.first_page + extent.pages):
                page = local
                if count > 1:
                    unit, into = divmod(local, layout.UNIT_PAGES)
                    page = (unit * count + index) * layout.UNIT_PAGES + into
                yield page, share.path, extent.device_page + local - extent.first_page

"""Bugs planted in the storage code, by replacing one of its functions.

Each function is a mutant: it returns a context in which the bug is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import types
from typing import TYPE_CHECKING, Any

from tests.patched import replaced
from tierd.io import (
    _core,
    blocks,
    layout,
    scrub,
    simulated,
    staging,
    store,
    stripes,
    superblock,
    walker,
)
from tierd.io.simulated import SimulatedDevice
from tierd.io.store import Store
from tierd.io.store_set import StoreSet, StripedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(replaced(owner, name, value))
        yield


def no_flush_at_all() -> Any:
    return _patched((SimulatedDevice, "flush", lambda _: None))


def no_flush_before_the_root() -> Any:
    def commit(device: Any, root: Any, data: bytes) -> None:
        device.write(root.table_offset, _padded(data))
        device.write(superblock.ROOT_OFFSETS[root.slot], root.pack())
        device.flush()

    return _patched((superblock, "store", commit))


def root_before_table() -> Any:
    def commit(device: Any, root: Any, data: bytes) -> None:
        for offset, part in (
            (superblock.ROOT_OFFSETS[root.slot], root.pack()),
            (root.table_offset, _padded(data)),
        ):
            device.write(offset, part)
            device.flush()

    return _patched((superblock, "store", commit))


def both_roots_at_once() -> Any:
    def commit(device: Any, root: Any, data: bytes) -> None:
        device.write(root.table_offset, _padded(data))
        device.flush()
        for slot in (0, 1):
            both = dataclasses.replace(root, slot=slot)
            device.write(superblock.ROOT_OFFSETS[slot], both.pack())
        device.flush()

    return _patched((superblock, "store", commit))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4096)


def oldest_root_chosen() -> Any:
    def backwards(items: Any, key: Any = None) -> list[Any]:
        found = sorted(items, key=key)
        return found[::-1] if found and isinstance(found[0], superblock.Root) else found

    superblock.sorted = sorted  # type: ignore[attr-defined]
    return _patched((superblock, "sorted", backwards))


def one_root_slot() -> Any:
    change = dataclasses.replace

    def replace(item: Any, **changes: Any) -> Any:
        if "slot" in changes:
            changes["slot"] = item.slot
        return change(item, **changes)

    shim = types.SimpleNamespace(**vars(dataclasses))
    shim.replace = replace
    return _patched((store, "dataclasses", shim))


def root_crc_unchecked() -> Any:
    unpack = superblock.Root.unpack.__func__  # type: ignore[attr-defined]

    def trusting(cls: Any, data: bytes, slot: int) -> Any:
        return unpack(cls, data[:-4] + struct.pack("<I", superblock.crc(data[:-4])), slot)

    return _patched((superblock.Root, "unpack", classmethod(trusting)))


def table_crc_unchecked() -> Any:
    unpack = superblock.Root.unpack.__func__  # type: ignore[attr-defined]

    class Anything(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    def trusting(cls: Any, data: bytes, slot: int) -> Any:
        found = unpack(cls, data, slot)
        if isinstance(found, str):
            return found
        return dataclasses.replace(found, table_crc=Anything(found.table_crc))

    return _patched((superblock.Root, "unpack", classmethod(trusting)))


def roots_looked_at_once() -> Any:
    return _patched((superblock, "_READS", 1), (superblock, "_LOOKS", 1))


def commit_not_read_back() -> Any:
    def write(device: Any, offset: int, data: Any) -> None:
        device.write(offset, data)
        device.flush()

    return _patched((superblock, "_write_surely", write))


def no_flush_at_open() -> Any:
    original = Store._open.__func__  # type: ignore[attr-defined]

    def opened(cls: Any, device: Any) -> Any:
        device.flush = lambda: None
        try:
            return original(cls, device)
        finally:
            del device.flush

    return _patched((Store, "_open", classmethod(opened)))


def commit_before_the_data() -> Any:
    late: list[tuple[int, bytes]] = []
    write_pages, commit = staging._Stager._write, Store.commit_image

    def put_off(self: Any, *arguments: Any) -> str:
        device = self._stores.stores[0].device
        device.write = lambda offset, data: late.append((offset, bytes(data)))
        try:
            return write_pages(self, *arguments)
        finally:
            del device.write

    def commit_first(self: Any, *arguments: Any, **options: Any) -> Any:
        image = commit(self, *arguments, **options)
        for offset, data in late:
            self.device.write(offset, data)
        late.clear()
        self.device.flush()
        return image

    return _patched(
        (staging._Stager, "_write", put_off),
        (staging._Stager, "_read_back", lambda *_: None),
        (Store, "commit_image", commit_first),
    )


def generation_not_bumped() -> Any:
    original = Store._next_identity

    def same(self: Any, name: str) -> Any:
        return self._table.identities.get(name) or original(self, name)

    return _patched((Store, "_next_identity", same))


def extents_dropped_before_the_commit() -> Any:
    original = Store.delete_image

    def delete(self: Any, name: str, **options: Any) -> None:
        image = self.image(name)
        if not self.is_leased(image.extents):
            self._discard(image.extents)
        original(self, name, **options)

    return _patched((Store, "delete_image", delete))


def leases_ignored() -> Any:
    return _patched((SimulatedDevice, "leased_ranges", lambda *_: []))


def pages_reused_early() -> Any:
    def free(areas: Any, used: Any) -> Any:
        used = sorted(used)  # the last extent is taken for free
        return layout.free_ranges(areas, used[:-1])

    return _patched((store, "free_ranges", free))


def extents_never_released() -> Any:
    return _patched((Store, "release", lambda *_: None))


def second_writer_let_in() -> Any:
    def open_shared(path: str, *_: Any) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    return _patched((simulated, "open_exclusive", open_shared))


def verification_without_crc() -> Any:
    def check(*arguments: Any) -> int:
        *head, _, tags, found = arguments
        return int(_core.check_pages(*head, False, tags, found))

    shim = types.SimpleNamespace(**{n: getattr(_core, n) for n in dir(_core)})
    shim.check_pages = check
    return _patched((blocks, "_core", shim))


def lease_of_a_verification_kept() -> Any:
    shim = types.SimpleNamespace(**vars(os))
    shim.close = lambda _: None
    return _patched((walker, "os", shim))


# --- several devices -----------------------------------------------------------------------------


def member_counted_without_the_homes_root() -> Any:
    return _patched((StoreSet, "reclaim", lambda _: []))


def home_written_before_its_members() -> Any:
    original = StoreSet.commit

    def commit(self: Any, info: Any, shares: Any, **options: Any) -> Any:
        late: list[tuple[Any, Any]] = []
        with _patched((Store, "add_part", lambda *arguments: late.append(arguments))):
            image = original(self, info, shares, **options)
        for member, part in late:
            member.add_part(part)
        return image

    return _patched((StoreSet, "commit", commit))


def leftover_reclaimed_while_the_home_is_away() -> Any:
    original = StoreSet.reclaim

    def reclaim(self: Any) -> Any:
        here = {one.uuid for one in self.stores}
        for one in self.stores:
            one.drop_parts([part for part in one.parts if part.home not in here])
        return original(self)

    return _patched((StoreSet, "reclaim", reclaim))


def image_without_a_device_called_whole() -> Any:
    return _patched(
        (StripedImage, "fault", property(lambda _: "")),
        (StripedImage, "require_whole", lambda _: None),
    )


def devices_known_by_their_place() -> Any:
    original = StoreSet._share

    def share(self: Any, home: Any, image: Any, member: Any) -> Any:
        others = [one for one in self.stores if one is not home]
        place = image.members.index(member)
        if place < len(others):
            found = original(self, home, image, member)
            return dataclasses.replace(found, store=others[place], path=others[place].device.path)
        return original(self, home, image, member)

    return _patched((StoreSet, "_share", share))


def two_units_changed_round_for_the_pump() -> Any:
    original = stripes.image_rows

    def changed(extents: Any, index: int, count: int) -> Any:
        rows = original(extents, index, count)
        if count > 1 and len(rows) > 1:
            rows[[0, 1], 2] = rows[[1, 0], 2]
        return rows

    return _patched((stripes, "image_rows", changed))


def scrub_goes_on_a_block_too_far() -> Any:
    original = scrub.Scrub._load

    def load(self: Any) -> None:
        original(self)
        if self.next_page:
            self.next_page += scrub.BLOCK_PAGES

    return _patched((scrub.Scrub, "_load", load))


def scrub_goes_on_in_another_image() -> Any:
    return _patched((scrub, "_key", lambda image: str(image.info.table.name)))


def wipe_of_the_home_alone() -> Any:
    original = StoreSet._drop_parts

    def drop(self: Any, home: Any, image: Any, *, wipe: bool = False) -> None:
        del wipe
        original(self, home, image)

    return _patched((StoreSet, "_drop_parts", drop))


def wipe_that_writes_nothing() -> Any:
    return _patched((Store, "_overwrite", lambda self, extents: None))


STORAGE_MUTANTS: tuple[Callable[[], Any], ...] = (
    no_flush_at_all,
    no_flush_before_the_root,
    root_before_table,
    both_roots_at_once,
    oldest_root_chosen,
    one_root_slot,
    root_crc_unchecked,
    table_crc_unchecked,
    roots_looked_at_once,
    commit_not_read_back,
    no_flush_at_open,
    commit_before_the_data,
    generation_not_bumped,
    extents_dropped_before_the_commit,
    leases_ignored,
    pages_reused_early,
    extents_never_released,
    second_writer_let_in,
    verification_without_crc,
    lease_of_a_verification_kept,
    member_counted_without_the_homes_root,
    home_written_before_its_members,
    leftover_reclaimed_while_the_home_is_away,
    image_without_a_device_called_whole,
    devices_known_by_their_place,
    two_units_changed_round_for_the_pump,
    scrub_goes_on_a_block_too_far,
    scrub_goes_on_in_another_image,
    wipe_of_the_home_alone,
    wipe_that_writes_nothing,
)

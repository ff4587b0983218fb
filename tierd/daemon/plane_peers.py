"""What the data plane does with peers: the tables that they have as well, or alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from tierd.daemon.remote_tiers import NO_NUMBER, RemoteTier, difference, nowhere_here
from tierd.daemon.served import ServedImage
from tierd.errors import TierdError

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from tierd.types import ImageInfo

log = structlog.get_logger("tierd.daemon.plane")


class PeerTables:
    """The part of :class:`tierd.daemon.plane.DataPlane` that peers' threads call."""

    images: dict[int, ServedImage]
    pumps: list[Any]
    _lock: threading.Lock
    _retired: list[ServedImage]
    _adopted: dict[int, ServedImage]

    def _add_table(self, number: int, image: ServedImage) -> None:
        raise NotImplementedError

    def _drop_retired(self) -> None:
        raise NotImplementedError

    def remote_tiers(self, peer: str, offered: Sequence[ImageInfo]) -> dict[int, list[RemoteTier]]:
        """Return, by image id, the tiers that what a peer offers can become.

        A table of a name that nothing here has is served from now on, from peers alone. Why
        something does not fit stands in its tier's ``reason``. Tables that were replaced have
        tiers as well, for the engines that have attached them.
        """
        with self._lock:
            for info in offered:
                self._adopt(info)
            self._drop_retired()
            by_id = {info.image_id: info for info in offered}
            found: dict[int, list[RemoteTier]] = {}
            for image in [*self.images.values(), *self._retired]:
                tier = image.remotes.get(peer)
                if tier is None:
                    continue
                there = by_id.get(image.info.image_id)
                tier.seen = True
                tier.reason = "the peer does not export it"
                if len(tier.devices) < len(self.pumps):
                    tier.reason = NO_NUMBER
                elif there is not None:
                    tier.reason = difference(image.info, there)
                if not tier.reason:
                    found.setdefault(image.info.image_id, []).append(tier)
            return found

    def _adopt(self, info: ImageInfo) -> None:
        known = self.images.get(info.image_id)
        if known is not None:
            linked = any(tier.linked for tier in known.remotes.values())
            if known.local or linked or not difference(known.info, info):
                return
        elif info.name in {image.info.name for image in self.images.values()}:
            return  # another staging of it is served here
        image = ServedImage(nowhere_here(info), [])
        try:
            for number in range(len(self.pumps)):
                self._add_table(number, image)
        except (TierdError, ValueError, TypeError) as error:
            for pump, table in zip(self.pumps, image.tables, strict=False):
                pump.remove_table(table)
            self._forget_remotes(image)
            log.warning("an image of a peer is not taken", image=info.name, reason=str(error))
            return
        if known is not None:
            self._retired.append(known)
        self._adopted[info.image_id] = image
        self.images = {**self.images, info.image_id: image}

    def link_peer(self, links: Sequence[Any], usable: Sequence[tuple[RemoteTier, Any]]) -> bool:
        """Let each pump read these tiers through its link; False if one failed meanwhile."""
        with self._lock:
            # Of an image that has gone meanwhile, another image may have the numbers.
            known = {id(tier) for tier in self._every_tier()}
            current = [(tier, places) for tier, places in usable if id(tier) in known]
            whole = all(
                pump.link_remote(link, {tier.devices[n]: places for tier, places in current})
                for n, (pump, link) in enumerate(zip(self.pumps, links, strict=True))
            )
            for tier, _ in current:
                tier.linked = whole
        return whole

    def unlink_peer(self, peer: str, links: Sequence[Any], why: str) -> None:
        """End a peer's links: its tiers are away."""
        with self._lock:
            for pump, link in zip(self.pumps, links, strict=False):
                pump.drop_link(link, why)
            for tier in self._every_tier():
                if tier.peer == peer and tier.linked:
                    tier.linked, tier.reason = False, why

    def note_trouble(self, peer: str, trouble: str) -> None:
        """Tell, or no longer, that some of what a peer's tiers are read into is refused."""
        with self._lock:
            for tier in self._every_tier():
                if tier.peer == peer and tier.linked:
                    tier.reason = trouble

    def _every_tier(self) -> list[RemoteTier]:
        images = [*self.images.values(), *self._retired]
        return [tier for image in images for tier in image.remotes.values()]

    def read_from(self, peer: str) -> list[str]:
        """Return the names of the images that are read from a peer now."""
        # Without the lock: an image whose tables are being made has no tiers yet.
        linked = [i for i in self.images.values() if (t := i.remotes.get(peer)) and t.linked]
        return sorted(image.info.name for image in linked)

    def remote_wanted(self, peer: str) -> bool:
        """Whether there are images that the peer has not been asked for yet."""
        tiers = [image.remotes.get(peer) for image in self.images.values()]
        return any(tier is not None and not tier.seen for tier in tiers)

    def _remove_remotes(self, number: int, image: ServedImage) -> None:
        """Give a pump's numbers of an image's remote tiers back."""
        for tier in image.remotes.values():
            for device in tier.devices[number:]:
                self.pumps[number].remove_device(device)
            del tier.devices[number:]

    def _forget_remotes(self, image: ServedImage) -> None:
        for number in reversed(range(len(self.pumps))):
            self._remove_remotes(number, image)

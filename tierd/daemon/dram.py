"""Images in this node's memory, which engines on GPUs map and read without asking anybody.

A thread keeps what is in memory in step with what is served: it loads new images, and gives up
those that were staged anew or deleted. Who has mapped one keeps it; the generation in every row's
tag says which it is. An engine that attaches before its image is there reads from the next tier.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import time
from typing import TYPE_CHECKING

import structlog

from tierd.daemon.keeper import LOOK_S, Keeper, same_staging
from tierd.errors import TierdError
from tierd.io.shared_image import SharedImage

if TYPE_CHECKING:
    from tierd.config.dram import DramSection
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.served import ServedImage

log = structlog.get_logger("tierd.daemon.dram")


@dataclasses.dataclass(eq=False)
class Held:
    """One image in memory, or on the way.

    Attributes:
        state: loading, ready or failed.
        reason: why it failed; "".
        loaded: pages in memory.
        memory: None before there is any, and after a failure.
    """

    image: ServedImage
    state: str = "loading"
    reason: str = ""
    loaded: int = 0
    memory: SharedImage | None = None

    def close(self) -> None:
        """Give the memory up."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()


class DramImages(Keeper):
    """What this daemon keeps in memory for engines."""

    def __init__(self, settings: DramSection, plane: DataPlane) -> None:
        super().__init__("tierd-dram", settings.images, plane)
        self._held: dict[int, Held] = {}

    def stop(self) -> None:
        """Give everything up. Idempotent."""
        self._end_thread()
        with self._lock:
            given_up = list(self._held.values())
            self._held.clear()
        for held in given_up:
            held.close()

    def _run(self) -> None:
        served = [image.info.name for image in list(self._plane.images.values())]
        for pattern in self.patterns:
            if not fnmatch.filter(served, pattern):
                log.warning("dram.images names no image that is served", pattern=pattern)
        while not self._stop.is_set():
            self.look()
            self._stop.wait(LOOK_S)

    def look(self) -> None:
        """Give up what is not served any more, and load what is new."""
        wanted = self.chosen()
        with self._lock:
            given_up = [
                self._held.pop(number)
                for number, held in list(self._held.items())
                if not same_staging(wanted.get(number), held.image)
            ]
        # Outside the lock, which attaching engines wait for: freeing 100 GiB takes seconds.
        for held in given_up:
            log.info("no longer in memory", image=held.image.info.name)
            held.close()
        for number, image in wanted.items():
            if number not in self._held and not self._stop.is_set():
                self._load(image)

    def _load(self, image: ServedImage) -> None:
        held = Held(image)
        with self._lock:
            self._held[image.info.image_id] = held
        started = time.monotonic()
        try:
            memory = held.memory = SharedImage(image.striped)
            memory.load(lambda done, _: self._progress(held, done))
        except (TierdError, OSError, MemoryError) as error:
            with self._lock:
                held.state, held.reason = "failed", str(error)
            held.close()  # outside the lock, as in look(): nobody takes what has failed
            if self._wanted(image):  # else its pages have gone with it: no fault of the device
                log.error("not in memory", image=image.info.name, reason=str(error))
            return
        if not self._wanted(image):
            return
        with self._lock:
            held.state = "ready"
        log.info(
            "in memory",
            image=image.info.name,
            memory=memory.page_kind,
            seconds=round(time.monotonic() - started, 3),
        )

    def _progress(self, held: Held, done: int) -> bool:
        held.loaded = done
        return self._wanted(held.image)

    def listing(self) -> list[Held]:
        """Return what is in memory or to be, by name."""
        with self._lock:
            return sorted(self._held.values(), key=lambda one: one.image.info.name)

    def of(self, image: ServedImage) -> Held | None:
        """Return an image's place in memory, None where it is not to have one."""
        with self._lock:
            held = self._held.get(image.info.image_id)
        return held if held is not None and same_staging(held.image, image) else None

    def take(self, image: ServedImage) -> tuple[int, int] | None:
        """Return a descriptor of an image in memory, the caller's, and its bytes; or None."""
        with self._lock:  # all of it: what look() closes has left the table under the lock before
            held = self._held.get(image.info.image_id)
            if held is None or not same_staging(held.image, image):
                return None
            if held.state != "ready" or held.memory is None:
                return None
            return os.dup(held.memory.fd), held.memory.size

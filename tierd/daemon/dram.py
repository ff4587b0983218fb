"""Images in this node's memory, which engines on GPUs map and read without asking anybody.

A thread keeps what is in memory in step with what is served: it loads new images, and gives up
those that were staged anew or deleted. Who has mapped one keeps it; the generation in every row's
tag says which it is. An engine that attaches before its image is there reads from the next tier.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import threading
import time
from typing import TYPE_CHECKING

import structlog

from tierd.errors import TierdError
from tierd.io.shared_image import SharedImage

if TYPE_CHECKING:
    from tierd.config.dram import DramSection
    from tierd.daemon.plane import DataPlane
    from tierd.daemon.served import ServedImage

log = structlog.get_logger("tierd.daemon.dram")

LOOK_S = 1.0


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
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class DramImages:
    """What this daemon keeps in memory for engines."""

    def __init__(self, settings: DramSection, plane: DataPlane) -> None:
        self._settings = settings
        self._plane = plane
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._held: dict[int, Held] = {}

    def start(self) -> None:
        """Load in the background."""
        if self._settings.images:
            self._thread = threading.Thread(target=self._run, name="tierd-dram", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Give everything up. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            for held in self._held.values():
                held.close()
            self._held.clear()

    def _run(self) -> None:
        for pattern in self._settings.images:
            if not any(fnmatch.fnmatchcase(one.info.name, pattern) for one in self._images()):
                log.warning("dram.images names no image that is served", pattern=pattern)
        while not self._stop.is_set():
            self.look()
            self._stop.wait(LOOK_S)

    def _images(self) -> list[ServedImage]:
        return list(self._plane.images.values())

    def look(self) -> None:
        """Give up what is not served any more, and load what is new."""
        wanted = {
            image.info.image_id: image
            for image in self._images()
            if image.local
            and any(fnmatch.fnmatchcase(image.info.name, p) for p in self._settings.images)
        }
        with self._lock:
            for number, held in list(self._held.items()):
                new = wanted.get(number)
                if new is None or new.info.generation != held.image.info.generation:
                    log.info("no longer in memory", image=held.image.info.name)
                    self._held.pop(number).close()
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
        except TierdError as error:
            with self._lock:
                held.state, held.reason = "failed", str(error)
                held.close()
            log.error("not in memory", image=image.info.name, reason=str(error))
            return
        if self._stop.is_set():
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
        return not self._stop.is_set()

    def listing(self) -> list[Held]:
        """Return what is in memory or to be, by name."""
        with self._lock:
            return sorted(self._held.values(), key=lambda one: one.image.info.name)

    def of(self, image: ServedImage) -> Held | None:
        """Return an image's place in memory, None where it is not to have one."""
        with self._lock:
            held = self._held.get(image.info.image_id)
        same = held is not None and held.image.info.generation == image.info.generation
        return held if same else None

    def take(self, image: ServedImage) -> tuple[int, int] | None:
        """Return a descriptor of an image in memory, the caller's, and its bytes; or None."""
        held = self.of(image)
        with self._lock:
            if held is None or held.state != "ready" or held.memory is None:
                return None
            return os.dup(held.memory.fd), held.memory.size

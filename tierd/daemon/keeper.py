"""A thread that keeps something of every image that a setting's patterns choose.

What exports and the images in memory have in common: the thread starts with the daemon if there is
a pattern, looks at what is served, and ends before its images are given up.
"""

from __future__ import annotations

import fnmatch
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.daemon.plane import DataPlane
    from tierd.daemon.served import ServedImage

LOOK_S = 1.0
STOP_S = 2.0


class Keeper:
    """Base of what keeps something of the chosen images.

    Attributes:
        patterns: names of images, with ``*`` and ``?``.
    """

    def __init__(self, name: str, patterns: Sequence[str], plane: DataPlane) -> None:
        self.patterns = tuple(patterns)
        self._name = name
        self._plane = plane
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        """Whether the configuration names any image."""
        return bool(self.patterns)

    def start(self) -> None:
        """Keep, in the background."""
        if self.wanted:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        raise NotImplementedError

    def _end_thread(self) -> None:
        """A device that does not answer is waited for briefly; the thread ends with the process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._thread = None

    def chosen(self) -> dict[int, ServedImage]:
        """Return what is served from this node's devices and named by a pattern, by its number."""
        return {
            image.info.image_id: image
            for image in list(self._plane.images.values())
            if image.local and any(fnmatch.fnmatchcase(image.info.name, p) for p in self.patterns)
        }

    def _wanted(self, image: ServedImage) -> bool:
        """Whether an image is served still, and we are to go on."""
        now = self._plane.images.get(image.info.image_id)
        return not self._stop.is_set() and same_staging(now, image)


def same_staging(one: ServedImage | None, other: ServedImage) -> bool:
    """Whether both are one staging of an image; another window makes another object of it."""
    return one is not None and one.info.generation == other.info.generation

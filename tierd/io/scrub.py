"""Scrubbing: the walker's full verification, block by block, with what it found kept on disk.

A pass reads every page of one image after another: identity, checksum, tags, and the digest of all
rows. It may stop after any block and go on there later, in another process: where it is stands in
``scrub.json``, the digests of the blocks so far in ``scrub.digests``. Both are conveniences: files
that are lost or make no sense start a pass anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from tierd.io.blocks import BLOCK_PAGES, FAULT_WORDS, BlockBuffers, PageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tierd.io.store_set import StripedImage

FORMAT = 1
PIECE_PAGES = 64  # read at a time, so that a row that is wanted waits for 256 KiB at most
BAD_PAGES_KEPT = 64  # of each image, by number; the rest is counted
_LOOKS = 2  # at a block in which something is wrong: a read may bring something else once
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong.

    Attributes:
        page: number in the image; -1 if it is the digest of all rows.
        device: that holds the page; empty for the digest.
    """

    image: str
    page: int
    fault: str
    device: str


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one step did.

    Attributes:
        image: its name; empty if it was found that nothing of the pass is left.
        pages: read.
        findings: in them.
        image_done: the image was finished with this step.
        pass_done: and with it the pass.
    """

    image: str
    pages: int
    findings: tuple[Finding, ...]
    image_done: bool
    pass_done: bool


class Scrub:
    """One endless row of passes over images. For one thread.

    Attributes:
        image: name of the image under the walker, empty between passes.
        next_page: the first of it that has not been read in this pass.
        done: keys of the images that this pass has finished.
        bad: pages found bad, by image name; a later pass that finds a page right takes it out.
        passes: finished in all.
        finished_at: Unix time of the last pass's end; 0 if there was none.
        save_error: why the state cannot be kept; empty if it can.
    """

    def __init__(self, directory: Path) -> None:
        """Read the state; a damaged one counts as none."""
        self._path = directory / "scrub.json"
        self._digests_path = directory / "scrub.digests"
        self.image = ""
        self.next_page = 0
        self.done: list[str] = []
        self.bad: dict[str, dict[int, str]] = {}
        self.passes = 0
        self.finished_at = 0.0
        self.save_error = ""
        self._key = ""
        self._digests = bytearray()
        self._walk: tuple[str, PageReader, BlockBuffers] | None = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            self._load()

    def _load(self) -> None:
        state = json.loads(self._path.read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            return
        bad = {
            str(name): {int(page): str(fault) for page, fault in pages.items()}
            for name, pages in state["bad"].items()
        }
        self.passes, self.finished_at = int(state["passes"]), float(state["finished_at"])
        self.done, self.bad = [str(key) for key in state["done"]], bad
        digests = self._digests_path.read_bytes()
        size = int(state["next_page"]) // BLOCK_PAGES * _DIGEST_BYTES
        if len(digests) >= size and hashlib.sha256(digests[:size]).hexdigest() == state["digests"]:
            self._key, self.image = str(state["key"]), str(state["image"])
            self.next_page = int(state["next_page"])
            self._digests = bytearray(digests[:size])

    def save(self) -> None:
        """Write the state, the digests first; a failure is noted and costs a repetition."""
        size = self.next_page // BLOCK_PAGES * _DIGEST_BYTES
        state = {
            "format": FORMAT,
            "key": self._key,
            "image": self.image,
            "next_page": self.next_page,
            "digests": hashlib.sha256(self._digests[:size]).hexdigest(),
            "done": self.done,
            "bad": self.bad,
            "passes": self.passes,
            "finished_at": self.finished_at,
        }
        try:
            _replace(self._digests_path, bytes(self._digests[:size]))
            _replace(self._path, json.dumps(state).encode())
        except OSError as error:
            self.save_error = f"{error.filename or self._path}: {error.strerror}"
        else:
            self.save_error = ""

    def step(
        self,
        images: Iterable[StripedImage],
        now: float,
        before_read: Callable[[int], None] | None = None,
        still_there: Callable[[StripedImage], bool] = lambda _: True,
    ) -> Step | None:
        """Read and judge one block; None if there is no image to read.

        Args:
            images: those that are there now, whole ones.
            now: Unix time.
            before_read: called with the number of pages before each read of at most PIECE_PAGES.
            still_there: whether an image is; asked before anything is said against it, since its
                room may have been given up, and used again, while it was read.
        """
        by_key = {_key(image): image for image in images}
        image = self._current(by_key)
        if image is None:
            # What was left of the pass may have been deleted: then this is its end.
            return self._end_pass("", 0, (), now) if by_key else None
        if self._walk is None or self._walk[0] != self._key:
            reader = PageReader(image)
            self._walk = (self._key, reader, BlockBuffers(reader.geometry))
        _, reader, buffers = self._walk
        first = self.next_page
        for _ in range(_LOOKS):
            faults, block = reader.check_block(
                buffers, first, piece_pages=PIECE_PAGES, before_read=before_read
            )
            if not faults.any():
                break
        if faults.any() and not still_there(image):
            return Step(image.name, faults.size, (), image_done=False, pass_done=False)
        self._digests += block
        self.next_page += faults.size
        found = [
            Finding(
                image.name, page, FAULT_WORDS[int(faults[page - first])], reader.device_of(page)
            )
            for page in (first + int(index) for index in faults.nonzero()[0])
        ]
        found = self._note(image.name, first, faults.size, found)
        image_done = self.next_page >= image.info.pages
        if image_done:
            found += self._finish(image)
        pass_done = image_done and set(self.done) >= by_key.keys()
        if pass_done:
            return self._end_pass(image.name, faults.size, tuple(found), now)
        return Step(image.name, faults.size, tuple(found), image_done, pass_done)

    def _end_pass(self, name: str, pages: int, found: tuple[Finding, ...], now: float) -> Step:
        self.done.clear()
        self.passes += 1
        self.finished_at = now
        return Step(name, pages, found, bool(name), pass_done=True)

    def _current(self, by_key: dict[str, StripedImage]) -> StripedImage | None:
        """The image that is being read, or the next one of this pass."""
        self.done = [key for key in self.done if key in by_key]
        here = {image.name for image in by_key.values()}
        self.bad = {name: pages for name, pages in self.bad.items() if name in here}
        if self._key not in by_key or self._key in self.done:
            left = [key for key in by_key if key not in self.done]
            self._key = left[0] if left else ""
            self.next_page = 0
            self._digests.clear()
            self._walk = None
        found = by_key.get(self._key)
        self.image = found.name if found is not None else ""
        return found

    def _note(self, name: str, first: int, pages: int, found: list[Finding]) -> list[Finding]:
        """Remember what was found, and return it; BAD_PAGES_KEPT of an image at the most.

        A device that is dead is bad page by page, and would fill the history with nothing else.
        """
        kept = []
        known = self.bad.setdefault(name, {})
        for page in [page for page in known if first <= page < first + pages]:
            del known[page]
        for finding in found:
            if len(known) < BAD_PAGES_KEPT:
                known[finding.page] = f"{finding.fault}, on {finding.device}"
                kept.append(finding)
        if not known:
            del self.bad[name]
        return kept

    def _finish(self, image: StripedImage) -> list[Finding]:
        digest = hashlib.sha256(self._digests).hexdigest()
        known = self.bad.get(image.name, {})
        known.pop(-1, None)
        found = []
        if digest != image.info.digest and not known:
            fault = "every page is whole, but the digest of all rows is not the one of the import"
            self.bad[image.name] = {-1: fault}
            found.append(Finding(image.name, -1, fault, ""))
        elif not known:
            self.bad.pop(image.name, None)
        self.done.append(self._key)
        self.image, self._key, self.next_page = "", "", 0
        self._digests.clear()
        self._walk = None
        return found

    def progress(self) -> dict[str, Any]:
        """What people are shown."""
        return {
            "image": self.image,
            "next_page": self.next_page,
            "images_done": len(self.done),
            "passes": self.passes,
            "finished_at": self.finished_at,
            "bad_pages": sum(map(len, self.bad.values())),
            "damaged": {
                name: [f"page {page}: {fault}" if page >= 0 else fault for page, fault in p.items()]
                for name, p in sorted(self.bad.items())
            },
            "save_error": self.save_error,
        }


def _key(image: StripedImage) -> str:
    """One copy of one staging of an image."""
    return f"{image.info.image_id:016x}.{image.info.generation}.{image.home.uuid}"


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)

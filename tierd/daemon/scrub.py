"""The thread that scrubs: at its rate, and only while the pumps have nothing better to do.

Decode reads come first. Before each 256 KiB it looks whether a pump had work since its last look,
and if so waits, at most YIELD_MAX_S, so that a busy node is scrubbed slowly rather than never.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from tierd.errors import TierdError
from tierd.io.scrub import Scrub

if TYPE_CHECKING:
    from pathlib import Path

    from tierd.config import IoSection
    from tierd.daemon.plane import DataPlane
    from tierd.io.scrub import Finding, Step
    from tierd.io.store_set import StripedImage

YIELD_S = 0.02  # one look at the pumps
YIELD_MAX_S = 0.25  # per piece: at least 1 MiB/s is scrubbed, whatever the load
STOP_S = 2.0
SAVE_S = 5.0  # so much is read again after a kill
FINDINGS_MAX = 1000  # waiting to be taken; more are counted only
_MIB_PAGES = 256


class Scrubber:
    """Scrubs the images of a data plane until it is stopped.

    Attributes:
        fault: why it gave up; empty while all is well.
    """

    def __init__(self, plane: DataPlane, io: IoSection, directory: Path) -> None:
        self._plane = plane
        self._io = io
        self._scrub = Scrub(directory)
        self._lock = threading.Lock()  # over what others may look at
        self._findings: list[Finding] = []
        self._finished: list[str] = []
        self._state = "off"
        self._wake = threading.Event()
        self._stopping = False
        self._due = 0.0  # on the monotonic clock: when the next piece may be read
        self._requests = 0
        self._shown: dict[str, Any] = self._scrub.progress()
        self.fault = ""
        self._thread = threading.Thread(target=self._run, name="tierd-scrub", daemon=True)

    def start(self) -> None:
        """Begin, or go on where the last daemon stopped."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the piece that is being read, and keep the state. Idempotent.

        A device that does not answer is waited for briefly; the thread ends with the process.
        """
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def configure(self, io: IoSection) -> None:
        """Take new settings: on or off, rate, interval."""
        self._io = io
        self._wake.set()

    def take(self) -> tuple[list[Finding], list[str]]:
        """Return what was found, and which images were finished, since the last call."""
        with self._lock:
            found, self._findings = self._findings, []
            finished, self._finished = self._finished, []
        return found, finished

    def bad_pages(self, image: str) -> int:
        """How many bad pages of an image are known."""
        with self._lock:
            return len(self._shown["damaged"].get(image, ()))

    def status(self) -> dict[str, Any]:
        """Where it is: ``state`` is off, running, resting (between passes) or failed."""
        with self._lock:
            return {"state": self._state, **self._shown, "fault": self.fault}

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            saved = time.monotonic()
            while not self._stopping:
                rest = self._rest_s()
                if rest > 0:
                    self._sleep(rest)
                    continue
                step = self._step()
                now = time.monotonic()
                if step is None or step.image_done or now - saved > SAVE_S:
                    saved = now
                    self._scrub.save()
                if step is None:
                    self._sleep(60.0)
        except _StopError:
            pass
        except TierdError as error:  # a device that is gone altogether; single pages are findings
            self.fault = str(error)
            self._show("failed")
        finally:
            self._scrub.save()

    def _rest_s(self) -> float:
        """Seconds to wait before the next pass; at once if one is under way."""
        if not self._io.scrub:
            self._show("off")
            return 3600.0
        scrub = self._scrub
        if scrub.image or scrub.done or not scrub.finished_at:
            return 0.0
        interval = self._io.scrub_interval_h * 3600
        # At most that, though the clock was set back since.
        left = min(interval, scrub.finished_at + interval - time.time())
        if left > 0:
            self._show("resting")
        return min(left, 3600.0)

    def _step(self) -> Step | None:
        """Scrub one block; None if there is nothing to scrub."""
        images = [
            copy
            for served in list(self._plane.images.values())
            if served.local
            for copy in (served.striped, *served.copies)
        ]
        step = self._scrub.step(images, time.time(), self._before_read, self._is_served)
        with self._lock:
            if step is not None:
                self._findings += step.findings
                del self._findings[FINDINGS_MAX:]
                if step.image_done:
                    self._finished.append(step.image)
        self._show("running" if step is not None else "resting")
        return step

    def _is_served(self, image: StripedImage) -> bool:
        served = self._plane.images.get(image.info.image_id)
        return served is not None and image in (served.striped, *served.copies)

    def _show(self, state: str) -> None:
        with self._lock:
            self._state = state
            self._shown = self._scrub.progress()

    def _before_read(self, pages: int) -> None:
        """Keep to the rate, and let decode reads go first."""
        now = time.monotonic()
        if self._due > now:
            self._sleep(self._due - now)
        self._due = max(self._due, now - 1.0) + pages / _MIB_PAGES / self._io.scrub_mib_s
        until = time.monotonic() + YIELD_MAX_S
        while self._pumps_work() and time.monotonic() < until:
            self._sleep(YIELD_S)
        if self._stopping:
            raise _StopError

    def _pumps_work(self) -> bool:
        """Whether a pump has reads in flight, or has answered since the last look."""
        stats = self._plane.stats()
        requests = sum(pump["requests"] for pump in stats)
        seen, self._requests = self._requests, requests
        return requests != seen or any(pump["in_flight"] for pump in stats)

    def _sleep(self, seconds: float) -> None:
        """Sleep, or less if there is something new."""
        self._wake.wait(seconds)
        if not self._stopping:
            self._wake.clear()


class _StopError(Exception):
    """Told to stop in the middle of a block, which is read again next time."""

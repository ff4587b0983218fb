"""/v1/doctor: what the examination at the start found. The examination itself is tools/doctor's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from tierd.api import schemas
from tierd.api.common import moment
from tierd.api.routing import Call, Routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierd.config import Settings

    Examine = Callable[[Settings], list[dict[str, Any]]]

log = structlog.get_logger("tierd.api.doctor")

routes = Routes("doctor", "What the machine lacks, and the command that cures it.")


@dataclasses.dataclass(slots=True)
class Examination:
    """What is known of the machine.

    Attributes:
        findings: JSON-ready; None until the examination has ended, or if there is none.
        at: Unix time of the findings.
    """

    findings: list[dict[str, Any]] | None = None
    at: float = 0.0

    async def run(self, examine: Examine, settings: Settings) -> None:
        """Examine the machine; a fault of the examination costs only itself."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[list[dict[str, Any]]] = loop.create_future()

        def look() -> None:
            try:
                found = examine(settings)
            except Exception:
                log.exception("the examination failed")
                found = []
            with contextlib.suppress(RuntimeError):  # the daemon has stopped meanwhile
                loop.call_soon_threadsafe(_settle, ended, found)

        # A thread that nobody waits for: a device may hang, and the daemon must be able to stop.
        threading.Thread(target=look, name="tierd-doctor", daemon=True).start()
        found = await ended
        if not found:
            return
        self.findings, self.at = found, time.time()
        for finding in found:
            if finding["severity"] != "ok":
                log.warning("doctor", **finding)


def _settle(ended: asyncio.Future[list[dict[str, Any]]], found: list[dict[str, Any]]) -> None:
    if not ended.done():
        ended.set_result(found)


EXAMINATION = web.AppKey("examination", Examination)


@routes.get("/v1/doctor", schemas.Doctor)
async def get_doctor(call: Call) -> schemas.Doctor:
    """What was found when the daemon started.

    `tierd doctor` examines anew, and more: it reads the devices as well.
    """
    seen = call.request.app[EXAMINATION]
    return schemas.Doctor(
        verdict=verdict(seen).verdict,
        examined_at=moment(seen.at) if seen.findings is not None else None,
        findings=[schemas.Finding.model_validate(finding) for finding in seen.findings or []],
    )


def verdict(seen: Examination) -> schemas.Verdict:
    """Return the worst that was found, in one word, and how much of it."""
    if seen.findings is None:
        return schemas.Verdict(verdict="unknown", problems=0, warnings=0)
    severities = [finding["severity"] for finding in seen.findings]
    problems, warnings = severities.count("problem"), severities.count("warning")
    word = "problem" if problems else "warning" if warnings else "ok"
    return schemas.Verdict(verdict=word, problems=problems, warnings=warnings)

"""/healthz, /readyz and /metrics: for load balancers, systemd and Prometheus."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from tierd.api import schemas
from tierd.api.problems import Problem
from tierd.api.routing import Call, Routes

routes = Routes("health", "Whether it lives. The metrics listener has these too.")


@routes.get("/healthz", schemas.Health)
async def get_health(call: Call) -> schemas.Health:
    """Green (200) while every pump's loop turns, else 503."""
    plane = call.daemon.plane
    if not await asyncio.to_thread(plane.is_beating):
        text = "a pump stands still: rows are not served; run: systemctl restart tierd"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, text)
    return schemas.Health(status="ok", pumps=len(plane.pumps))


@routes.get("/readyz", schemas.Ready)
async def get_ready(call: Call) -> schemas.Ready:
    """Green (200) once images are served, else 503."""
    images = len(call.daemon.plane.images)
    if not images:
        text = "no images are served yet; run: tierd stage CHECKPOINT --device DEVICE"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, text)
    return schemas.Ready(status="ready", images=images)

"""/healthz, /readyz and /metrics: for load balancers, systemd and Prometheus."""

from __future__ import annotations

from http import HTTPStatus

from tierd.api import schemas
from tierd.api.problems import Problem
from tierd.api.routing import Call, Routes

routes = Routes("health", "Whether it lives. The metrics listener has these too.")


@routes.get("/healthz", schemas.Health)
async def get_health(call: Call) -> schemas.Health:
    """Green (200) while the event loop and every pump's loop turn, else 503."""
    if stuck := await call.daemon.vitals():
        text = f"{stuck} stands still: engines serve themselves; run: systemctl restart tierd"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, text)
    return schemas.Health(status="ok", pumps=len(call.daemon.plane.pumps))


@routes.get("/readyz", schemas.Ready)
async def get_ready(call: Call) -> schemas.Ready:
    """Green (200) once images are served, else 503."""
    images = len(call.daemon.plane.images)
    if not images:
        text = "no images are served yet; run: tierd stage CHECKPOINT --device DEVICE"
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, text)
    return schemas.Ready(status="ready", images=images)

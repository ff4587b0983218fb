"""Errors as RFC 9457 problem details, whatever raised them."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from tierd.errors import ImageError, TierdError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.typedefs import Handler

log = structlog.get_logger("tierd.api")

CONTENT_TYPE = "application/problem+json"


def problem(
    status: int, detail: str, *, instance: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a problem response.

    Args:
        status: the HTTP status.
        detail: one line: what, where, what to do.
        instance: the path that was asked for.
        headers: kept from the original answer, such as Allow.
    """
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
    }
    return web.Response(
        text=json.dumps(body), status=status, content_type=CONTENT_TYPE, headers=headers
    )


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into problems; a fault of ours is logged and answered with 500."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {key: error.headers[key] for key in ("Allow", "Location") if key in error.headers}
        return problem(error.status, _detail(request, error), instance=request.path, headers=kept)
    except ImageError as error:
        return problem(HTTPStatus.NOT_FOUND, str(error), instance=request.path)
    except TierdError as error:
        return problem(HTTPStatus.CONFLICT, str(error), instance=request.path)
    except Exception:
        log.exception("request failed", method=request.method, path=request.path)
        text = "a fault of the daemon; run: journalctl -u tierd -n 50"
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, text, instance=request.path)


def _detail(request: web.Request, error: web.HTTPException) -> str:
    match error:
        case web.HTTPNotFound():
            return f"there is no {request.path} here; /v1/status is a place to start"
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return f"{request.path} takes {allowed}, not {request.method}"
        case _:
            return error.text or error.reason

"""Errors as RFC 9457 problem details, whatever raised them."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from pydantic import BaseModel

from tierd.errors import (
    ImageError,
    JobError,
    NoClientError,
    NoDeviceError,
    NoJobError,
    TierdError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.typedefs import Handler

log = structlog.get_logger("tierd.api")

CONTENT_TYPE = "application/problem+json"
# The first class that fits decides; the rest of a user's mistakes conflict with the present state.
_STATUSES: tuple[tuple[type[TierdError], int], ...] = (
    (ImageError, HTTPStatus.NOT_FOUND),
    (NoDeviceError, HTTPStatus.NOT_FOUND),
    (NoClientError, HTTPStatus.NOT_FOUND),
    (NoJobError, HTTPStatus.NOT_FOUND),
    (JobError, HTTPStatus.SERVICE_UNAVAILABLE),
    (TierdError, HTTPStatus.CONFLICT),
)


class PlaceOfError(BaseModel):
    """One thing that is wrong with a body."""

    pointer: str  # JSON pointer into the body
    detail: str


class ProblemDetails(BaseModel):
    """What went wrong (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str  # one line: what, where, what to do
    instance: str  # the path that was asked for
    errors: list[PlaceOfError] | None = None


class Problem(Exception):  # noqa: N818 - the standard's word for it
    """An answer that is a problem.

    Attributes:
        status: the HTTP status.
        detail: one line: what, where, what to do.
        errors: places in the body, with what is wrong there.
        headers: of the answer.
        close: the connection cannot be used again.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: list[dict[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors
        self.headers = headers
        self.close = close


def problem(
    status: int,
    detail: str,
    *,
    instance: str,
    headers: Mapping[str, str] | None = None,
    errors: list[dict[str, str]] | None = None,
) -> web.Response:
    """Return a problem response.

    Args:
        status: the HTTP status.
        detail: one line: what, where, what to do.
        instance: the path that was asked for.
        headers: kept from the original answer, such as Allow.
        errors: places in the body, with what is wrong there.
    """
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
    }
    if errors is not None:
        body["errors"] = errors
    return web.Response(
        text=json.dumps(body), status=status, content_type=CONTENT_TYPE, headers=headers
    )


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into problems; a fault of ours is logged and answered with 500."""
    try:
        return await handler(request)
    except Problem as error:
        answer = problem(
            error.status,
            error.detail,
            instance=request.path,
            headers=error.headers,
            errors=error.errors,
        )
        if error.close:
            answer.force_close()
        return answer
    except web.HTTPException as error:
        kept = {key: error.headers[key] for key in ("Allow", "Location") if key in error.headers}
        return problem(error.status, _detail(request, error), instance=request.path, headers=kept)
    except TierdError as error:
        status = next(number for kind, number in _STATUSES if isinstance(error, kind))
        return problem(status, str(error), instance=request.path)
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
        case web.HTTPRequestEntityTooLarge():
            return f"a body of more than {request.client_max_size} bytes is not read"
        case _:
            return error.text or error.reason

"""Queries and bodies, parsed strictly: what a schema does not allow is refused, with its place.

Fault model: a peer may send any bytes, slowly. A body is bounded in size (by the application) and
in time; both cost its own connection only.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    RootModel,
    ValidationError,
    WithJsonSchema,
)

from tierd.api.problems import Problem

if TYPE_CHECKING:
    from aiohttp import web

_Model = TypeVar("_Model", bound=BaseModel)

BODY_TIMEOUT_S = 10.0


class Query(BaseModel):
    """Base of what stands behind the question mark: closed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Body(BaseModel):
    """Base of what is sent: closed, and no number written as text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _flag(value: object) -> object:
    if value in {"true", "false"}:
        return value == "true"
    if isinstance(value, bool):
        return value
    raise ValueError("true or false is wanted")


def _number(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise ValueError("a number is wanted")
    return value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# In a query, where everything is text.
Flag = Annotated[bool, BeforeValidator(_flag), WithJsonSchema({"type": "boolean"})]
NUMBER = BeforeValidator(_number)
# In a body: JSON has one kind of number, and 3.0 is 3.
WHOLE = BeforeValidator(_whole)


def query(request: web.Request, model: type[_Model] | None) -> _Model | None:
    """Return the parsed query.

    Raises:
        Problem: 400; the text names the parameter.
    """
    given = request.query
    if model is None:
        if given:
            name = next(iter(given))
            raise Problem(HTTPStatus.BAD_REQUEST, f"{name}: {request.path} takes no parameters")
        return None
    for name in given:
        if len(given.getall(name)) > 1:
            raise Problem(HTTPStatus.BAD_REQUEST, f"{name}: given twice")
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, _explain(error, "", given)) from None


async def body(request: web.Request, model: type[_Model]) -> _Model:
    """Return the parsed body.

    Raises:
        Problem: 400, 408, 413, 415 or 422; the last with the place of each error.
    """
    if request.content_type != "application/json":
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"{request.content_type}: a body is wanted as application/json",
        )
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await request.read()
    except TimeoutError:
        text = f"the body took longer than {BODY_TIMEOUT_S:.0f} s"
        raise Problem(HTTPStatus.REQUEST_TIMEOUT, text, close=True) from None
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        broken = error.errors(include_url=False, include_input=False)
        if broken[0]["type"] == "json_invalid":
            raise Problem(
                HTTPStatus.BAD_REQUEST, f"the body is not JSON: {_clean(broken[0]['msg'])}"
            ) from None
        # The kind that a union was told apart by is no part of the place.
        skip = 1 if issubclass(model, RootModel) else 0
        places = [
            {"pointer": _pointer(one["loc"][skip:]), "detail": _clean(one["msg"])} for one in broken
        ]
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, _explain(error, "body "), errors=places
        ) from None


def _pointer(place: tuple[int | str, ...]) -> str:
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in place)
    return "#" + "".join(f"/{part}" for part in parts)


def _explain(error: ValidationError, prefix: str, given: Any = None) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    shown = f"{place}={given[place]}" if given is not None and place in given else prefix + place
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{_clean(shown[:200])}: {_clean(first['msg'])}{more}"


def _clean(text: str) -> str:
    """One line, whatever the peer wrote."""
    text = text.removeprefix("Value error, ")
    return "".join(c if c.isprintable() else " " for c in text)

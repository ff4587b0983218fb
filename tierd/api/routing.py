"""Routes as data: what a route takes and answers stands beside its handler, once.

From these declarations come the parsing of queries and bodies, who may call, ETags, and the
OpenAPI document, so that none of them can drift from what the handler does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tierd.api import access, parse, schemas
from tierd.api.common import DAEMON
from tierd.api.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pydantic import BaseModel

    from tierd.daemon.service import Daemon

    Handler = Callable[["Call"], Awaitable[Any]]  # a model, or a finished response

COMPRESS_BYTES_MIN = 4096  # of an answer; only for those who say that they take it so
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    Attributes:
        path: as aiohttp takes it; ``{name:regex}`` for parts of a kind.
        tag: the resource it belongs to.
        answer: what a success carries.
        query: what it takes behind the question mark; none means nothing.
        body: the JSON that it takes; none means nothing.
        status: of a success.
        tagged: its answer has an ETag; ``If-None-Match`` and, for changes, ``If-Match`` count.
        stream: events are sent to who accepts text/event-stream; the model of one event's data.
        text: its answer is plain text, not JSON.
        peers: other nodes may call it, with the token of exports.
    """

    method: str
    path: str
    handler: Handler
    tag: str
    answer: type[BaseModel] | None
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    status: int = HTTPStatus.OK
    tagged: bool = False
    stream: type[BaseModel] | None = None
    text: bool = False
    peers: bool = False

    @property
    def changes(self) -> bool:
        """It changes something, so not everybody may call it."""
        return self.method in CHANGING

    @property
    def summary(self) -> str:
        """First line of the handler's docstring."""
        return inspect.cleandoc(self.handler.__doc__ or "").splitlines()[0]

    @property
    def description(self) -> str:
        """What follows that line."""
        return "\n".join(inspect.cleandoc(self.handler.__doc__ or "").splitlines()[2:])

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Judge, parse, handle, answer."""
        access.require(request, changes=self.changes, peers=self.peers)
        query = parse.query(request, self.query)
        body = None if self.body is None else await parse.body(request, self.body)
        result = await self.handler(Call(request, request.app[DAEMON], query, body))
        if isinstance(result, web.StreamResponse):
            return result
        return self._reply(request, result)

    def _reply(self, request: web.Request, result: BaseModel) -> web.Response:
        text = result.model_dump_json()
        headers = {}
        status = self.status
        if isinstance(result, schemas.DryRun):
            status = HTTPStatus.OK
        elif isinstance(result, schemas.Job) and self.changes:
            headers["Location"] = f"/v1/jobs/{result.job}"
        if self.tagged and not self.changes:
            tag = headers["ETag"] = etag(result)
            if tag in _tags(request, "If-None-Match") and not hasattr(result, "volatile"):
                return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        response = web.Response(
            text=text, status=status, content_type="application/json", headers=headers
        )
        if len(text) > COMPRESS_BYTES_MIN:
            response.enable_compression()
        return response


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request, judged and parsed."""

    request: web.Request
    daemon: Daemon
    query: Any
    body: Any

    def part(self, name: str) -> str:
        """Return a part of the path."""
        return self.request.match_info[name]

    def require_match(self, current: BaseModel) -> None:
        """Refuse an edit that was made on another state than the present one.

        Raises:
            Problem: 412; ``If-Match`` is given and does not name ``current``.
        """
        wanted = _tags(self.request, "If-Match")
        if wanted and "*" not in wanted and etag(current) not in wanted:
            raise Problem(
                HTTPStatus.PRECONDITION_FAILED,
                f"{self.request.path} has changed since you read it: somebody else edited it; "
                "read it again and decide anew",
                headers={"ETag": etag(current)},
            )

    @property
    def wants_stream(self) -> bool:
        """Server-sent events are asked for."""
        return "text/event-stream" in self.request.headers.get("Accept", "")


class Routes:
    """The endpoints of one resource."""

    def __init__(self, tag: str, purpose: str) -> None:
        self.tag = tag
        self.purpose = purpose
        self.endpoints: list[Endpoint] = []

    def add(
        self, method: str, path: str, answer: type[BaseModel] | None, **declared: Any
    ) -> Callable[[Handler], Handler]:
        """Declare an endpoint; see :class:`Endpoint` for what may be declared."""

        def keep(handler: Handler) -> Handler:
            endpoint = Endpoint(method, path, handler, self.tag, answer, **declared)
            self.endpoints.append(endpoint)
            return handler

        return keep

    def get(
        self, path: str, answer: type[BaseModel] | None, **declared: Any
    ) -> Callable[[Handler], Handler]:
        """Declare a GET."""
        return self.add("GET", path, answer, **declared)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.endpoints)


def etag(model: BaseModel) -> str:
    """Return the ETag of a model's content, without what changes by itself (its ``volatile``)."""
    text = model.model_dump_json(exclude=getattr(model, "volatile", None))
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def _tags(request: web.Request, header: str) -> set[str]:
    """Entity tags of a header; a proxy may have made ours weak."""
    text = ",".join(request.headers.getall(header, []))
    return {part.strip().removeprefix("W/") for part in text.split(",") if part.strip()}

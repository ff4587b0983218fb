"""/v1/exports: images that other nodes read from this node's memory.

Peers come with the token of ``exports.token_file``; these routes are all that it opens.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from tierd.api import schemas
from tierd.api.access import CALLER
from tierd.api.common import moment
from tierd.api.parse import WHOLE, Body
from tierd.api.problems import Problem
from tierd.api.routing import Call, Routes
from tierd.daemon.exports import LINKS_MAX, require_version
from tierd.errors import RdmaError
from tierd.io.verbs import GIDS_MAX

if TYPE_CHECKING:
    from tierd.daemon.exports import Export

PAGE_BYTES = 4096
SESSION = "/v1/exports/sessions/{session:[0-9a-f]+}"

routes = Routes("exports", "Images that other nodes read from this node's memory.")

Number = Annotated[int, WHOLE, Field(ge=0, lt=1 << 32)]


class PeerGid(Body):
    """One entry of the peer's GID table."""

    index: Number
    value: str = Field(pattern=r"^[0-9a-f]{32}$")
    kind: str = Field(max_length=32)


class PeerPort(Body):
    """The peer's port."""

    device: str = Field(max_length=64)
    port: Number
    link_layer: str = Field(max_length=32)
    mtu: Number
    lid: Number
    read_depth: Number
    gids: list[PeerGid] = Field(max_length=GIDS_MAX)


class SessionRequest(Body):
    """What a peer says of itself: its port, and (number, first packet) of its queue pairs."""

    version: Number
    transport: str = Field(max_length=16)
    port: PeerPort | None = None
    links: list[Annotated[list[list[Number]], Field(min_length=1, max_length=16)]] = Field(
        default_factory=list, max_length=LINKS_MAX
    )
    agent: str = Field("", max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _version_first(cls, data: Any) -> Any:
        """Of another version, the rest may have another form: it is not what is to be told."""
        version = data.get("version") if isinstance(data, dict) else None
        try:
            if type(version) is int:
                require_version(version)
        except RdmaError as error:
            raise Problem(HTTPStatus.CONFLICT, str(error)) from None
        return data


class RenewRequest(Body):
    """Nothing is said when a session is renewed."""


@routes.get("/v1/exports", schemas.Exports, peers=True)
async def get_exports(call: Call) -> schemas.Exports:
    """What is exported, and who reads it."""
    exported = call.daemon.exports
    return schemas.Exports(
        fault=exported.fault,
        transport=exported.transport,
        ways=exported.ways,
        exports=[_export(one) for one in exported.listing()],
        sessions=[
            schemas.ExportSession(
                peer=one.peer, since=moment(one.opened), links=len(one.responders)
            )
            for one in exported.sessions()
        ],
    )


@routes.add(
    "POST",
    "/v1/exports/sessions",
    schemas.PeerAnswer,
    body=SessionRequest,
    status=HTTPStatus.CREATED,
    peers=True,
)
async def post_session(call: Call) -> schemas.PeerAnswer:
    """Let a peer read: it gets addresses and keys, and has to renew the session.

    A session that is not renewed for `lease_s` seconds is closed.
    """
    asked: dict[str, Any] = call.body.model_dump()
    peer = call.request[CALLER].name
    try:
        answer = await asyncio.to_thread(call.daemon.exports.open_session, asked, peer)
    except RdmaError as error:
        raise Problem(HTTPStatus.CONFLICT, str(error)) from None
    return schemas.PeerAnswer(**answer)


@routes.add("PUT", SESSION, schemas.PeerRenewed, body=RenewRequest, peers=True)
async def put_session(call: Call) -> schemas.PeerRenewed:
    """Renew a session. A new `revision` says that it is to be opened anew."""
    renewed = await asyncio.to_thread(call.daemon.exports.renew, call.part("session"))
    if renewed is None:
        raise _gone()
    return schemas.PeerRenewed(**renewed)


@routes.add("DELETE", SESSION, schemas.PeerClosed, peers=True)
async def delete_session(call: Call) -> schemas.PeerClosed:
    """Close a session: its queue pairs are taken away."""
    if not await asyncio.to_thread(call.daemon.exports.close_session, call.part("session")):
        raise _gone()
    return schemas.PeerClosed(closed=True)


def _gone() -> Problem:
    return Problem(HTTPStatus.NOT_FOUND, "there is no such session: it was not renewed in time")


def _export(one: Export) -> schemas.Export:
    info, memory = one.image.info, one.memory  # which the exporting thread may give up
    return schemas.Export(
        name=info.name,
        image_id=f"{info.image_id:016x}",
        generation=info.generation,
        fingerprint=info.fingerprint,
        pages=info.pages,
        size_bytes=info.pages * PAGE_BYTES,
        state=one.state,
        reason=one.reason,
        loaded_pages=one.loaded,
        memory="" if memory is None else memory.page_kind,
    )

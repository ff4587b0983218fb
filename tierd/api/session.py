"""POST /v1/session: a key that only reads, for a browser that should not keep the token."""

from __future__ import annotations

from http import HTTPStatus

from pydantic import BaseModel

from tierd.api.access import ACCESS
from tierd.api.common import moment
from tierd.api.problems import Problem
from tierd.api.routing import Call, Routes

routes = Routes("session", "Keys for browsers.")


class Session(BaseModel):
    """A key that reads: `Authorization: Bearer KEY`."""

    key: str
    ends_at: str


@routes.add("POST", "/v1/session", Session)
async def post_session(call: Call) -> Session:
    """Make a key that may read, and nothing else, until it ends or the token changes."""
    made = call.request.app[ACCESS].make_key()
    if made is None:
        raise Problem(
            HTTPStatus.CONFLICT,
            "api.listen is not set, so there is no token to make a key from; run: tierd dashboard",
        )
    key, ends = made
    return Session(key=key, ends_at=moment(ends))

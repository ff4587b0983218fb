"""What every route needs."""

from __future__ import annotations

import asyncio
import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import web

from tierd.daemon.service import Daemon

if TYPE_CHECKING:
    from pydantic import BaseModel

DAEMON = web.AppKey("daemon", Daemon)
# Held by an edit from its If-Match check to its end, so that no other comes between.
EDITS = web.AppKey("edits", asyncio.Lock)
# Look at requests for jobs, which takes as long as the file system of a checkpoint does.
JUDGES = web.AppKey("judges", ThreadPoolExecutor)


def reply(model: BaseModel) -> web.Response:
    """Answer with a model as JSON."""
    return web.Response(text=model.model_dump_json(), content_type="application/json")


def moment(unix_s: float) -> str:
    """Return a Unix time as ISO 8601 in UTC."""
    return dt.datetime.fromtimestamp(unix_s, tz=dt.UTC).isoformat()

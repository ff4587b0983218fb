"""The OpenAPI 3.1 document, made from the endpoints' declarations.

GET /openapi.json
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from tierd import __version__
from tierd.api import schemas
from tierd.api.problems import CONTENT_TYPE, ProblemDetails
from tierd.api.routing import Call, Endpoint, Routes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import BaseModel

RESOURCES = web.AppKey("resources", tuple)
_REF = "#/components/schemas/{model}"

routes = Routes("openapi", "This interface, for machines.")


@routes.get("/openapi.json", None, tagged=True)
async def get_openapi(call: Call) -> web.Response:
    """The OpenAPI 3.1 document of this interface."""
    text, tag = _written(call.request.app[RESOURCES])
    if call.request.headers.get("If-None-Match") == tag:
        return web.Response(status=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
    return web.Response(text=text, content_type="application/json", headers={"ETag": tag})


@functools.cache
def _written(resources: tuple[Routes, ...]) -> tuple[str, str]:
    """Return the document as text, and its ETag; made when first asked for, not at the start."""
    text = json.dumps(document(resources))
    return text, f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


def document(resources: Sequence[Routes]) -> dict[str, Any]:
    """Return the document."""
    endpoints = [endpoint for routes in resources for endpoint in routes]
    names, definitions = _components(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = public_path(endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tierd",
            "version": __version__,
            "description": "Administration of one tierd daemon. Errors are problem details.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": each.tag, "description": each.purpose} for each in resources],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "On TCP; the Unix socket knows its peers.",
                }
            },
        },
    }


def public_path(path: str) -> str:
    """Return a path without what only the router reads."""
    return re.sub(r"\{(\w+):[^{}]*\}", r"{\1}", path)


def _models(endpoint: Endpoint) -> Iterable[tuple[type[BaseModel], Any]]:
    for model in (endpoint.answer, endpoint.stream):
        if model is not None:
            yield model, "serialization"
    for model in (endpoint.query, endpoint.body):
        if model is not None:
            yield model, "validation"


def _components(
    endpoints: Sequence[Endpoint],
) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    used = {(ProblemDetails, "serialization"), (schemas.DryRun, "serialization")}
    used |= {pair for endpoint in endpoints for pair in _models(endpoint)}
    ordered: Any = sorted(used, key=lambda pair: (pair[0].__name__, pair[1]))
    names, whole = models_json_schema(ordered, ref_template=_REF)
    return names, whole.get("$defs", {})


def _operation(endpoint: Endpoint, names: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": endpoint.summary.rstrip("."),
        "tags": [endpoint.tag],
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint)],
        "responses": _responses(endpoint, names),
    }
    if endpoint.description:
        made["description"] = endpoint.description
    if endpoint.tagged:
        made["parameters"].append(_header("If-Match" if endpoint.changes else "If-None-Match"))
    if endpoint.body is not None:
        schema = names[endpoint.body, "validation"]
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    found = re.findall(r"\{(\w+)", endpoint.path)
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in found]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    whole = endpoint.query.model_json_schema(ref_template=_REF)
    made = []
    for name, schema in whole["properties"].items():
        inner = {key: value for key, value in schema.items() if key not in {"title", "description"}}
        if (choice := inner.pop("anyOf", None)) is not None:  # null cannot be written in a query
            inner |= next(one for one in choice if one.get("type") != "null")
            inner.pop("default", None)
        described = {"description": schema["description"]} if "description" in schema else {}
        made.append({"name": name, "in": "query", "required": False, **described, "schema": inner})
    return made


def _header(name: str) -> dict[str, Any]:
    text = {
        "If-Match": "ETag of the state that the change was decided on; 412 if it is another now.",
        "If-None-Match": "ETag of what you have; 304 if it is the same still.",
    }
    schema = {"type": "string"}
    return {"name": name, "in": "header", "description": text[name], "schema": schema}


def _responses(endpoint: Endpoint, names: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.text:
        content["text/plain"] = {"schema": {"type": "string"}}
    elif endpoint.answer is None:
        content["application/json"] = {"schema": {"type": "object"}}
    else:
        content["application/json"] = {"schema": names[endpoint.answer, "serialization"]}
    if endpoint.stream is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    good: dict[str, Any] = {"description": "Done.", "content": content}
    if endpoint.tagged and not endpoint.changes:
        good["headers"] = {"ETag": {"schema": {"type": "string"}}}
    problem = {CONTENT_TYPE: {"schema": names[ProblemDetails, "serialization"]}}
    made = {str(int(endpoint.status)): good}
    if endpoint.query is not None and "dry_run" in endpoint.query.model_fields:
        schema = names[schemas.DryRun, "serialization"]
        description = "What would change (dry_run)."
        if endpoint.status == HTTPStatus.OK:  # the same status carries both
            done = content["application/json"]["schema"]
            schema = {"anyOf": [done, schema]}
            description = "Done; or what would change (dry_run)."
        made[str(int(HTTPStatus.OK))] = {
            "description": description,
            "content": {"application/json": {"schema": schema}},
        }
    if endpoint.tagged and not endpoint.changes:
        made[str(int(HTTPStatus.NOT_MODIFIED))] = {"description": "You have it already."}
    return made | {"default": {"description": "A problem.", "content": problem}}

"""REST in this process: every route's answer and every kind of problem, on a real data plane."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import checkpoints
from tests.daemons import make_node
from tests.rest import Rest, serving
from tierd.api import schemas
from tierd.api.access import PUBLIC
from tierd.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAGE = (Path(__file__).resolve().parents[2] / "docs/operating/rest.md").read_text()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("api")
    tiny = checkpoints.engram(directory / "v41", rows=100)
    return make_node(directory, {"org/v41": tiny, "v41": tiny}).device


@pytest.fixture
async def rest(device: Path, tmp_path: Path) -> AsyncIterator[Rest]:
    async with serving(device, tmp_path) as made:
        yield made


async def test_answers_follow_their_schemas(rest: Rest) -> None:
    uuid = rest.daemon.plane.stores[0].uuid
    for path, model in (
        ("/v1/status", schemas.Status),
        ("/v1/devices", schemas.Devices),
        (f"/v1/devices/{uuid}", schemas.Device),
        ("/v1/images", schemas.Images),
        ("/v1/images/v41/layers.1.engram", schemas.Image),
        ("/v1/tables", schemas.Tables),
        ("/v1/tables/org%2Fv41/layers.14.engram", schemas.Table),
        ("/v1/clients", schemas.Clients),
        ("/v1/jobs", schemas.Jobs),
        ("/v1/events", schemas.Events),
        ("/v1/doctor", schemas.Doctor),
        ("/healthz", schemas.Health),
        ("/readyz", schemas.Ready),
    ):
        model.model_validate(await rest.get(path))


async def test_images_by_name_and_by_model(rest: Rest) -> None:
    image = await rest.get("/v1/images/org/v41/layers.14.engram")
    assert image["name"] == "org/v41/layers.14.engram"
    assert (image["rows"], image["row_bytes"], image["pages"]) == (100, 264, 7)
    assert image["size_bytes"] == 7 * 4096
    assert len(image["image_id"]) == 16
    listed = await rest.get("/v1/images?model=v41")
    names = [image["name"] for image in listed["images"]]
    assert names == ["v41/layers.1.engram", "v41/layers.14.engram"]


async def test_what_has_not_changed_is_not_sent_again(rest: Rest) -> None:
    path = "/openapi.json"
    _, headers, _ = await rest.answer("GET", path)
    again = {"If-None-Match": headers["ETag"]}
    status, _, body = await rest.answer("GET", path, headers=again)
    assert (status, body) == (304, "")
    status, _, _ = await rest.answer("GET", path, headers={"If-None-Match": '"other"'})
    assert status == 200


async def test_events_are_seen_as_soon_as_they_are_recorded(rest: Rest) -> None:
    rest.daemon.catalog.record("attached", "a", pid=1)
    rest.daemon.catalog.record("detached", "a")
    (event,) = (await rest.get("/v1/events?kind=attached&limit=5"))["events"]
    assert (event["kind"], event["subject"], event["details"]) == ("attached", "a", {"pid": 1})
    assert event["time"].endswith("+00:00")
    (later,) = (await rest.get(f"/v1/events?after={event['id']}"))["events"]
    assert later["kind"] == "detached"


async def test_problems(rest: Rest) -> None:
    assert "/v1/status is a place" in (await rest.problem("GET", "/v1/nothing", 404))["detail"]
    assert "not POST" in (await rest.problem("POST", "/v1/images", 405))["detail"]
    for path, words in (
        ("/v1/images/v41/layers.2.engram", "did you mean v41/layers.1"),
        ("/v1/tables/v41/none", "there is no image v41/none"),
        ("/v1/devices/none", "none: not a device of this daemon"),
        ("/v1/clients/none", "there is no client 'none'"),
        ("/v1/jobs/none", "there is no job 'none'"),
    ):
        assert words in (await rest.problem("GET", path, 404))["detail"]
    for query in ("limit=0", "limit=x", "limit=-1", "limit=1001", "limit=%C2%B2", "limit=%2B5"):
        detail = (await rest.problem("GET", f"/v1/events?{query}", 400))["detail"]
        assert detail.startswith("limit=")
    for path in ("/v1/status?x=1", "/v1/events?limti=3", "/v1/events?limit=1&limit=2"):
        await rest.problem("GET", path, 400)


@pytest.mark.parametrize("fault", [ZeroDivisionError("x y"), DeviceError("x y")])
async def test_a_fault_is_logged_and_keeps_its_details_to_itself(
    rest: Rest, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: object) -> None:
        raise fault

    monkeypatch.setattr(type(rest.daemon.plane), "stats", fail)
    meant_for_users = isinstance(fault, DeviceError)
    body = await rest.problem("GET", "/v1/status", 409 if meant_for_users else 500)
    assert ("x y" in body["detail"]) == meant_for_users
    assert "ZeroDivision" not in json.dumps(body)


async def test_health_is_red_when_a_pump_stands_still(rest: Rest) -> None:
    rest.daemon.plane.pumps[0].stop()
    assert "stands still" in (await rest.problem("GET", "/healthz", 503))["detail"]


async def test_every_route_is_in_the_operators_page_and_in_the_document(rest: Rest) -> None:
    document = await rest.get("/openapi.json")
    assert document["openapi"].startswith("3.1")
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    routes = {
        (route.method, re.sub(r":[^{}]*}", "}", route.resource.canonical))
        for route in rest.app.router.routes()
        if route.resource.canonical not in PUBLIC  # the dashboard's files
    }
    assert described == routes
    for method, path in described:
        assert f"`{path}`" in PAGE or method != "GET", path
        assert f"`{method} {path}`" in PAGE or method == "GET", path

"""REST in this process: every route's answer and every kind of problem, on a real data plane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests import checkpoints
from tests.daemons import make_node
from tierd.api import schemas
from tierd.api.server import RestApi, make_app
from tierd.catalog import Catalog
from tierd.config import load
from tierd.daemon import Daemon
from tierd.daemon.attach import AttachServer
from tierd.daemon.plane import DataPlane
from tierd.daemon.scrub import Scrubber
from tierd.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAGE = (Path(__file__).resolve().parents[2] / "docs/operating.md").read_text()

Rest = TestClient[web.Request, web.Application]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("api")
    tiny = checkpoints.engram(directory / "v41", rows=100)
    return make_node(directory, {"org/v41": tiny, "v41": tiny}).device


@pytest.fixture
async def daemon(device: Path, tmp_path: Path) -> AsyncIterator[Daemon]:
    overrides = {
        "daemon.state_dir": str(tmp_path),
        "daemon.runtime_dir": str(tmp_path),
        "devices.paths": [str(device)],
    }
    made = Daemon(load(environ={}, overrides=overrides).settings, RestApi)
    made.catalog = Catalog(tmp_path / "catalog.db")
    made.plane = DataPlane.open(made.settings)
    made.scrubber = Scrubber(made.plane, made.settings.io, tmp_path)
    made.attach = AttachServer(made.settings, made.plane, made.catalog, boot_id="boot")
    yield made
    made.plane.close()
    made.catalog.close()


@pytest.fixture
async def rest(daemon: Daemon) -> AsyncIterator[Rest]:
    app = make_app(daemon)

    async def fail(request: web.Request) -> web.Response:
        raise {"fault": ZeroDivisionError, "device": DeviceError}[request.match_info["how"]]("x y")

    app.router.add_get("/fail/{how}", fail)
    async with TestClient(TestServer(app)) as client:
        yield client


async def problem(rest: Rest, method: str, path: str, status: int) -> dict[str, object]:
    async with rest.request(method, path) as response:
        assert response.status == status
        assert response.content_type == "application/problem+json"
        body = json.loads(await response.text())
    assert set(body) == {"type", "title", "status", "detail", "instance"}
    assert body["status"] == status
    assert body["instance"] == path.partition("?")[0]
    assert "\n" not in body["detail"]
    return body


async def test_answers_follow_their_schemas(rest: Rest) -> None:
    for path, model in (
        ("/v1/status", schemas.Status),
        ("/v1/images", schemas.Images),
        ("/v1/images/v41/layers.1.engram", schemas.Image),
        ("/v1/clients", schemas.Clients),
        ("/v1/events", schemas.Events),
        ("/healthz", schemas.Health),
    ):
        async with rest.get(path) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            model.model_validate_json(await response.text())


async def test_images_by_name_and_by_model(rest: Rest) -> None:
    async with rest.get("/v1/images/org/v41/layers.14.engram") as response:
        image = await response.json()
    assert image["name"] == "org/v41/layers.14.engram"
    assert (image["rows"], image["row_bytes"], image["pages"]) == (100, 264, 7)
    assert image["size_bytes"] == 7 * 4096
    assert len(image["image_id"]) == 16
    async with rest.get("/v1/images?model=v41") as response:
        names = [image["name"] for image in (await response.json())["images"]]
    assert names == ["v41/layers.1.engram", "v41/layers.14.engram"]


async def test_events_are_seen_as_soon_as_they_are_recorded(rest: Rest, daemon: Daemon) -> None:
    daemon.catalog.record("attached", "a", pid=1)
    daemon.catalog.record("detached", "a")
    async with rest.get("/v1/events?kind=attached&limit=5") as response:
        (event,) = (await response.json())["events"]
    assert (event["kind"], event["subject"], event["details"]) == ("attached", "a", {"pid": 1})
    assert event["time"].endswith("+00:00")


async def test_problems(rest: Rest) -> None:
    assert "/v1/status is a place" in (await problem(rest, "GET", "/v1/nothing", 404))["detail"]
    assert "not POST" in (await problem(rest, "POST", "/v1/images", 405))["detail"]
    missing = await problem(rest, "GET", "/v1/images/v41/layers.2.engram", 404)
    assert "v41/layers.2.engram" in missing["detail"]
    for limit in ("0", "x", "-1", "1001", "%C2%B2"):
        assert (
            "1 to 1000" in (await problem(rest, "GET", f"/v1/events?limit={limit}", 400))["detail"]
        )
    assert (await problem(rest, "GET", "/fail/device", 409))["detail"] == "x y"


async def test_a_fault_is_logged_and_keeps_its_details_to_itself(rest: Rest) -> None:
    body = await problem(rest, "GET", "/fail/fault", 500)
    assert "ZeroDivision" not in json.dumps(body)
    assert "x y" not in json.dumps(body)


async def test_health_is_red_when_a_pump_stands_still(rest: Rest, daemon: Daemon) -> None:
    daemon.plane.pumps[0].stop()
    body = await problem(rest, "GET", "/healthz", 503)
    assert "stands still" in body["detail"]


async def test_every_route_is_in_the_operators_page(rest: Rest) -> None:
    for resource in rest.app.router.resources():
        path = resource.canonical
        if not path.startswith("/fail"):
            assert f"`{path}`" in PAGE

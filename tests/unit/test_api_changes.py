"""REST that changes things: who may, on which state, all or nothing; and jobs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests import checkpoints
from tests.daemons import make_node
from tests.rest import Rest, serving
from tierd.errors import ConfigError
from tierd.io import staging
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.daemons import Node

IMAGE = "v41/layers.1.engram"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Node:
    directory = tmp_path_factory.mktemp("changes")
    tiny = checkpoints.engram(directory / "v41", rows=300)
    return make_node(directory, {"v41": tiny})


@pytest.fixture
async def rest(staged: Node, tmp_path: Path) -> AsyncIterator[Rest]:
    device = tmp_path / "device.img"
    shutil.copy(staged.device, device)
    async with serving(device, tmp_path) as made:
        yield made


async def begin(rest: Rest, **asked: Any) -> dict[str, Any]:
    status, headers, job = await rest.answer("POST", "/v1/jobs", json=asked)
    assert status == 202, job
    assert headers["Location"] == f"/v1/jobs/{job['job']}"
    return job


# --- jobs ----------------------------------------------------------------------------------------


async def test_what_is_staged_meanwhile_is_served(rest: Rest, tmp_path: Path) -> None:
    other = checkpoints.ple(tmp_path / "qwen", rows=500)
    before = dict(rest.daemon.plane.images)
    job = await begin(rest, kind="stage", checkpoint=str(other.path), model="org/qwen")
    done = await rest.job(job["job"])
    assert (done["state"], done["error"]) == ("done", "")
    assert done["progress"]["done_bytes"] == done["progress"]["total_bytes"] > 0
    (made,) = done["result"]["images"]
    assert (made["name"], made["rows"]) == ("org/qwen/layers.0.ple", 500)
    names = [image["name"] for image in (await rest.get("/v1/images"))["images"]]
    assert names == ["org/qwen/layers.0.ple", IMAGE, "v41/layers.14.engram"]
    # The images that were there are the same objects: their clients noticed nothing.
    after = rest.daemon.plane.images
    assert all(after[number] is image for number, image in before.items())
    kinds = [event["kind"] for event in (await rest.get("/v1/events"))["events"]]
    assert kinds == ["job", "staged"]
    again = await begin(rest, kind="stage", checkpoint=str(other.path), model="org/qwen")
    (same,) = (await rest.job(again["job"]))["result"]["images"]
    assert same["written_bytes"] == 0


async def test_a_dry_run_says_what_would_change_and_changes_nothing(
    rest: Rest, staged: Node, tmp_path: Path
) -> None:
    other = checkpoints.engram(tmp_path / "v41", rows=300, layers=(1, 2), seed=9)
    asked = {"kind": "stage", "checkpoint": str(other.path)}
    store = rest.daemon.plane.stores[0]
    before = store.sequence
    status, _, plan = await rest.answer("POST", "/v1/jobs?dry_run=true", json=asked)
    assert status == 200
    device = store.device.path
    assert plan["changes"] == [
        f"v41/layers.1.engram: replaced, 81920 bytes on {device}",
        f"v41/layers.2.engram: staged, 81920 bytes on {device}",
    ]
    asked["checkpoint"] = str(staged.checkpoints["v41"].path)
    _, _, plan = await rest.answer("POST", "/v1/jobs?dry_run=true", json=asked)
    assert plan["changes"] == []
    _, _, plan = await rest.answer("DELETE", f"/v1/images/{IMAGE}?dry_run=true")
    assert plan["changes"] == [f"{IMAGE}: deleted, 81920 bytes free"]
    assert (await rest.get("/v1/jobs"))["jobs"] == []
    assert store.sequence == before


async def test_verification_finds_damage(rest: Rest, staged: Node) -> None:
    checkpoint = str(staged.checkpoints["v41"].path)
    job = await begin(rest, kind="verify", full=True, checkpoint=checkpoint)
    whole = (await rest.job(job["job"]))["result"]
    assert whole["ok"]
    assert [image["image"] for image in whole["images"]] == [IMAGE, "v41/layers.14.engram"]
    image = rest.daemon.plane.named(IMAGE)
    fd = os.open(image.store.device.path, os.O_WRONLY)
    os.pwrite(fd, b"damage", image.striped.shares[0].extents[0].device_page * 4096 + 100)
    os.close(fd)
    job = await begin(rest, kind="verify", full=True, images=[IMAGE])
    found = await rest.job(job["job"])
    assert found["state"] == "done"
    assert not found["result"]["ok"]
    assert found["result"]["images"][0]["pages_bad"] == 1


async def test_a_probe_tells_read_times(rest: Rest) -> None:
    device = rest.daemon.plane.stores[0].uuid
    job = await begin(rest, kind="probe", device=device, seconds=0.05)
    depths = (await rest.job(job["job"]))["result"]["depths"]
    assert [each["depth"] for each in depths] == [1, 64]
    assert all(each["reads_per_s"] > 0 and each["p99_us"] >= each["p50_us"] for each in depths)


async def test_a_cancelled_job_leaves_nothing(
    rest: Rest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    real = staging.stage

    def held(*words: Any, progress: Any, **named: Any) -> Any:
        def report(done: int, total: int) -> None:
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            progress(done, total)

        return real(*words, progress=report, **named)

    monkeypatch.setattr(staging, "stage", held)
    other = checkpoints.ple(tmp_path / "qwen", rows=500)
    asked = {"kind": "stage", "checkpoint": str(other.path)}
    running = await begin(rest, **asked)
    waiting = await begin(rest, **asked)
    await reached.wait()
    assert (await rest.get(f"/v1/jobs/{waiting['job']}"))["state"] == "queued"
    for job in (running, waiting):
        status, _, _ = await rest.answer("POST", f"/v1/jobs/{job['job']}/cancel")
        assert status == 202
    go_on.set()
    for job in (running, waiting):
        ended = await rest.job(job["job"])
        assert ended["state"] == "cancelled"
        assert "was cancelled" in ended["error"]
    assert len(rest.daemon.plane.images) == 2
    assert rest.daemon.plane.stores[0].find("qwen/layers.0.ple") is None


async def test_a_fault_in_a_job_is_the_jobs_alone(
    rest: Rest, monkeypatch: pytest.MonkeyPatch, staged: Node
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(staging, "stage", fail)
    checkpoint = str(staged.checkpoints["v41"].path)
    job = await begin(rest, kind="stage", checkpoint=checkpoint)
    failed = await rest.job(job["job"])
    assert failed["state"] == "failed"
    assert "a fault of the daemon" in failed["error"]
    assert "secret" not in json.dumps(failed)
    monkeypatch.undo()
    job = await begin(rest, kind="stage", checkpoint=checkpoint)
    assert (await rest.job(job["job"]))["state"] == "done"


async def test_requests_that_cannot_be_done_are_refused_at_once(rest: Rest, tmp_path: Path) -> None:
    big = checkpoints.engram(tmp_path / "big", rows=90_000)
    for asked, status, words in (
        ({"kind": "stage", "checkpoint": "/nowhere"}, 409, "/nowhere"),
        ({"kind": "stage", "checkpoint": "/" + "x" * 300}, 409, "File name too long"),
        ({"kind": "stage", "checkpoint": str(big.path)}, 409, "bytes free, the tables need"),
        ({"kind": "stage", "checkpoint": str(big.path), "devices": ["x"]}, 404, "not a device"),
        ({"kind": "stage", "checkpoint": str(big.path), "tables": ["x"]}, 409, "near names"),
        ({"kind": "stage", "checkpoint": str(big.path), "model": "a b"}, 404, "cannot be used"),
        ({"kind": "verify", "images": ["v41/layers.2.engram"]}, 404, "did you mean"),
        ({"kind": "probe", "device": "x"}, 404, "not a device"),
    ):
        for query in ("", "?dry_run=true"):
            body = await rest.problem("POST", f"/v1/jobs{query}", status, json=asked)
            assert words in body["detail"]
    assert (await rest.get("/v1/jobs"))["jobs"] == []


# --- images --------------------------------------------------------------------------------------


async def test_a_deleted_image_is_gone_from_device_and_pumps(rest: Rest) -> None:
    status, _, job = await rest.answer("DELETE", f"/v1/images/{IMAGE}?wipe=true")
    assert status == 202
    assert (await rest.job(job["job"]))["result"]["wiped"] is True
    await rest.problem("GET", f"/v1/images/{IMAGE}", 404)
    path = rest.daemon.plane.stores[0].device.path
    with Store.open(path, write=False) as store:
        assert [image.name for image in store.images] == ["v41/layers.14.engram"]


async def test_the_second_of_two_administrators_is_told(
    rest: Rest, staged: Node, tmp_path: Path
) -> None:
    _, headers, _ = await rest.answer("GET", f"/v1/images/{IMAGE}")
    seen = {"If-Match": headers["ETag"]}
    other = checkpoints.engram(tmp_path / "v41", rows=300, seed=9)
    job = await begin(rest, kind="stage", checkpoint=str(other.path), tables=["layers.1.engram"])
    assert (await rest.job(job["job"]))["state"] == "done"
    problem = await rest.problem("DELETE", f"/v1/images/{IMAGE}", 412, headers=seen)
    assert "somebody else edited it" in problem["detail"]
    _, headers, _ = await rest.answer("GET", f"/v1/images/{IMAGE}")
    current = {"If-Match": f'"0", {headers["ETag"]}'}
    status, _, _ = await rest.answer("DELETE", f"/v1/images/{IMAGE}", headers=current)
    assert status == 202


# --- bodies --------------------------------------------------------------------------------------


async def test_bodies_that_do_not_fit(rest: Rest) -> None:
    async def refused(status: int, **options: Any) -> dict[str, Any]:
        return await rest.problem("POST", "/v1/jobs", status, **options)

    as_json = {"Content-Type": "application/json"}
    assert "not JSON" in (await refused(400, data=b"{", headers=as_json))["detail"]
    assert "not JSON" in (await refused(400, data=b"\xff", headers=as_json))["detail"]
    assert "application/json" in (await refused(415, data=b"{}"))["detail"]
    huge = json.dumps({"kind": "stage", "checkpoint": "/" + "x" * 70_000})
    assert "65536 bytes" in (await refused(413, data=huge, headers=as_json))["detail"]
    for body, pointer in (
        ({}, "#"),
        ({"kind": "dance"}, "#"),
        ({"kind": "stage"}, "#/checkpoint"),
        ({"kind": "stage", "checkpoint": "relative"}, "#/checkpoint"),
        ({"kind": "stage", "checkpoint": "/a\0b"}, "#/checkpoint"),
        ({"kind": "stage", "checkpoint": "/a", "modle": "x"}, "#/modle"),
        ({"kind": "verify", "sample": "3"}, "#/sample"),
        ({"kind": "verify", "images": ["x", 3]}, "#/images/1"),
        ([], "#"),
    ):
        problem = await refused(422, json=body)
        assert [each["pointer"] for each in problem["errors"]] == [pointer], body


# --- who may -------------------------------------------------------------------------------------


def ask_as(uid: int, groups: list[int], path: Path, method: str) -> int:
    """Ask as another user, in a process of its own; return the status."""
    body = json.dumps({"kind": "verify"}) if method == "POST" else ""
    request = (
        f"{method} /v1/jobs HTTP/1.1\r\nHost: tierd\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(str(path))
                sock.sendall(request.encode())
                os.write(into, sock.recv(64).split()[1])
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return int(answer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
async def test_who_may_change_and_who_may_read(staged: Node, tmp_path: Path) -> None:
    device = tmp_path / "device.img"
    shutil.copy(staged.device, device)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.name.startswith(("pytest", "popen", "test_")):
            folder.chmod(0o755)
    async with serving(device, tmp_path, **{"api.admin_group": "daemon"}) as rest:
        rest.path.chmod(0o666)
        for uid, groups, changed in ((0, [], 202), (65_534, [], 403), (65_534, [1], 202)):
            for method, status in (("GET", 200), ("POST", changed)):
                got = await asyncio.to_thread(ask_as, uid, groups, rest.path, method)
                assert got == status, (uid, groups, method)


async def test_tcp_needs_the_token(staged: Node, tmp_path: Path, capfd: Any) -> None:
    device = tmp_path / "device.img"
    shutil.copy(staged.device, device)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    overrides = {"api.listen": "127.0.0.1:0", "api.token_file": str(token)}
    async with (
        serving(device, tmp_path, **overrides) as rest,
        aiohttp.ClientSession(f"http://{rest.api.addresses['api.listen']}") as session,
    ):
        for given, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Basic " + token.read_text().strip()}, 401),
            ({"Authorization": "Bearer " + token.read_text().strip()}, 200),
        ):
            for path in ("/v1/status", "/metrics", "/openapi.json", "/healthz"):
                async with session.get(path, headers=given) as response:
                    assert response.status == status, (given, path)
        assert "0123456789abcdef" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("0123456789abcdef", 0o644, "has mode 0644, so others may read the token; run: chmod 600"),
        ("short", 0o600, "holds 5 characters, a token has at least 16"),
        (None, 0o600, "cannot be read: No such file"),
    ],
)
async def test_tokens_that_are_none(
    staged: Node, tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    device = tmp_path / "device.img"
    shutil.copy(staged.device, device)
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
        token.chmod(mode)
    overrides = {"api.listen": "127.0.0.1:0", "api.token_file": str(token)}
    with pytest.raises(ConfigError, match=words):
        async with serving(device, tmp_path, **overrides):
            pass


async def test_the_metrics_listener_shows_little_and_changes_nothing(
    staged: Node, tmp_path: Path
) -> None:
    device = tmp_path / "device.img"
    shutil.copy(staged.device, device)
    async with (
        serving(device, tmp_path, **{"metrics.listen": "127.0.0.1:0"}) as rest,
        aiohttp.ClientSession(f"http://{rest.api.addresses['metrics.listen']}") as session,
    ):
        for path, status in (
            ("/metrics", 200),
            ("/healthz", 200),
            ("/readyz", 200),
            ("/v1/status", 404),
            ("/v1/jobs", 404),
            ("/openapi.json", 404),
        ):
            async with session.get(path) as response:
                assert response.status == status, path
        async with session.post("/metrics", data=b"x" * 100_000) as response:
            assert response.status == 405


# --- placements ----------------------------------------------------------------------------------


async def test_windows_are_set_together_kept_and_served(rest: Rest) -> None:
    status, headers, before = await rest.answer("GET", "/v1/placements")
    assert [one["window_us"] for one in before["placements"]] == [None, None]
    device = rest.daemon.plane.stores[0].device.path
    (tier,) = before["placements"][0]["tiers"]
    assert (tier["tier"], tier["devices"]) == ("disk", [device])
    both = [IMAGE, "v41/layers.14.engram"]
    edit = {"placements": [{"image": name, "window_us": 1200.5} for name in both]}
    tag = {"If-Match": headers["ETag"]}
    _, _, plan = await rest.answer("PATCH", "/v1/placements?dry_run=true", json=edit, headers=tag)
    assert plan["changes"] == [f"{name}: window none -> 1200.5 us" for name in both]
    status, _, after = await rest.answer("PATCH", "/v1/placements", json=edit, headers=tag)
    assert (status, [one["window_us"] for one in after["placements"]]) == (200, [1200.5] * 2)
    assert (await rest.get(f"/v1/tables/{IMAGE}"))["window_source"] == "placement"
    assert rest.daemon.plane.named(IMAGE).window_ns == 1_200_500
    with Store.open(device, write=False) as store:
        assert store.placements == {name: {"window_us": 1200.5} for name in both}
    # The second administrator decided on what is no more.
    await rest.problem("PATCH", "/v1/placements", 412, json=edit, headers=tag)
    undo = {"placements": [{"image": IMAGE, "window_us": None}]}
    await rest.answer("PATCH", "/v1/placements", json=undo)
    assert rest.daemon.plane.named(IMAGE).window_us is None


async def test_placements_are_changed_all_or_none(rest: Rest) -> None:
    sequence = rest.daemon.plane.stores[0].sequence
    good = {"image": IMAGE, "window_us": 5}
    for bad, status in (
        ({"image": "v41/none", "window_us": 5}, 404),
        ({"image": IMAGE, "window_us": -1}, 422),
        ({"image": IMAGE}, 422),
    ):
        await rest.problem("PATCH", "/v1/placements", status, json={"placements": [good, bad]})
    assert rest.daemon.plane.named(IMAGE).window_us is None
    assert rest.daemon.plane.stores[0].sequence == sequence

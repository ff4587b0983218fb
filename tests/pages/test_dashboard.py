"""The dashboard in Debian's Chromium, on real daemons under load."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="no playwright here; run: make pages")

from tests.daemons import Daemon, running
from tests.pages import world
from tests.pages.world import Tab, door, engines, node_of, served, tab, windows_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = [
    pytest.mark.pages,
    pytest.mark.timeout(300),
    pytest.mark.skipif(world.chromium() is None, reason="no chromium here; run: make pages"),
]
STATE = "document.querySelector('#state')"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with world.browser() as made:
        yield made


@contextlib.contextmanager
def silent(one: Tab, *expected: str) -> Iterator[None]:
    """Nothing in the console, nothing for axe, at the end."""
    yield
    unexpected = [line for line in one.errors if not any(word in line for word in expected)]
    assert unexpected == []
    assert one.axe() == []


def state_is(state: str) -> str:
    return f"{STATE}?.dataset.state === '{state}'"


def test_windows_against_read_times_under_load(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=3)
    config = windows_file(tmp_path, 3)
    with (
        served(node, "--config", config, ranks=2) as (_, entrance),
        tab(chromium, entrance.url()) as one,
    ):
        one.until_live(3)
        with silent(one):
            said = "document.querySelector('#lanes tbody svg').getAttribute('aria-label')"
            one.wait(f"{said}.includes('reads below')")
            assert "window 190 us; half of" in one.page.evaluate(said)
            slack = "document.querySelector('#lanes tbody td.slack').textContent"
            one.wait(f"{slack}.includes('s')")
            one.wait("document.querySelectorAll('#splits tbody tr').length === 3")
            one.wait("document.querySelectorAll('#multiples figure').length > 0")
            one.wait("document.querySelectorAll('#client-list tbody tr').length === 2")
            one.wait("document.querySelectorAll('#series canvas').length === 6")
        # Nothing came from anywhere else, and the code is gone from the address.
        assert "code" not in one.page.url
        hosts = one.page.evaluate(
            "performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)"
        )
        assert set(hosts) == {entrance.origin}


def test_sorting_the_theme_and_the_keyboard(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=3)
    with served(node, ranks=0) as (_, entrance), tab(chromium, entrance.url()) as one:
        one.until_live(3)
        first = "document.querySelector('#lanes tbody tr .layer').textContent"
        layer = one.page.get_by_role("button", name="Layer")
        assert one.page.evaluate(first) == "1"
        layer.press("Enter")
        assert one.page.evaluate(first) == "3"
        head = "document.querySelector('#lanes thead .layer').getAttribute('aria-sort')"
        assert one.page.evaluate(head) == "descending"
        one.page.keyboard.press("Home")
        ground = "getComputedStyle(document.body).backgroundColor"
        seen = set()
        for _ in range(3):
            seen.add((one.page.evaluate(ground), one.page.locator("#theme").text_content()))
            with silent(one):
                one.page.locator("#theme").press("Enter")
        assert len({ground for ground, _ in seen}) == 2
        assert len(seen) == 3
        one.page.reload()  # a page of its own: Tab goes on from where the focus was
        one.until_live(3)
        one.page.keyboard.press("Tab")
        assert one.page.evaluate("document.activeElement.className") == "skip"


def test_no_images_and_no_clients(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=0)
    with served(node, ranks=0) as (_, entrance), tab(chromium, entrance.url()) as one, silent(one):
        one.until_live(0)
        text = one.page.inner_text("main")
        for said in ("No images are served yet", "No engine is attached", "No jobs"):
            assert said in text


def test_many_layers_devices_and_long_names(chromium: Browser, tmp_path: Path) -> None:
    long = "organisation-" * 12 + "model"
    node = node_of(tmp_path / "node", layers=64, devices=8, model=long, rows=300)
    with served(node, ranks=0) as (_, entrance), tab(chromium, entrance.url(), width=400) as one:
        one.until_live(64 + 7)
        with silent(one):
            one.wait("document.querySelectorAll('#device-list tbody tr').length === 8")
            for width in (400, 900, 1600):
                one.page.set_viewport_size({"width": width, "height": 900})
                wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert one.page.evaluate(wide) <= 0, width


def test_a_frozen_daemon_shows_as_stale_and_comes_back(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=2)
    with served(node, ranks=0) as (daemon, entrance), tab(chromium, entrance.url()) as one:
        one.until_live(2)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            one.wait(state_is("stale"))
            assert "Nothing heard from the daemon" in one.page.inner_text("#banner")
            assert one.axe() == []
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        one.wait(state_is("ok"))


def test_a_restart_under_the_open_page(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=2)
    with running(node) as daemon, door(node) as entrance, tab(chromium, entrance.url()) as one:
        one.until_live(2)
        about = "document.querySelector('#about').textContent"
        assert f"pid {daemon.pid}" in one.page.evaluate(about)
        assert daemon.stop() == 0
        one.wait(state_is("stale"))
        # What a browser says of a failed request is no fault of the page's.
        with silent(one, "Failed to load resource"):
            pass
        second = Daemon(node)
        try:
            one.wait(f"{about}.includes('pid {second.pid}')")
            one.wait(state_is("ok"))
            one.wait("document.querySelector('#event-list').textContent.includes('stopped')")
        finally:
            second.close()


def test_a_browser_that_slept_and_a_clock_that_jumped(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=2)
    with (
        running(node),
        door(node) as entrance,
        engines(node),
        tab(chromium, entrance.url()) as one,
    ):
        one.until_live(2)
        one.wait("document.querySelectorAll('#series canvas').length === 6")
        # Its clock goes on by an hour between two ticks, as that of a browser that slept.
        one.page.evaluate("const real = Date.now; Date.now = () => real.call(Date) + 3600e3")
        with one.page.expect_request(lambda request: request.url.endswith("/v1/history")):
            pass
        one.wait(state_is("ok"))
        # And back, as when somebody has set the clock right.
        one.page.evaluate("Date.now = () => 0")
        one.wait(state_is("ok"))
        before = one.page.inner_text("#about")
        one.wait(f"document.querySelector('#about').textContent !== {before!r}")
        with silent(one):
            pass


def test_an_address_is_good_for_one_browser(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=2)
    with served(node, ranks=0) as (_, entrance):
        url = entrance.url()
        with tab(chromium, url) as first:
            first.until_live(2)
            with tab(chromium, url) as second:
                second.wait("document.querySelector('#login')?.hidden === false")
                assert second.axe() == []
                # The tab keeps its key over a reload.
            first.page.reload()
            first.until_live(2)
            with tab(chromium, entrance.url()) as third:
                third.until_live(2)


def test_over_tcp_the_token_becomes_a_key(chromium: Browser, tmp_path: Path) -> None:
    node = node_of(tmp_path / "node", layers=2)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    config = tmp_path / "tierd.toml"
    config.write_text(f'[api]\nlisten = "127.0.0.1:0"\ntoken_file = "{token}"\n')
    with running(node, "--config", config) as daemon:
        (address,) = [e["api.listen"] for e in daemon.events() if "api.listen" in e]
        with tab(chromium, f"http://{address}/") as one:
            one.wait("document.querySelector('#login')?.hidden === false")
            one.page.fill("#token", "wrong")
            one.page.click("#login button")
            one.wait("document.querySelector('#refused').textContent.includes('missing or wrong')")
            one.page.fill("#token", token.read_text())
            one.page.click("#login button")
            one.until_live(2)
            kept = one.page.evaluate("JSON.stringify({...sessionStorage, ...localStorage})")
            assert token.read_text() not in kept
            assert "read." in kept

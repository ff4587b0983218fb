"""The documentation as a site, opened as files: nothing comes from outside; it can be searched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright", reason="no playwright here; run: make pages")

from tests.pages import world

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Request

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.pages,
    pytest.mark.timeout(300),
    pytest.mark.skipif(world.chromium() is None, reason="no chromium here; run: make pages"),
]


def test_every_page_opens_without_a_network_and_the_search_finds_one(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outside: list[str] = []
    errors: list[str] = []

    def asked(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            outside.append(request.url)

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(f"{message.location['url']}: {message.text}")

    with world.browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.on("request", asked)
        page.on("console", heard)
        opened = sorted(set(tmp_path.rglob("*.html")) - {tmp_path / "404.html"})  # a server's
        assert len(opened) > 40
        for file in opened:
            page.goto(file.as_uri())
            wider = "document.documentElement.scrollWidth > innerWidth"
            assert not page.evaluate(wider), f"{file.name} is wider than the window"
        page.goto((tmp_path / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("guardian", delay=20)
        page.wait_for_selector(".md-search-result__item a", timeout=60_000)
        first = page.locator(".md-search-result__item a").first.get_attribute("href")
    assert first is not None
    assert "channel" in first
    assert (outside, errors) == ([], [])

"""The log: JSON a line where nobody watches, library messages the same way, secrets masked."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
import structlog

from tierd import log

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("info", "auto")
    structlog.get_logger("tierd.x").info("attached", pid=7, token="s3cret", inner={"password": "p"})
    structlog.get_logger("tierd.x").debug("too fine")
    logging.getLogger("aiohttp.server").warning("from a %s", "library")
    try:
        code = "s3cret"
        raise ZeroDivisionError(len(code))
    except ZeroDivisionError:
        structlog.get_logger("tierd.x").exception("failed")
    captured = capsys.readouterr()
    assert captured.out == ""
    attached, library, failed = map(json.loads, captured.err.splitlines())
    assert (attached["event"], attached["level"], attached["pid"]) == ("attached", "info", 7)
    assert attached["timestamp"].endswith("Z")
    assert (attached["token"], attached["inner"]) == (log.MASK, {"password": log.MASK})
    assert (library["event"], library["level"]) == ("from a library", "warning")
    assert failed["exception"][0]["exc_type"] == "ZeroDivisionError"
    assert "s3cret" not in captured.err


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("warning", "console")
    structlog.get_logger("tierd.x").info("unseen")
    structlog.get_logger("tierd.x").warning("seen", secret_key="s3cret", path="/dev/a")
    text = capsys.readouterr().err
    assert "unseen" not in text
    assert "s3cret" not in text
    assert "path=/dev/a" in text

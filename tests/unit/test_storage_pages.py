"""The page of errors below a table names every class there is, every reason and every finding."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tierd import errors
from tierd.io import _core
from tierd.io.blocks import FAULT_WORDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "operating/errors.md").read_text()

STORAGE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.DeviceError | errors.ImageError | errors.RdmaError)
]


@pytest.mark.parametrize("kind", STORAGE, ids=lambda kind: kind.__name__)
def test_every_class_has_its_row(kind: type) -> None:
    assert re.search(rf"^\| `{kind.__name__}` \|", PAGE, re.MULTILINE)


def test_no_row_is_of_a_class_that_is_no_more() -> None:
    named = set(re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE))
    assert named == {kind.__name__ for kind in STORAGE}


def test_every_reason_of_a_failed_request_is_there() -> None:
    reasons = {"read_error", "short_read", "wrong_page", "bad_crc", "cancelled"}
    assert reasons <= {status.name for status in _core.protocol.Status}
    assert all(f"| `{reason}` |" in PAGE for reason in reasons)


def test_every_finding_of_the_walker_is_there() -> None:
    for text in FAULT_WORDS.values():
        words = text.removeprefix("a page ")
        assert f"`{text}`" in PAGE or f"`{words}`" in PAGE, text

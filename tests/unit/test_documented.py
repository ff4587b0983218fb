"""Nothing that an operator can meet goes without a word in the docs."""

from __future__ import annotations

from bench import undocumented


def test_everything_is_documented() -> None:
    assert undocumented.undocumented() == []


def test_events_are_found_in_the_code() -> None:
    assert {"started", "attached", "job", "failed"} <= undocumented.event_kinds()

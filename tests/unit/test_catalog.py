"""History: kept in order and within bounds, and never in the way of anything else."""

from __future__ import annotations

import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest

import tierd.catalog
from tierd.catalog import QUEUE_MAX, Catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlite_utils import Database


@pytest.fixture
def make() -> Iterator[Callable[..., Catalog]]:
    opened: list[Catalog] = []

    def build(path: Path, **options: int) -> Catalog:
        opened.append(Catalog(path, **options))
        return opened[-1]

    yield build
    for catalog in opened:
        catalog.close()


def test_events_are_kept_newest_first(tmp_path: Path, make: Callable[..., Catalog]) -> None:
    path = tmp_path / "catalog.db"
    catalog = make(path)
    catalog.record("started", "boot", version="1")
    catalog.record("attached", "client", pid=7)
    catalog.close()
    again = make(path)
    assert [(e["kind"], e["subject"], e["details"]) for e in again.events()] == [
        ("attached", "client", {"pid": 7}),
        ("started", "boot", {"version": "1"}),
    ]
    assert [e["kind"] for e in again.events(kind="started")] == ["started"]
    assert [e["kind"] for e in again.events(limit=1)] == ["attached"]


def test_the_oldest_events_go_first(tmp_path: Path, make: Callable[..., Catalog]) -> None:
    catalog = make(tmp_path / "catalog.db", events_max=100)
    for number in range(350):
        catalog.record("attached", n=number)
    assert catalog.flush()
    kept = [event["details"]["n"] for event in catalog.events(1000)]
    assert kept == list(range(349, 349 - len(kept), -1))
    assert 100 <= len(kept) <= 200
    assert catalog.lost == 0


def test_deleting_the_file_loses_history_only(tmp_path: Path, make: Callable[..., Catalog]) -> None:
    path = tmp_path / "catalog.db"
    catalog = make(path)
    catalog.record("started")
    assert catalog.flush()
    (before,) = catalog.events()
    for file in tmp_path.iterdir():
        file.unlink()
    catalog.record("stopped")
    assert catalog.flush()
    (after,) = catalog.events()
    assert after["kind"] == "stopped"
    assert after["id"] > before["id"]  # who waits for what comes after an event gets it
    assert catalog.degraded == ""


def test_a_damaged_file_is_moved_aside(tmp_path: Path, make: Callable[..., Catalog]) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"no database at all " * 500)
    catalog = make(path)
    catalog.record("started")
    assert catalog.flush()
    assert [event["kind"] for event in catalog.events()] == ["started"]
    aside = list(tmp_path.glob("catalog.db.damaged-*"))
    assert len(aside) == 1
    assert aside[0].read_bytes().startswith(b"no database")


def test_a_directory_that_is_not_there_degrades_and_heals(
    tmp_path: Path, make: Callable[..., Catalog]
) -> None:
    path = tmp_path / "later" / "catalog.db"
    catalog = make(path)
    catalog.record("started")
    assert catalog.flush()
    assert str(path) in catalog.degraded
    assert catalog.lost == 1
    assert catalog.events() == []
    path.parent.mkdir()
    catalog.record("attached")
    assert catalog.flush()
    assert catalog.degraded == ""
    assert [event["kind"] for event in catalog.events()] == ["attached"]


def test_a_full_disk_degrades_and_heals(
    tmp_path: Path, make: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLite's own page limit makes the very error of a full disk.
    create, limits = tierd.catalog._create, iter([20])

    def create_small(path: Path) -> Database:
        database = create(path)
        if pages := next(limits, None):
            database.execute(f"pragma max_page_count = {pages}")
        return database

    monkeypatch.setattr(tierd.catalog, "_create", create_small)
    catalog = make(tmp_path / "catalog.db")
    while not catalog.degraded:
        catalog.record("attached", text="x" * 2000)
        assert catalog.flush()
    assert "full" in catalog.degraded
    assert catalog.lost == 1
    kept = len(catalog.events(1000))
    catalog.record("detached")
    assert catalog.flush()
    assert catalog.degraded == ""
    assert catalog.events(1)[0]["kind"] == "detached"
    assert len(catalog.events(1000)) == kept + 1


def test_a_hanging_disk_blocks_nobody(tmp_path: Path, make: Callable[..., Catalog]) -> None:
    path = tmp_path / "catalog.db"
    catalog = make(path)
    catalog.record("started")
    assert catalog.flush()
    release = threading.Event()
    catalog._write = lambda row: release.wait()
    for _ in range(QUEUE_MAX + 10):
        catalog.record("attached")
    assert catalog.lost >= 1
    assert "too slow" in catalog.degraded
    release.set()


def test_a_locked_database_degrades(tmp_path: Path, make: Callable[..., Catalog]) -> None:
    path = tmp_path / "catalog.db"
    catalog = make(path)
    catalog.record("started")
    assert catalog.flush()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin immediate")
    catalog.record("attached")
    assert catalog.flush(10)
    assert "locked" in catalog.degraded
    other.execute("commit")
    other.close()

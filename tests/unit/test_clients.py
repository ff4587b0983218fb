"""How the daemon counts an engine's ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tierd.api import clients


def rank(number: int, world: int = 4, *, expected: int | None = None, engine: str = "e 1") -> Any:
    return SimpleNamespace(
        engine=engine, rank=number, world=world, expected_ranks=expected or world
    )


def counted(*attached: Any) -> list[tuple[str, int, int, list[int]]]:
    return [
        (one.engine, one.attached_ranks, one.expected_ranks, one.missing_ranks)
        for one in clients._engines(attached)
    ]


def test_a_rank_that_is_missing_is_named() -> None:
    assert counted() == []
    assert counted(*map(rank, range(4))) == [("e 1", 4, 4, [])]
    assert counted(rank(0), rank(3)) == [("e 1", 2, 4, [1, 2])]


def test_a_node_with_a_part_of_the_ranks_cannot_name_them() -> None:
    assert counted(rank(4, 8, expected=4), rank(5, 8, expected=4)) == [("e 1", 2, 4, [])]


def test_servers_of_one_engine_are_counted_together() -> None:
    two = [rank(number) for number in (0, 1, 2, 3, 0, 1, 2)]
    assert counted(*two) == [("e 1", 7, 8, [3])]
    assert counted(rank(0, 1), rank(0), rank(1, engine="f 2")) == [
        ("e 1", 1, 1, []),
        ("e 1", 1, 4, [1, 2, 3]),
        ("f 2", 1, 4, [0, 2, 3]),
    ]

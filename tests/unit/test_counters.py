"""Many who poll cost the pumps no more than one; who asks now and then sees the present."""

from __future__ import annotations

import asyncio
from typing import Any

from tierd.daemon.counters import BURST, Counters


def test_who_asks_now_and_then_sees_the_present_and_a_crowd_asks_seldom() -> None:
    looks = 0

    def count() -> list[dict[str, Any]]:
        nonlocal looks
        looks += 1
        return [{"looks": looks}]

    async def read() -> None:
        counters = Counters(count)
        for number in range(1, int(BURST) - 1):
            assert await counters.read() == [{"looks": number}]
        crowd = await asyncio.gather(*(counters.read() for _ in range(500)))
        assert all(found[0]["looks"] >= BURST - 2 for found in crowd)
        assert looks <= BURST + 3

    asyncio.run(read())


def test_a_failed_look_fails_its_readers_and_not_the_next() -> None:
    answers: list[Any] = [OSError("no"), [{"pages": 1}]]

    def count() -> list[dict[str, Any]]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        found: list[dict[str, Any]] = answer
        return found

    async def read() -> None:
        counters = Counters(count)
        first = await asyncio.gather(counters.read(), return_exceptions=True)
        assert isinstance(first[0], OSError)
        assert await counters.read() == [{"pages": 1}]

    asyncio.run(read())

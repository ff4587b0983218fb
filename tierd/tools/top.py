"""The live view of ``tierd top``, drawn from two looks at the REST interface.

What nobody has measured is shown as unknown, never as a number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table

from tierd.tools.show import duration, make_console, size

if TYPE_CHECKING:
    from collections.abc import Callable

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What the daemon said at one moment.

    Attributes:
        at: seconds on the monotonic clock.
        status: GET /v1/status.
        tables: of GET /v1/tables.
        jobs: of GET /v1/jobs.
    """

    at: float
    status: dict[str, Any]
    tables: list[dict[str, Any]]
    jobs: list[dict[str, Any]]


def live(look: Callable[[], Look], every_s: float) -> None:
    """Draw until Ctrl-C."""
    before = look()
    with contextlib.suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as shown:
        shown.update(_draw(before, None), refresh=True)
        while True:
            time.sleep(every_s)
            now = look()
            shown.update(_draw(now, before), refresh=True)
            before = now


def once(look: Look) -> None:
    """Print one picture; rates need two looks, so they are unknown."""
    make_console().print(_draw(look, None))


def to_json(look: Look) -> dict[str, Any]:
    """Return what the picture is drawn from."""
    return {"status": look.status, "tables": look.tables, "jobs": look.jobs}


def _draw(now: Look, before: Look | None) -> Group:
    state = now.status
    head = (
        f"{state['name']} {state['version']}, pid {state['pid']}, up "
        f"{duration(state['uptime_s'])}, {state['clients']} clients, {state['rings']} rings, "
        f"doctor: {state['doctor']['verdict']}"
    )
    return Group(
        head, "", _tables(now, before), "", _pumps(now, before), "", _devices(now), *_jobs(now)
    )


def _tables(now: Look, before: Look | None) -> Table:
    made = _table(
        ("TABLE", "left"),
        *((name, "right") for name in ("WINDOW", "READ", "SLACK", "STEPS/s", "LATE", "STALL")),
        *((name, "right") for name in ("LOOKUPS/s", "HITS", "MISSES/s")),
    )
    earlier = {table["name"]: table for table in before.tables} if before else {}
    for table in now.tables:
        old = earlier.get(table["name"])
        seconds = now.at - before.at if before else 0.0

        def change(counter: str, old: Any = old, table: Any = table) -> int | None:
            return None if old is None else max(0, table[counter] - old[counter])

        steps, lookups = change("steps"), change("lookups")
        made.add_row(
            table["name"],
            _window(table),
            _us(table.get("read_us")),
            _us(table.get("slack_us")),
            _rate(steps, seconds),
            _share(change("late_steps"), steps),
            _stall(change("stall_ns"), seconds),
            _rate(lookups, seconds),
            _share(change("hits"), lookups),
            _rate(change("misses"), seconds),
        )
    return made


def _pumps(now: Look, before: Look | None) -> Table:
    made = _table(
        ("PUMP", "left"),
        ("TRANSPORT", "left"),
        *((name, "right") for name in ("REQUESTS/s", "READS/s", "IN FLIGHT", "FAILED", "CPU")),
    )
    seconds = now.at - before.at if before else 0.0
    for number, pump in enumerate(now.status["pumps"]):
        old = before.status["pumps"][number] if before else None
        cpu = None
        if old is not None:
            names = ("cpu_user_ns", "cpu_system_ns")
            cpu = sum(pump[name] - old[name] for name in names)
        made.add_row(
            str(number),
            pump["transport"],
            _rate(old and pump["requests"] - old["requests"], seconds),
            _rate(old and pump["reads"] - old["reads"], seconds),
            str(pump["in_flight"]),
            f"{sum(pump['failed'].values()):,}",
            _share(cpu, seconds * 1e9),
        )
    return made


def _devices(now: Look) -> Table:
    made = _table(("DEVICE", "left"), ("IMAGES", "right"), ("FREE", "right"), ("SIZE", "right"))
    for device in now.status["devices"]:
        free, whole = size(device["free_bytes"]), size(device["size_bytes"])
        made.add_row(device["path"], str(device["images"]), free, whole)
    return made


def _jobs(now: Look) -> list[Any]:
    running = [job for job in now.jobs if job["state"] in {"queued", "running"}]
    if not running:
        return []
    made = _table(("JOB", "left"), ("KIND", "left"), ("ABOUT", "left"), ("DONE", "right"))
    made.add_column("LEFT", justify="right")
    for job in running:
        now_ = job["progress"]
        left = UNKNOWN if now_["left_s"] is None else duration(now_["left_s"])
        done = _share(now_["done_bytes"], now_["total_bytes"])
        made.add_row(job["job"], job["kind"], job["subject"], done, left)
    return ["", made]


def _table(*columns: tuple[str, str]) -> Table:
    made = Table(box=None, pad_edge=False)
    for name, side in columns:
        made.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    return made


def _window(table: dict[str, Any]) -> str:
    return UNKNOWN if table["window_source"] == "assumed" else _us(table["window_us"])


def _us(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} us"


def _rate(count: int | None, seconds: float) -> str:
    return UNKNOWN if count is None or seconds <= 0 else f"{count / seconds:,.0f}"


def _share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


def _stall(nanoseconds: int | None, seconds: float) -> str:
    """Milliseconds waited in each second."""
    if nanoseconds is None or seconds <= 0:
        return UNKNOWN
    return f"{nanoseconds / 1e6 / seconds:,.1f} ms/s"

"""Tables for people: what ``tierd status`` and ``tierd images`` print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS_MAX = 400


def images(listed: list[dict[str, Any]]) -> None:
    """Print images."""
    table = Table(box=None, pad_edge=False)
    for name in ("IMAGE", "ROWS", "ROW", "FORMAT", "SIZE", "GEN", "DEVICE"):
        table.add_column(name, justify="right" if name in {"ROWS", "ROW", "SIZE"} else "left")
    for image in listed:
        table.add_row(
            image["name"],
            f"{image['rows']:,}",
            f"{image['row_bytes']} B",
            image["row_format"],
            size(image["size_bytes"]),
            str(image["generation"]),
            " ".join(image["devices"]),
        )
    console = make_console()
    console.print(table)
    for image in listed:
        for copy in image.get("copies", ()):
            console.print(f"copy of {image['name']}: {' '.join(copy)}")
        if image.get("fault"):
            console.print(f"not served: {image['name']}: {image['fault']}")


def status(
    state: dict[str, Any], clients: list[dict[str, Any]], engines: list[dict[str, Any]]
) -> None:
    """Print the daemon's state, its clients, and which ranks of an engine are missing."""
    console = make_console()
    head = (
        f"{state['name']} {state['version']}, pid {state['pid']}, up {duration(state['uptime_s'])}"
    )
    for one in state["lossy"]:
        console.print(
            f"LOSSY: {one['image']}: rows that no trace saw ({1 - one['seen_share']:.1%} of the "
            f"table) are served as zero: {one['seen_set']}"
        )
    console.print(head)
    for device in state["devices"]:
        direct = "direct" if device["direct"] else f"not direct: {device['direct_reason']}"
        room = f"{size(device['free_bytes'])} of {size(device['size_bytes'])} free"
        console.print(f"  device {device['path']}: {device['images']} images, {room}, {direct}")
    for number, pump in enumerate(state["pumps"]):
        reason = f" ({pump['transport_reason']})" if pump["transport_reason"] else ""
        console.print(f"  pump {number}: {pump['transport']}{reason}")
    for held in state["dram"]:
        place = {
            "ready": f"in memory, {held['memory']}",
            "loading": f"{held['loaded_pages']} of {held['pages']} pages are in memory",
            "failed": f"not in memory: {held['reason']}",
        }
        console.print(f"  {held['image']}: {place[held['state']]}")
    for line in _concerns(state):
        console.print(f"  {line}")
    console.print(f"  {state['images']} images, {len(clients)} clients")
    for engine in engines:
        text = f"{engine['attached_ranks']} of {engine['expected_ranks']} ranks attached"
        if engine["missing_ranks"]:
            text += f"; missing: {', '.join(map(str, engine['missing_ranks']))}"
        console.print(f"  {engine['engine']}: {text}")
    if clients:
        console.print(_rings(clients))


def _concerns(state: dict[str, Any]) -> Iterator[str]:
    """Yield what an operator should know beyond that it runs, a line each."""
    doctor = state["doctor"]
    if doctor["problems"] or doctor["warnings"]:
        found = f"{doctor['problems']} problems, {doctor['warnings']} warnings"
        yield f"the machine has {found}; run: tierd doctor"
    if state["history"]["degraded"]:
        yield f"history is not being kept: {state['history']['degraded']}"
    yield _scrub(state["scrub"])
    for name, damage in state["scrub"]["damaged"].items():
        yield f"damaged: {name}: {'; '.join(damage[:4])}; run: tierd verify {name}"
    for absent in state["absent_devices"]:
        yield f"device {absent['device']} is not there: {absent['reason']}"
    if state["exports_fault"]:
        yield f"nothing is exported: {state['exports_fault']}"
    for peer in state["peers"]:
        how = f"over {peer['transport']}: {', '.join(peer['images']) or 'no image of ours'}"
        if peer["up"] and peer["reason"]:
            how = f"{how}; some of its reads are refused: {peer['reason']}"
        yield f"peer {peer['name']}: {how if peer['up'] else 'away: ' + peer['reason']}"
    for image in state["incomplete_images"]:
        yield f"not served: {image['name']}: {image['reason']}"
    for name in state["shadowed_images"]:
        yield f"not served: {name}: another device has it as well"
    for refusal in state["refusals"]:
        yield f"refused pid {refusal['pid']}: {refusal['reason']}"


def _scrub(scrub: dict[str, Any]) -> str:
    """Say in a line how far the scrub has come."""
    passes = f"{scrub['passes']} passes, {scrub['bad_pages']} bad pages"
    where = f", at page {scrub['next_page']:,} of {scrub['image']}" if scrub["image"] else ""
    why = "".join(f", {scrub[key]}" for key in ("fault", "save_error") if scrub[key])
    return f"scrub: {scrub['state']}{where}, {passes}{why}"


def jobs(listed: list[dict[str, Any]]) -> None:
    """Print jobs, newest first."""
    if not listed:
        make_console().print("no jobs")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("JOB", "KIND", "ABOUT", "STATE", "DONE", "LEFT", "BY", "CREATED"):
        table.add_column(name, justify="right" if name in {"DONE", "LEFT"} else "left")
    for job in listed:
        now = job["progress"]
        share = f"{now['done_bytes'] / now['total_bytes']:.0%}" if now["total_bytes"] else "-"
        left = "-" if now["left_s"] is None else duration(now["left_s"])
        names = ("job", "kind", "subject", "state")
        created = job["created_at"][:19].replace("T", " ")
        table.add_row(*(job[name] for name in names), share, left, job["caller"], created)
    make_console().print(table)


def job(job: dict[str, Any]) -> None:
    """Print one job."""
    console, now = make_console(), job["progress"]
    console.print(f"job {job['job']}: {job['kind']} {job['subject']}, {job['state']}")
    console.print(f"  asked for by {job['caller']} at {job['created_at']}")
    if now["total_bytes"]:
        rate = "" if now["bytes_per_s"] is None else f", {size(int(now['bytes_per_s']))}/s"
        left = "" if now["left_s"] is None else f", {duration(now['left_s'])} left"
        console.print(f"  {size(now['done_bytes'])} of {size(now['total_bytes'])}{rate}{left}")
    if now["doing"]:
        console.print(f"  {now['doing']}")
    if job["error"]:
        console.print(f"  {job['error']}")
    if job["result"] is not None:
        console.print(json.dumps(job["result"], indent=2))


def findings(found: list[dict[str, Any]]) -> None:
    """Print an examination, the worst first."""
    console = make_console()
    words = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM"}
    for finding in found:
        about = f" {finding['subject']}" if finding["subject"] else ""
        head = f"{words[finding['severity']]:<8} {finding['check']}{about}: {finding['finding']}"
        console.print(head)
        if finding["severity"] == "ok":
            continue
        for name in ("cause", "evidence"):
            if finding[name]:
                console.print(f"         {name}: {finding[name]}")
        if finding["cure"]:
            console.print(f"         run: {finding['cure']}")


def event(event: dict[str, Any]) -> str:
    """Return one event in a line."""
    details = " ".join(f"{key}={value}" for key, value in event["details"].items())
    return (
        f"{event['time'][:19].replace('T', ' ')}  {event['kind']:<10} {event['subject']}  {details}"
    )


def _rings(clients: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("ENGINE", "PID", "RANK", "IMAGE", "LOOKUPS", "HITS", "STEPS", "LATE", "STALL"):
        table.add_column(name, justify="left" if name in {"ENGINE", "IMAGE"} else "right")
    for client in clients:
        for ring in client["rings"]:
            ratio = ring["hit_ratio"]
            table.add_row(
                client["engine"],
                str(client["pid"]),
                f"{client['rank']}/{client['world']}",
                ring["image"],
                f"{ring['lookups']:,}",
                "-" if ratio is None else f"{ratio:.1%}",
                f"{ring['steps']:,}",
                f"{ring['late_steps']:,}",
                f"{ring['stall_ns'] / 1e6:,.1f} ms",
            )
    return table


def size(count: int) -> str:
    """Write a number of bytes."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Write a time span in its two largest units."""
    rest = int(seconds)
    days, rest = divmod(rest, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def make_console() -> Console:
    """Standard output, for text that people copy and scripts read."""
    # Paths and names are neither cut, wrapped nor coloured: people copy them, scripts read them.
    return Console(highlight=False, markup=False, width=COLUMNS_MAX, color_system=None)

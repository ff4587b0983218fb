"""Devices and single images for people: what ``tierd devices`` and ``tierd images show`` print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from tierd.tools import show

if TYPE_CHECKING:
    from rich.console import Console


def image(found: dict[str, Any]) -> None:
    """Print one image."""
    console = show.make_console()
    console.print(f"{found['name']}, image {found['image_id']}, generation {found['generation']}")
    console.print(
        f"  {found['rows']:,} rows of {found['row_bytes']} B ({found['row_format']}), "
        f"{found['pages']:,} pages, {show.size(found['size_bytes'])}, staged {found['staged_at']}"
    )
    for share in found["shares"]:
        pages = sum(pages for _, pages, _ in share["extents"])
        fault = f": {share['fault']}" if share["fault"] else ""
        held = f"{show.size(pages * 4096)} in {len(share['extents'])} extents"
        console.print(f"  device {share['device']} ({share['device_uuid']}): {held}{fault}")
    if found["placement"]:
        console.print(f"  placement {found['placement']}")
    console.print(f"  fingerprint {found['fingerprint']}")
    console.print(f"  digest {found['digest']} ({found['digest_kind']})")
    if found["fault"]:
        console.print(f"  cannot be served: {found['fault']}")


def devices(listed: list[dict[str, Any]]) -> None:
    """Print devices, a line each."""
    table = Table(box=None, pad_edge=False)
    for name in ("DEVICE", "STATE", "SIZE", "FREE", "IMAGES", "UUID", ""):
        table.add_column(name, justify="right" if name in {"SIZE", "FREE", "IMAGES"} else "left")
    for found in listed:
        known = "size_bytes" in found
        table.add_row(
            found["path"],
            found["state"],
            show.size(found["size_bytes"]) if known else "-",
            show.size(found["free_bytes"]) if known else "-",
            str(found["images"]) if known else "-",
            found.get("uuid") or "-",
            found.get("problem", ""),
        )
    show.make_console().print(table)


def device(found: dict[str, Any]) -> None:
    """Print everything about one device."""
    console = show.make_console()
    room = show.size(found["size_bytes"])
    direct = "direct" if found["direct"] else f"not direct: {found['direct_reason']}"
    console.print(
        f"{found['path']}: {found['state']}, uuid {found['uuid']}, {room}, "
        f"blocks of {found['block_size']} B, {direct}"
    )
    for text in (found["problem"], found["holder"]):
        if text:
            console.print(f"  {text}")
    for root in found["roots"]:
        values = {k: v for k, v in root.items() if k not in {"slot", "fault", "offset", "magic"}}
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        console.print(
            f"  root {root['slot']}: {root['fault'] or 'whole'}{': ' * bool(shown)}{shown}"
        )
    for kind in ("images", "parts", "wipes"):
        for held in found[kind]:
            room = show.size(sum(extent["bytes"] for extent in held["extents"]))
            where = ", ".join(f"{e['offset']}+{e['bytes']}" for e in held["extents"][:8])
            of = f", {held['pages']:,} pages" if kind == "images" else f", home {held['home']}"
            of += ", not finished" if kind == "wipes" else ""
            console.print(
                f"  {kind[:-1]} {held['name']}, {held['image_id']} generation "
                f"{held['generation']}{of}: {room} at {where}"
            )
    console.print(
        f"  free: {show.size(found['free_bytes'])} in {len(found['free_runs'])} runs"
        + "".join(
            f"\n    {run['offset']}: {show.size(run['bytes'])}" for run in found["free_runs"][:64]
        )
    )
    if found["leased"]:
        held = show.size(sum(end - start for start, end in found["leased"]))
        console.print(f"  leased to readers: {held}")
    _salvaged(console, found["salvaged"])


def _salvaged(console: Console, salvaged: dict[str, Any]) -> None:
    if not salvaged:
        return
    names = ", ".join(salvaged["images_named"]) or "none"
    console.print(f"  images that a table which cannot be believed names: {names}")
    for held in salvaged["pages_of"]:
        console.print(
            f"  about {held['units']} units of 2 MiB begin with a page of image "
            f"{held['image_id']}, generation {held['generation']}"
        )

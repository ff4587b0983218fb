"""What an operator can meet and no page explains: commands, routes, keys, metrics, events."""

from __future__ import annotations

import re
from pathlib import Path

from tierd import config
from tierd.api import openapi
from tierd.api.metrics import METRICS
from tierd.api.server import RESOURCES
from tierd.cli import cli
from tierd.cli.reference import walk

ROOT = Path(__file__).resolve().parents[1]


def pages(*, but: tuple[str, ...] = ()) -> str:
    """The text of every page, without those that are generated."""
    found = [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name not in but]
    return "\n".join(path.read_text() for path in [*found, ROOT / "README.md"])


def undocumented() -> list[str]:
    """Return everything that is missing, one line each."""
    by_hand = pages(but=("cli.md", "metrics.md", "config.md"))
    missing = [
        f"command: tierd {' '.join(path)}"
        for path, command in walk(cli.everything())
        if not hasattr(command, "commands")
        and (
            not re.search(rf"tierd(\.cli)? {re.escape(' '.join(path))}", by_hand)
            or not command.help
        )
    ]
    rest = (ROOT / "docs/operating/rest.md").read_text()
    for path, item in openapi.document(RESOURCES)["paths"].items():
        for method, operation in item.items():
            shown = f"`{path}`" if method == "get" else f"`{method.upper()} {path}`"
            if shown not in rest or not operation["summary"]:
                missing.append(f"route: {method.upper()} {path}")
    keys = (ROOT / "docs/config.md").read_text()
    for section, key, field in config.walk():
        if f"| `{key}` |" not in keys or not field.description:
            missing.append(f"key: {section}.{key}")
    numbers = (ROOT / "docs/metrics.md").read_text()
    missing += [f"metric: {m.name}" for m in METRICS if f"| `{m.name}` |" not in numbers]
    for kind in sorted(event_kinds()):
        if f"`{kind}`" not in rest:
            missing.append(f"event: {kind}")
    return missing


def event_kinds() -> set[str]:
    """Every kind of event that the code records."""
    kinds: set[str] = set()
    for path in (ROOT / "tierd").rglob("*.py"):
        kinds |= set(re.findall(r"catalog\.record\(\s*\"(\w+)\"", path.read_text()))
    return kinds

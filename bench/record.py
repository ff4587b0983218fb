"""One measure, as a record in bench/results/<topic>.json."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import operator
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
FIELDS = (
    "id", "value", "unit", "bar", "met", "command", "machine", "versions", "date", "repeats",
    "spread",
)  # fmt: skip


def bars() -> dict[str, tuple[str, float]]:
    """Every measure's bar: id -> (operator, number)."""
    data = json.loads((ROOT / "bench" / "measures.json").read_text())
    return {name: (bar[0], float(bar[1])) for name, bar in data.items()}


def machine() -> str:
    """The machine in words: processor, cores, memory, kernel."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def versions(*packages: str) -> dict[str, str]:
    """The versions that a result depends on."""
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = {"python": platform.python_version(), "commit": head.stdout.strip() or "unknown"}
    for package in ("tierd", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def record(
    measure: str,
    value: float,
    *,
    unit: str,
    command: str,
    repeats: int,
    spread: str,
    detail: dict[str, Any] | None = None,
    limit: str | None = None,
    packages: tuple[str, ...] = (),
    machine_name: str | None = None,
) -> dict[str, Any]:
    """Build a record; `met` follows from the bar, and a missed bar wants a `limit` in words."""
    sign, number = bars()[measure]
    met = bool(OPERATORS[sign](value, number))
    out: dict[str, Any] = {
        "id": measure,
        "value": value,
        "unit": unit,
        "bar": [sign, number],
        "met": met,
        "command": command,
        "machine": machine_name or machine(),
        "versions": versions(*packages),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "repeats": repeats,
        "spread": spread,
    }
    if detail:
        out["detail"] = detail
    if not met:
        out["limit"] = limit or "not analysed yet"
    return out


def save(topic: str, records: list[dict[str, Any]]) -> Path:
    """Write records into the topic's file, replacing those of the same id, ordered by id."""
    path = RESULTS / f"{topic}.json"
    kept = {r["id"]: r for r in json.loads(path.read_text())} if path.exists() else {}
    kept.update({r["id"]: r for r in records})
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = [kept[name] for name in sorted(kept)]
    path.write_text(json.dumps(ordered, indent=1) + "\n")
    return path

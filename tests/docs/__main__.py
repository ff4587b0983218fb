"""Runs every shell command that the documentation shows: ``python -m tests.docs [PAGE...]``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.docs.commands import ROOT, blocks, pages

PAGE_TIMEOUT_S = 600


def run(page: str) -> list[dict[str, str]]:
    """Follow a page on a node of its own; a row for each of its commands."""
    command = [
        "unshare",
        "-m",
        "--propagation",
        "private",
        sys.executable,
        "-m",
        "tests.docs.reader",
    ]
    done = subprocess.run(
        [*command, page], cwd=ROOT, check=False, capture_output=True, text=True,
        timeout=PAGE_TIMEOUT_S,
    )  # fmt: skip
    rows: list[dict[str, str]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        rows.append({"line": "0", "text": page, "reason": "", "wrong": done.stderr[-2000:]})
    return rows


def follow_all(names: list[str]) -> tuple[int, int, int]:
    """Follow pages and say what happened: commands run, failed, and not run for a reason."""
    ran = failed = left = 0
    for page in names:
        if not blocks(ROOT / page):
            continue
        for row in run(page):
            where = f"{page}:{row['line']}"
            if row["reason"]:
                left += 1
                print(f"  not run  {where}: {row['text']}: {row['reason']}")
            elif row["wrong"]:
                ran, failed = ran + 1, failed + 1
                print(
                    f"  FAILED   {where}: {row['text']}\n    "
                    + row["wrong"].replace("\n", "\n    ")
                )
            else:
                ran += 1
        sys.stdout.flush()
    return ran, failed, left


def main() -> None:
    """Fail if a command does."""
    if os.geteuid() != 0:
        print("docs: SKIPPED: their commands want a mount namespace and loop devices, so root")
        return
    names = sys.argv[1:] or [path.relative_to(ROOT).as_posix() for path in pages()]
    for name in names:
        if not Path(ROOT / name).is_file():
            sys.exit(f"docs: there is no page {name}")
    ran, failed, left = follow_all(names)
    print(f"docs: {ran} commands run, {failed} failed, {left} not run, each for its reason")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

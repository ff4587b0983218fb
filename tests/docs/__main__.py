"""Runs every shell command that the documentation shows: ``python -m tests.docs [PAGE...]``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.docs.commands import ROOT, blocks, pages
from tests.docs.reader import DEVICES, MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_TIMEOUT_S = 1200
AT_ONCE = 2
# Mounts and processes of its own: a page that ends daemons by name must not end another page's.
NAMESPACE = (
    *("unshare", "--mount", "--propagation", "private"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)


def run(page: str) -> list[dict[str, str]]:
    """Follow a page on a node of its own; a row for each of its commands."""
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.docs.reader", page],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=PAGE_TIMEOUT_S,
    )  # fmt: skip
    rows: list[dict[str, str]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        rows.append({"line": "0", "text": page, "reason": "", "wrong": done.stderr[-2000:]})
    return rows


@contextlib.contextmanager
def mount_points() -> Iterator[None]:
    """Where the nodes' devices and models are mounted; taken away again if they were made here."""
    missing = [Path(name) for name in (*DEVICES, str(MODELS)) if not Path(name).exists()]
    try:
        for path in missing:
            path.mkdir() if path == MODELS else path.touch()
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir() if path == MODELS else path.unlink()


def cannot() -> str:
    """Why no node can be made on this machine; ""."""
    if os.geteuid() != 0:
        return "only root may mount"
    for words in ([*NAMESPACE, "true"], ["losetup", "-f"]):
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(words)}: {done.stderr.strip()}"
    return ""


def follow_all(names: list[str]) -> tuple[int, int, int]:
    """Follow pages and say what happened: commands run, failed, and not run for a reason."""
    ran = failed = left = 0
    wanted = [page for page in names if blocks(ROOT / page)]
    with mount_points(), ThreadPoolExecutor(AT_ONCE) as pool:
        for page, rows in zip(wanted, pool.map(run, wanted), strict=True):
            for row in rows:
                what = f"{page}:{row['line']}: {row['text']}"
                ran, left = ran + (not row["reason"]), left + bool(row["reason"])
                failed += bool(row["wrong"])
                if row["reason"]:
                    print(f"  not run  {what}: {row['reason']}")
                elif row["wrong"]:
                    print(f"  FAILED   {what}\n    " + row["wrong"].replace("\n", "\n    "))
            sys.stdout.flush()
    return ran, failed, left


def main() -> None:
    """Fail if a command does."""
    if why := cannot():
        print(f"docs: SKIPPED: no node of their own for the pages here: {why}")
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

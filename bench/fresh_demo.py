"""How long a newcomer waits: `make demo` in a fresh clone, with empty pip caches."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.record import ROOT


def run(quick: bool) -> list[dict[str, Any]]:
    """Clone the committed tree, run `make demo`, and return the minutes it took."""
    if quick:
        return []
    with tempfile.TemporaryDirectory(prefix="tierd-fresh-", dir="/var/tmp") as work:
        clone = Path(work) / "tierd"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIERD", "VIRTUAL_ENV"))}
        environment = kept | {
            "PIP_NO_CACHE_DIR": "1",
            "XDG_CACHE_HOME": str(Path(work) / "cache"),
            "HOME": work,
        }
        began = time.monotonic()
        done = subprocess.run(
            ["make", "demo"],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        minutes = (time.monotonic() - began) / 60
    if done.returncode != 0:
        raise RuntimeError(f"make demo failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return [
        {
            "id": "first_light.demo_fresh_minutes",
            "value": round(minutes, 2),
            "unit": "min",
            "repeats": 1,
            "spread": "one run",
            "detail": {"last_lines": done.stdout.strip().splitlines()[-12:]},
        }
    ]

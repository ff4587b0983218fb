"""The engines' environments, and how a test starts a process of one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".venv-sglang"
RELEASES = ("0.5.22", "0.5.23")
TIMEOUT_S = 900


def python_of(release: str) -> Path:
    return HOME / release / "bin" / "python"


class Process:
    """A process of an engine; it starts at once, and its findings are waited for."""

    def __init__(
        self,
        release: str,
        module: str,
        *words: str,
        environ: dict[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._report = Path(self._directory.name) / "report.json"
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("TIERD", "SGLANG", "VLLM"))
        }
        self._process = subprocess.Popen(
            [str(python or python_of(release)), "-m", module, *words],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **inherited,
                "OMP_NUM_THREADS": "1",
                "TRITON_INTERPRET": "1",
                "TIERD_TEST_REPORT": str(self._report),
                **(environ or {}),
            },
        )

    def wait(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Return the exit code and what was written to standard error."""
        try:
            _, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.close()
            raise
        return self._process.returncode, errors

    def found(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return what the process reported; its failure is the test's."""
        code, errors = self.wait(timeout_s)
        assert code == 0, errors[-4000:]
        found: dict[str, Any] = json.loads(self._report.read_text())
        self._directory.cleanup()
        return found

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._directory.cleanup()

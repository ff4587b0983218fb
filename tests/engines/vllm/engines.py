"""vLLM's environments, and how a test starts a process of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.engines.sglang import engines

if TYPE_CHECKING:
    from pathlib import Path

HOME = engines.ROOT / ".venv-vllm"
SOURCES, CPU = "0.33.0", "0.32.0"  # the modules alone; another party's build for CPUs
TIMEOUT_S = engines.TIMEOUT_S


def python_of(release: str) -> Path:
    return HOME / release / "bin" / "python"


def scenario(name: str, facts: str, **environ: str) -> engines.Process:
    """What tests/engines/vllm/engine.py does with the modules of 0.33.0."""
    return engines.Process(
        SOURCES, "tests.engines.vllm.engine", name, facts, python=python_of(SOURCES),
        # Else vLLM finds no GPU's driver and does without Triton, interpreter and all.
        environ={"CUDA_VISIBLE_DEVICES": "", **environ},
    )  # fmt: skip


def gemma(facts: str, **environ: str) -> engines.Process:
    """A whole vLLM on the CPU: tests/engines/vllm/gemma.py."""
    options: dict[str, Any] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0",
    }  # fmt: skip
    return engines.Process(
        CPU, "tests.engines.vllm.gemma", facts, environ={**options, **environ},
        python=python_of(CPU),
    )  # fmt: skip

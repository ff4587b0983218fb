"""What the stock engine and the hooked engine both do, for their outcomes to be compared.

Runs in the test process (stock) and in one under ``tierd run`` (hooked.py).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers

from tierd.tools import demo_generate

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def outcomes(directory: Path) -> dict[str, Any]:
    """Load, generate and compute logits in several dtypes; everything JSON-ready."""
    demo_generate.quiet()
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, output_loading_info=True
        )
        found[f"{name} loading"] = {key: sorted(map(str, keys)) for key, keys in loading.items()}
        if name != "fp16":  # its tokens would cost more than they tell
            found[f"{name} tokens"] = demo_generate.generate_with(
                model, vocabulary=model.config.vocab_size
            )
        found[f"{name} logits"] = logits(model)
        # A table that was rounded to fp16 stays so in fp32.
        found[f"{name} to fp16 to fp32 logits"] = logits(model.to(torch.float16).float())
    return found


def logits(model: Any) -> str:
    """Return a digest of the logits of one prefill."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, model.config.vocab_size, (2, 20), generator=generator)
    with torch.no_grad():
        values = model(ids).logits
    assert values.isfinite().all()
    return hashlib.sha256(values.float().numpy().tobytes()).hexdigest()


def load_peak_bytes(directory: Path) -> int:
    """Return by how much loading a model raised this process's resident memory at its peak.

    Loaded as fp32, since a bf16 table would stay a mapped file until its rows are used.
    """
    demo_generate.quiet()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)

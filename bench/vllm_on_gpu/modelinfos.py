"""python -m bench.vllm_on_gpu.modelinfos CACHE SITE: what vLLM finds out of a model's class.

It asks a process of its own for that, which imports everything and takes 20 s, and keeps the answer
by the hash of the model's file. The answers for the two models here are written down.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

COMMON = {
    "is_text_generation_model": True, "is_pooling_model": False, "attn_type": "decoder",
    "default_seq_pooling_type": "LAST", "default_tok_pooling_type": "ALL",
    "score_type": "bi-encoder", "supports_multimodal": False,
    "supports_multimodal_raw_input_only": False, "supports_multimodal_encoder_tp_data": False,
    "supports_pp": True, "supports_lora": True, "is_attention_free": False, "has_noops": False,
    "supports_replayssm": False, "supports_transcription": False,
    "supports_transcription_only": False, "supports_kv_cache_grouping": False,
    "supported_video_pruning_methods": [], "supports_mm_device_do_normalize": False,
}  # fmt: skip
HYBRID = ("requires_raw_input_tokens", "supports_hc_sp", "has_inner_state", "is_hybrid")
QWEN, LLAMA = "Qwen4ExpForCausalLM", "EngramLlamaForCausalLM"


def write(cache: Path, module: str, root: Path, architecture: str) -> None:
    """``root``: the model's file, or its package, which counts with all its files."""
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    top = root if root.is_dir() else root.parent
    parts = [(path.relative_to(top).as_posix().encode(), path.read_bytes()) for path in files]
    seen = b"".join(name + b"\0" + text + b"\0" for name, text in parts)
    info = {"architecture": architecture, **COMMON}
    info |= dict.fromkeys(HYBRID, architecture == QWEN)
    text = {"hash": hashlib.md5(seen, usedforsecurity=False).hexdigest(), "modelinfo": info}
    name = f"{module}-{architecture}".replace(".", "-")
    (cache / f"{name}.json").write_text(json.dumps(text, indent=1))


def main() -> None:
    cache, site = map(Path, sys.argv[1:])
    cache.mkdir(parents=True, exist_ok=True)
    write(
        cache, "bench.vllm_on_gpu.engram_model", Path(__file__).with_name("engram_model.py"), LLAMA
    )
    write(cache, "vllm.models.qwen4_exp", site / "vllm/models/qwen4_exp", QWEN)


if __name__ == "__main__":
    main()

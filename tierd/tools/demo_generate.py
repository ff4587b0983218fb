"""Generates tokens with checkpoints, to be run once without tierd and once with it.

    tierd run -- python -m tierd.tools.demo_generate CHECKPOINT...

prints one JSON object: checkpoint's directory name -> case -> token ids. Nothing here knows tierd.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPT_TOKENS = 24
NEW_TOKENS = 16


def generate(directory: Path) -> dict[str, list[list[int]]]:
    """Load a checkpoint and generate, greedily and sampled, for a batch with padding.

    Args:
        directory: a checkpoint that ``AutoModelForCausalLM`` knows.

    Returns:
        case -> token ids [batch][prompt and new tokens].
    """
    quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    return generate_with(model, vocabulary=int(model.config.vocab_size))


def generate_with(model: Any, *, vocabulary: int) -> dict[str, list[list[int]]]:
    """Generate with a loaded model; see :func:`generate`."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, PROMPT_TOKENS)
    prompt = torch.randint(3, vocabulary, shape, generator=generator)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0  # the second prompt is shorter: padded on the left
    cases: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 0},
    }
    tokens = {}
    for name, options in cases.items():
        torch.manual_seed(11)
        made = model.generate(
            prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None, **options
        )
        tokens[name] = made.tolist()
    return tokens


def quiet() -> None:
    """Keep transformers' progress bars and hints off the demo's few lines."""
    torch.set_num_threads(1)  # sums are added in the same order in both processes
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main(arguments: list[str]) -> None:
    """Generate with each checkpoint named."""
    print(json.dumps({Path(name).name: generate(Path(name)) for name in arguments}))


if __name__ == "__main__":
    main(sys.argv[1:])

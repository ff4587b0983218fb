"""An engine with a model: generates the same tokens again and again and compares them.

    tierd run -- python -m tests.chaos.tokens CHECKPOINT EXPECTED BOARD

Counts generations in ``steps`` and tokens in ``rows``; ``wrong`` counts tokens that differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

from tests.chaos.engine import Board
from tierd.tools import demo_generate


def main(checkpoint: str, expected: str, board_path: str) -> None:
    demo_generate.quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    right = json.loads(Path(expected).read_text())
    board = Board(Path(board_path))
    board.add("attaches")
    while not board.get("stop"):
        made = demo_generate.generate_with(model, vocabulary=int(model.config.vocab_size))
        for case, sequences in right.items():
            pairs = [
                pair
                for one, other in zip(sequences, made[case], strict=True)
                for pair in zip(one, other, strict=True)
            ]
            board.add("rows", len(pairs))
            board.add("wrong", sum(a != b for a, b in pairs))
        board.add("steps")


if __name__ == "__main__":
    main(*sys.argv[1:])

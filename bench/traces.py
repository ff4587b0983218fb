"""Traces of row numbers: agent-like and chat-like sessions from installed Python packages' text.

An agent session works on one package: a long system prompt that all sessions share, then turns of
a file read (prefill) and an answer that quotes and edits it (decode). A chat session has short
prompts and long answers of prose from docstrings. Sessions take turns in the batch's places, so
that 256 are interleaved where 128 run. Tokens are V4's, rows are V4.1's own hash.

    python -m bench.traces OUT.npz        tokens of both kinds; the bulk is never in git
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.gpu.engram import EngramHash, EngramLayout
from tierd.tools.deepseek_tokens import compressed_token_map, load_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

SESSIONS = 256
ENGRAM_VOCAB = 16_000_000  # the public model's: 24 columns make 384,006,168 rows
LAYERS = (1, 14)


def texts(limit: int = 3000) -> list[tuple[str, str]]:
    """(package, text) of installed Python files, in a fixed order."""
    root = Path(sysconfig.get_paths()["purelib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        size = path.stat().st_size
        if 4_000 <= size <= 60_000:
            found.append((path.relative_to(root).parts[0], path))
    rng = np.random.default_rng(0)
    chosen = [found[i] for i in rng.permutation(len(found))[:limit]]
    return [(package, path.read_text(errors="replace")) for package, path in sorted(chosen)]


def prose(text: str) -> str:
    """The docstrings of a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds))


def agent(files: list[NDArray[Any]], rng: np.random.Generator, tokens: int) -> NDArray[Any]:
    """One session's answers: code near what it has read, now and then the same lines again."""
    out: list[NDArray[Any]] = []
    have = 0
    mine = [files[i] for i in rng.choice(len(files), min(4, len(files)), replace=False)]
    while have < tokens:
        file = mine[rng.integers(len(mine))]
        length = int(rng.integers(32, 160))
        start = int(rng.integers(0, max(1, len(file) - length)))
        piece = file[start : start + length]
        if out and rng.random() < 0.5:  # edits repeat what was written before
            piece = out[rng.integers(len(out))]
        out.append(piece)
        have += len(piece)
    return np.concatenate(out)[:tokens]


def chat(files: list[NDArray[Any]], rng: np.random.Generator, tokens: int) -> NDArray[Any]:
    """One session's answers: prose, seldom the same twice."""
    out: list[NDArray[Any]] = []
    have = 0
    while have < tokens:
        file = files[rng.integers(len(files))]
        start = int(rng.integers(0, max(1, len(file) - 200)))
        out.append(file[start : start + 200])
        have += len(out[-1])
    return np.concatenate(out)[:tokens]


def generate(out: Path, steps: int = 1600) -> None:
    """Write tokens int32 [sessions, steps] of both kinds, and the compressed token map."""
    tokenizer = load_tokenizer()
    encode = lambda text: np.array(tokenizer.encode(text).ids, np.int32)  # noqa: E731
    rng = np.random.default_rng(1)
    by_package: dict[str, list[NDArray[Any]]] = {}
    words: list[NDArray[Any]] = []
    for package, text in texts(700):
        by_package.setdefault(package, []).append(encode(text))
        told = prose(text)
        if len(told) > 2000:
            words.append(encode(told))
    packages = [files for files in by_package.values() if sum(map(len, files)) > 8000]
    agents = [agent(packages[i % len(packages)], rng, steps) for i in range(SESSIONS)]
    chats = [chat(words, rng, steps) for _ in range(SESSIONS)]
    np.savez_compressed(
        out, agent=np.stack(agents), chat=np.stack(chats),
        token_map=compressed_token_map(tokenizer).astype(np.int32),
    )  # fmt: skip


def decode_ids(
    path: Path, kind: str, *, batch: int, steps: int, ranks: int, rows: int
) -> NDArray[np.int64]:
    """Row numbers of a rank's columns, int64 [steps, layers, batch * 24 / ranks].

    Sessions hold a place for 64 steps and then give it to the next one that waits. The rank's
    rows are folded into a table of `rows` rows (the share of rows that fall together is printed
    by the callers' hit shares; at 15.7 million rows it is small).
    """
    data = np.load(path)
    tokens, layout = data[kind], EngramLayout.make(LAYERS, vocab_size=ENGRAM_VOCAB)
    hashed = EngramHash(layout, data["token_map"])
    turn = 64
    rounds = -(-steps // turn)
    sessions = len(tokens)
    found = np.empty((rounds * turn, len(LAYERS), batch * 24 // ranks), np.int64)
    place = np.zeros(sessions, np.int64)
    queue = list(range(sessions))
    for at in range(rounds):
        active, queue = queue[:batch], queue[batch:] + queue[:batch]
        for n, session in enumerate(active):
            start = int(place[session])
            span = np.arange(start, start + turn) % tokens.shape[1]
            before = tokens[session][np.arange(start - 3, start) % tokens.shape[1]]
            mine = hashed.rows(tokens[session][span], before)[:, :, : 24 // ranks]
            width = 24 // ranks
            found[at * turn : (at + 1) * turn, :, n * width : (n + 1) * width] = mine
            place[session] = start + turn
    return found[:steps] % rows


if __name__ == "__main__":
    generate(Path(sys.argv[1]))

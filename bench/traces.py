"""Traces of row numbers: agent-like and chat-like sessions from installed Python packages' text.

A session is a series of turns; each turn is a prefill, whose rows the cache then holds, and 128
decoded tokens. An agent works on one package: it reads a part of a file (prefill), and its answer
is new text (two fifths: so much that it finds 85 % of its rows cached, as SlackTier's agents do),
quotes of what it has read and written, and the fixed text of tool calls. A chat's prompts are
short and its answers are mostly new prose. Sessions take turns in the batch's places, so that 256
are interleaved where 128 run. Tokens are V4's, rows are V4.1's own hash. Beside these, ids by
Zipf's law.

    python -m bench.traces OUT.npz        tokens of both kinds; the bulk is never in git
    python -m bench.traces --show OUT.npz what an LRU cache makes of them
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.gpu.engram import EngramHash, EngramLayout
from tierd.tools.deepseek_tokens import compressed_token_map, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

SESSIONS = 256
TURNS = 8
DECODE = 128  # tokens a turn
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


def novel(text: str, known: set[str]) -> str:
    """The sentences that nobody has written before: docstrings repeat each other, people do not."""
    kept = []
    for line in text.splitlines():
        key = " ".join(line.lower().split())
        if len(key) > 30 and key not in known:
            kept.append(line.strip())
            known.add(key)
    return "\n".join(kept)


TOOL_CALLS = (
    '</think>\n\n<tool_call>{"name": "execute_bash", "arguments": {"command": "cd /repo && ',
    '<tool_call>{"name": "str_replace_editor", "arguments": {"command": "view", "path": "/repo/',
    '"}}</tool_call>\n\nNow let me run the tests to verify that the change works as expected:\n\n',
    "Let me look at the implementation of this function to understand what it does:\n\n",
    '<tool_call>{"name": "str_replace_editor", "arguments": {"command": "replace", "old_str": "',
    'python -m pytest -x -q tests/ 2>&1 | tail -20", "security_risk": "LOW"}}</tool_call>\n',
)


class Fresh:
    """Text that is given out once."""

    def __init__(self, pieces: list[NDArray[Any]]) -> None:
        self._text = np.concatenate(pieces)
        self._at = 0

    def take(self, tokens: int) -> NDArray[Any]:
        assert self._at + tokens <= len(self._text), "too little text is installed"
        self._at += tokens
        return self._text[self._at - tokens : self._at]


def quote(seen: list[NDArray[Any]], rng: np.random.Generator, low: int, high: int) -> NDArray[Any]:
    """Some tokens in a row of what the session has seen, mostly of the latest."""
    latest = rng.random() < 0.7
    source = seen[-1] if latest else seen[rng.integers(len(seen))]
    start = int(rng.integers(0, max(1, len(source) - high)))
    return source[start : start + int(rng.integers(low, high))]


def answer(pieces: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """One turn's decoded tokens."""
    out: list[NDArray[Any]] = []
    while sum(map(len, out)) < DECODE:
        out.append(pieces())
    return np.concatenate(out)[:DECODE]


def agent(
    files: list[NDArray[Any]],
    system: NDArray[Any],
    calls: list[NDArray[Any]],
    fresh: Fresh,
    rng: np.random.Generator,
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """One session: (prefill, decoded tokens) of each turn."""
    seen: list[NDArray[Any]] = [system]

    def piece() -> NDArray[Any]:
        kind = rng.random()
        if kind < 0.52:
            return fresh.take(int(rng.integers(8, 33)))
        if kind < 0.67:
            return calls[rng.integers(len(calls))]
        return quote(seen, rng, 16, 65)

    turns = []
    for turn in range(TURNS):
        file = files[rng.integers(len(files))]
        start = int(rng.integers(0, max(1, len(file) - 1200)))
        read = file[start : start + int(rng.integers(200, 1200))]
        seen.append(read)
        said = answer(piece)
        seen.insert(-1, said)  # the file stays the latest thing read
        turns.append((read if turn else np.concatenate([system, read]), said))
    return turns


def chat(fresh: Fresh, rng: np.random.Generator) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """One session: (prefill, decoded tokens) of each turn."""
    seen: list[NDArray[Any]] = []
    turns = []
    for _ in range(TURNS):
        prompt = fresh.take(int(rng.integers(20, 200)))
        seen.append(prompt)

        def piece() -> NDArray[Any]:
            return quote(seen, rng, 8, 33) if rng.random() < 0.3 else fresh.take(24)

        said = answer(piece)
        seen.append(said)
        turns.append((prompt, said))
    return turns


def generate(out: Path) -> None:
    """Write both kinds' tokens and turns, and the compressed token map."""
    tokenizer = load_tokenizer()
    encode = lambda text: np.array(tokenizer.encode(text).ids, np.int32)  # noqa: E731
    rng = np.random.default_rng(1)
    by_package: dict[str, list[NDArray[Any]]] = {}
    words: list[NDArray[Any]] = []
    known: set[str] = set()
    for number, (package, text) in enumerate(texts(2400)):
        if number % 2:  # half of the files are read by agents, the others' prose is new text
            by_package.setdefault(package, []).append(encode(text))
        elif len(told := novel(prose(text), known)) > 300:
            words.append(encode(told))
    packages = [files for files in by_package.values() if sum(map(len, files)) > 8000]
    fresh = Fresh([words[i] for i in rng.permutation(len(words))])
    system = by_package[max(by_package, key=lambda name: len(by_package[name]))][0][:1500]
    calls = [encode(call) for call in TOOL_CALLS]
    found: dict[str, Any] = {"token_map": compressed_token_map(tokenizer).astype(np.int32)}
    for kind in ("agent", "chat"):
        sessions = [
            agent(packages[i % len(packages)], system, calls, fresh, rng)
            if kind == "agent"
            else chat(fresh, rng)
            for i in range(SESSIONS)
        ]
        flat = [np.concatenate([part for turn in turns for part in turn]) for turns in sessions]
        found[f"{kind}_tokens"] = np.concatenate(flat)
        found[f"{kind}_lengths"] = np.array([len(one) for one in flat], np.int32)
        found[f"{kind}_prefills"] = np.array(
            [[len(prefill) for prefill, _ in turns] for turns in sessions], np.int32
        )
        print(f"{kind}: {len(found[f'{kind}_tokens'])} tokens, {len(packages)} packages")
    np.savez_compressed(out, **found)


@dataclasses.dataclass
class Steps:
    """Row numbers of a rank's columns.

    Attributes:
        steps: int64 [steps, layers, batch * 24 / ranks].
        prefill: per step, int64 [layers, n]: rows of the prefills that end before it, or None.
    """

    steps: NDArray[np.int64]
    prefill: list[NDArray[np.int64] | None]


class Feed:
    """Sessions that take turns in a batch's places."""

    def __init__(self, path: Path, kind: str, *, rows: int, ranks: int) -> None:
        """Hash a kind's tokens.

        Args:
            path: what `generate` wrote.
            kind: agent or chat.
            rows: of the table that is read; the public model's rows are folded into it.
            ranks: of the engine; the first rank's columns are taken.
        """
        data = np.load(path)
        layout = EngramLayout.make(LAYERS, vocab_size=ENGRAM_VOCAB)
        hashed = EngramHash(layout, data["token_map"])
        tokens = np.split(data[f"{kind}_tokens"], np.cumsum(data[f"{kind}_lengths"])[:-1])
        width = 24 // ranks
        self._rows = [hashed.rows(one)[:, :, :width] % rows for one in tokens]  # [length, 2, width]
        self._prefills = data[f"{kind}_prefills"]
        self._turn = [0] * len(tokens)  # next turn
        self._place = [0] * len(tokens)  # next token
        self._waiting = collections.deque(range(len(tokens)))

    def sessions(self) -> list[NDArray[np.int64]]:
        """Rows of every session's whole text, int64 [tokens, layers, columns]."""
        return self._rows

    def _start(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The next session's next turn: rows of its prefill and of its decoded tokens."""
        session = self._waiting.popleft()
        self._waiting.append(session)
        turn, at = self._turn[session], self._place[session]
        assert turn < TURNS, "the trace has no turn left; raise TURNS"
        middle = at + int(self._prefills[session][turn])
        self._turn[session], self._place[session] = turn + 1, middle + DECODE
        rows = self._rows[session]
        return rows[at:middle], rows[middle : middle + DECODE]

    def take(self, batch: int, steps: int) -> Steps:
        """Return so many steps of `batch` places, whose turns begin one after the other."""
        width = self._rows[0].shape[2]
        out = np.empty((steps, 2, batch, width), np.int64)
        begun: list[list[NDArray[np.int64]]] = [[] for _ in range(steps)]
        for place in range(batch):
            at = -(place * DECODE // batch)
            while at < steps:
                prefill, decode = self._start()
                begun[max(0, at)].append(prefill)
                skip = max(0, -at)
                part = decode[skip : skip + steps - max(0, at)]
                out[max(0, at) : max(0, at) + len(part), :, place] = part
                at += DECODE
        prefill_rows = [
            np.concatenate(parts).transpose(1, 0, 2).reshape(2, -1) if parts else None
            for parts in begun
        ]
        return Steps(out.reshape(steps, 2, batch * width), prefill_rows)


def ids_zipf(rows: int, shape: tuple[int, ...], exponent: float = 1.1) -> NDArray[np.int64]:
    """Row numbers whose frequencies fall by Zipf's law, scattered over the table."""
    rng = np.random.default_rng(5)
    ranks = rng.zipf(exponent, shape)
    return ((ranks * 0x9E3779B1) % rows).astype(np.int64)


def show(path: Path, *, batch: int = 128, steps: int = 900, cache_rows: int = 1 << 19) -> None:
    """Print each kind's share of distinct rows, and the hits of an LRU of `cache_rows` a layer."""
    for kind in ("agent", "chat"):
        found = Feed(path, kind, rows=384_006_168, ranks=4).take(batch, steps)
        cache: collections.OrderedDict[int, None] = collections.OrderedDict()
        hits = counted = 0

        def touch(row: int, cache: collections.OrderedDict[int, None] = cache) -> bool:
            hit = row in cache
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > cache_rows:
                cache.popitem(last=False)
            return hit

        for step in range(steps):
            prefill = found.prefill[step]
            for row in prefill[0].tolist() if prefill is not None else ():
                touch(row)
            got = sum(touch(row) for row in found.steps[step, 0].tolist())
            if step >= steps - 200:
                hits += got
                counted += batch * 6
        last = found.steps[-200:, 0]
        print(
            f"{kind}: {len(np.unique(last)) / last.size:.2f} of 200 steps' rows are distinct, "
            f"{np.mean([len(np.unique(one)) / one.size for one in last]):.3f} of one step's; "
            f"hits of the last 200 steps {hits / counted:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if options.show:
        show(options.file)
    else:
        generate(options.file)


if __name__ == "__main__":
    main()

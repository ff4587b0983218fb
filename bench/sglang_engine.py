"""One process of SGLang for its measures: ``python -m bench.sglang_engine SCENARIO FACTS``.

Run by the Python of an engine's environment (tools/sglang_venvs.sh); bench/sglang.py starts it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

FACTS: dict[str, Any] = {}
PUBLIC = {
    "engram_vocab_size": 16_000_000,
    "engram_num_embeddings": [384_006_168, 384_016_682],
}
EXTEND_SLOTS, DECODE_SLOTS, VERIFY_SLOTS, BLOCK = 8, 64, 32, 6


# --- hashes --------------------------------------------------------------------------------------


def real_text(count: int) -> np.ndarray[Any, Any]:
    """Token ids of the text of installed packages: documents, code, licences."""
    import numpy as np

    from tierd.tools.deepseek_tokens import load_tokenizer

    tokenizer = load_tokenizer()
    ids: list[int] = []
    for root in map(Path, sys.path):
        if root.name != "site-packages":
            continue
        for path in sorted(root.rglob("*")):
            if path.suffix not in {".py", ".md", ".rst", ".txt"} or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")[:60_000]
            ids += tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) >= count:
                return np.array(ids[:count])
    raise SystemExit(f"the installed packages hold {len(ids)} tokens, {count} are wanted")


class Hashes:
    """SGLang's hasher and ours side by side on one stretch of text after another."""

    def __init__(self, text: np.ndarray[Any, Any]) -> None:
        from tests.engines.sglang import models
        from tierd.gpu.engram import EngramHash, EngramLayout
        from tierd.tools.deepseek_tokens import deepseek_token_map

        self.models = models
        self.config = models.engram_config(**PUBLIC)
        self.theirs = models.hasher(self.config)
        layout = EngramLayout.make((1, 14), vocab_size=PUBLIC["engram_vocab_size"])
        assert list(layout.rows) == PUBLIC["engram_num_embeddings"]
        self.ours = EngramHash(layout, deepseek_token_map(), pad_token_id=2)
        self.text, self._at = text, 0
        self.tokens = self.differing = 0

    def take(self, *shape: int) -> np.ndarray[Any, Any]:
        """The next tokens of the text, from its start again when it ends."""
        import numpy as np

        count = int(np.prod(shape))
        places = np.arange(self._at, self._at + count) % len(self.text)
        self._at = (self._at + count) % len(self.text)
        return self.text[places].reshape(shape)

    def compare(self, ids: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
        found = ids.numpy().reshape(expected.shape)
        self.tokens += expected.shape[0] if expected.ndim == 3 else expected[..., 0, 0].size
        self.differing += int((found != expected).sum())

    def extend(self, count: int) -> None:
        """Ragged chunks of several requests, one of them empty now and then."""
        import numpy as np
        import torch

        lengths = [0, 97, 256, 31, 180, 1, 256, 203]
        while count > 0:
            rounds = min(12, -(-count // sum(lengths)))
            whole = self.take(EXTEND_SLOTS, 256 * rounds)
            expected = self.ours.rows(whole)
            done = [0] * EXTEND_SLOTS
            self.theirs.history.zero_()
            for step in range(rounds):
                sizes = lengths[step % 8 :] + lengths[: step % 8]
                parts = [
                    whole[i, d : d + n] for i, (d, n) in enumerate(zip(done, sizes, strict=True))
                ]
                batch = self.models.extend(sizes, list(range(EXTEND_SLOTS)), done)
                ids = self.theirs(torch.from_numpy(np.concatenate(parts)), batch)
                rows = [
                    expected[i, d : d + n] for i, (d, n) in enumerate(zip(done, sizes, strict=True))
                ]
                self.compare(ids, np.concatenate(rows))
                done = [d + n for d, n in zip(done, sizes, strict=True)]
                count -= sum(sizes)

    def decode(self, count: int) -> None:
        """One token a step for many requests, from their very first; a padded row beside them."""
        import numpy as np
        import torch

        steps = min(500, -(-count // DECODE_SLOTS))
        while count > 0:
            whole = self.take(DECODE_SLOTS, steps)
            expected = self.ours.rows(whole)
            self.theirs.history.zero_()
            slots = [*range(DECODE_SLOTS), 0]
            for step in range(steps):
                positions = [step] * DECODE_SLOTS + [0]
                batch = self.models.decode(slots, positions, padded=1)
                tokens = np.append(whole[:, step], 0)
                ids = self.theirs(torch.from_numpy(tokens), batch)
                self.compare(ids[:DECODE_SLOTS], expected[:, step])
            count -= DECODE_SLOTS * steps

    def verify(self, count: int) -> None:
        """Blocks of drafts, of which a varying part is accepted."""
        import numpy as np
        import torch

        context = np.full((VERIFY_SLOTS, 3), -1)
        positions = np.zeros(VERIFY_SLOTS, np.int64)
        self.theirs.history.zero_()
        slots = list(range(VERIFY_SLOTS))
        generator = np.random.default_rng(11)
        while count > 0:
            block = self.take(VERIFY_SLOTS, BLOCK)
            batch = self.models.verify(slots, positions.tolist(), BLOCK)
            tokens = torch.from_numpy(block.reshape(-1).copy())
            ids = self.theirs(tokens, batch)
            self.compare(ids, self.ours.rows(block, context))
            accepted = generator.integers(1, BLOCK + 1, VERIFY_SLOTS)
            self.theirs.commit_after_verify(
                torch.from_numpy(block.copy()).int(),
                batch.req_pool_indices,
                torch.from_numpy(accepted),
            )
            seen = np.concatenate([context, block], axis=1)
            context = np.stack([row[n : n + 3] for row, n in zip(seen, accepted, strict=True)])
            positions += accepted
            count -= VERIFY_SLOTS * BLOCK


def hashed() -> dict[str, Any]:
    """The torch path in all modes, then the kernels, in Triton's interpreter."""
    import torch

    torch.set_num_threads(1)
    from tests.engines.sglang import models

    count, kernels = FACTS["tokens"], FACTS["kernel_tokens"]
    hashes = Hashes(real_text(min(count, 1_000_000)))
    began = time.perf_counter()
    hashes.extend(count * 6 // 10)
    hashes.decode(count * 2 // 10)
    hashes.verify(count * 2 // 10 + 1)
    found = {"tokens": hashes.tokens, "differing": hashes.differing}
    engine = models.engram_module()
    engine._cuda_kernels = lambda _: True
    hashes.tokens = 0
    hashes.extend(kernels * 4 // 10)
    os.environ["SGLANG_OPT_ENGRAM_EXTEND_HASH"] = "1"
    hashes.extend(kernels * 2 // 10)
    hashes.decode(kernels * 2 // 10)
    hashes.verify(kernels * 2 // 10 + 1)
    return {
        **found,
        "kernel_tokens": hashes.tokens,
        "kernel_differing": hashes.differing - found["differing"],
        "seconds": round(time.perf_counter() - began, 1),
    }


# --- memory and import ---------------------------------------------------------------------------


def memory_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


def growth() -> dict[str, Any]:
    """Peak of a rank, from the moment its modules are imported, without the channel."""
    import torch

    torch.set_num_threads(1)
    from tests.engines.sglang import models
    from tierd.api import rest_client

    models.load_plugins()
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.deepseek_v4  # noqa: F401 - what a rank holds

    models.ple_module()
    changes = FACTS["layout"]
    config = models.engram_config(**changes)
    hasher = models.hasher(config)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_mib("VmRSS")
    with models.published(FACTS["checkpoint"]):
        model = models.EngramModel(config, hasher, served=True)
        model.load(Path(FACTS["checkpoint"]))
        models.take(model)
        generator = torch.Generator().manual_seed(3)
        for step in range(8):
            tokens = torch.randint(129_280, (512,), generator=generator)
            model(tokens, models.extend([512], [1], [512 * step]))
        (client,) = rest_client.get(Path(FACTS["api"]), "/v1/clients")["clients"]
    channel = client["channel_bytes"] / 2**20
    peak = memory_mib("VmHWM")
    return {
        "growth_mib": peak - before - channel,
        "channel_mib": channel,
        "before_mib": before,
        "table_mib": sum(config.engram_num_embeddings) * 264 / 2**20,
    }


def import_cost() -> dict[str, Any]:
    """What the entry point costs a process that is not switched on."""
    import sglang.srt.plugins  # noqa: F401 - as it is when SGLang looks for plugins

    os.environ.pop("TIERD", None)
    group = importlib.metadata.entry_points(group="sglang.srt.plugins", name="tierd")
    (entry,) = group
    times, loaded = [], set()
    for _ in range(21):
        for name in [name for name in sys.modules if name.partition(".")[0] == "tierd"]:
            del sys.modules[name]
        before = set(sys.modules)
        began = time.perf_counter()
        entry.load()()
        times.append((time.perf_counter() - began) * 1e3)
        loaded |= set(sys.modules) - before
    patched = "sglang.srt.layers.engram" in sys.modules
    return {
        "first_ms": times[0],
        "median_ms": statistics.median(times[1:]),
        "p90_ms": sorted(times)[-3],
        "modules": sorted(loaded),
        "engine modules imported": patched,
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "hashed": hashed,
    "growth": growth,
    "import_cost": import_cost,
}


def main() -> None:
    scenario, facts = sys.argv[1:]
    FACTS.update(json.loads(facts))
    Path(os.environ["TIERD_TEST_REPORT"]).write_text(json.dumps(SCENARIOS[scenario]()))


if __name__ == "__main__":
    main()

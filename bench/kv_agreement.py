"""Does a draft's query predict the next step's blocks, and what does attending to them cost?

Every position of a sequence is played as a decode step, all of them at once: the real token at t
attends over the set that was predicted for it, and the draft of the token at t, computed in the
step before over that step's set, predicts (OasisKV, sections 3.1 and 4.2.1). Three predictors:

    true      the draft is the token that comes; what an ideal draft model would give
    lookup    the draft is prompt lookup's; where it finds nothing, the query of the step before
    previous  no draft: the query of the step before stands for the next one's

The exact set, by which each is judged, is the ranking that the true next query gives.

python -m bench.kv_agreement WEIGHTS.safetensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bench.kv_model import Batch, Model, draw, recall_pct, source_text
from tierd.kv.drafts import PromptLookup

BLOCK = 16
METHODS = ("true", "lookup", "previous")


def prompt_lookup(tokens: list[int]) -> list[int]:
    """The draft of every position from what stands before it; -1 where there is none."""
    lookup, drafts = PromptLookup(), []
    for token in tokens:
        drafts.append((lookup.draft() or [-1])[0])
        lookup.extend([token])
    return drafts


class Masks:
    """Which keys and blocks a position may see."""

    def __init__(self, length: int, device: torch.device) -> None:
        position = torch.arange(length, device=device)
        own = position // BLOCK
        block = torch.arange(length // BLOCK, device=device)
        self.own, self.position = own, position
        self.past = block[None] < own[:, None]  # complete blocks before the local one
        self.causal = position[None] <= position[:, None]
        self.local = (own[:, None] == own[None]) & self.causal
        # A draft is computed in the step before, while that step's local block is resident too.
        before = (position - 1).clamp(min=0) // BLOCK
        self.draft_local = self.local | ((before[:, None] == own[None]) & self.causal)
        self.earlier = position[None] < position[:, None]

    def top(self, scores: torch.Tensor, budget: int) -> torch.Tensor:
        """The best `budget` past blocks of every row, bool [..., T, blocks]."""
        scores = scores.masked_fill(~self.past, -torch.inf)
        index = scores.topk(min(budget, scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, index, True) & self.past


def block_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Quest's bound of every block for q [heads, T, D], k [kv_heads, T, D]; maximum of a group."""
    heads, length, dim = q.shape
    kv_heads = len(k)
    blocks = k.float().view(kv_heads, length // BLOCK, BLOCK, dim)
    low, high = blocks.amin(2).transpose(1, 2), blocks.amax(2).transpose(1, 2)
    grouped = q.float().reshape(kv_heads, heads // kv_heads * length, dim)
    scores = grouped.clamp(min=0) @ high + grouped.clamp(max=0) @ low
    return scores.view(kv_heads, heads // kv_heads, length, -1).amax(1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Masked attention, q [heads, T, D], mask [kv_heads, T, T] -> [T, heads * D].

    `own` are a draft row's key and value, which it sees instead of the sequence's at its place.
    """
    heads, length, dim = q.shape
    group = heads // len(k)
    out = []
    for head in range(heads):
        kv = head // group
        scores = (q[head].float() @ k[kv].float().T) * dim**-0.5
        scores = scores.masked_fill(~mask[kv], -torch.inf)
        values = v[kv].float()
        if own is None:
            out.append(scores.softmax(-1) @ values)
            continue
        self_score = (q[head].float() * own[0][kv].float()).sum(-1, keepdim=True) * dim**-0.5
        weight = torch.cat([scores, self_score], -1).softmax(-1)
        out.append(weight[:, :-1] @ values + weight[:, -1:] * own[1][kv].float())
    return torch.stack(out, 1).reshape(length, heads * dim)


class Played:
    """One sequence decoded by one method: logits, and what the sets were like per layer."""

    def __init__(self, model: Model, tokens: torch.Tensor, drafts: torch.Tensor, method: str,
                 budget: int, masks: Masks) -> None:  # fmt: skip
        self.method, self.budget, self.masks = method, budget, masks
        self.model = model
        self.drafted = drafts >= 0
        self.accepted = drafts == tokens
        embedding = model.weights["model.embed_tokens.weight"]
        self.x = functional.embedding(tokens, embedding).float()
        self.d = functional.embedding(torch.where(self.drafted, drafts, tokens), embedding).float()
        self.layers = [self._layer(number) for number in range(model.shape.layers)]
        self.logits = model.logits(self.x)

    def _layer(self, number: int) -> dict[str, float]:
        model, masks, shape = self.model, self.masks, self.model.shape
        first, second = model.layer(number)
        length = len(self.x)
        turn = (model.cos[:length], model.sin[:length], shape.head_dim, torch.float32)
        q, k, v = (t.transpose(0, 1) for t in model.before(self.x, *first, *turn))
        exact = masks.top(block_scores(q, k), self.budget)
        shifted = masks.top(block_scores(q.roll(1, 1), k), self.budget)
        chosen = shifted
        if self.method != "previous":
            qd, kd, vd = (t.transpose(0, 1) for t in model.before(self.d, *first, *turn))
            chosen = masks.top(block_scores(qd, k), self.budget)
            chosen = torch.where(self.drafted[None, :, None], chosen, shifted)
            resident = torch.cat([chosen[:, :1], chosen[:, :-1]], 1) & masks.past
            mask = (resident.repeat_interleave(BLOCK, -1) | masks.draft_local) & masks.earlier
            out = attend(qd, k, v, mask, (kd, vd))
            self.d = model.after(self.d, out, *second, torch.float32)
        out = attend(q, k, v, chosen.repeat_interleave(BLOCK, -1) | masks.local)
        self.x = model.after(self.x, out, *second, torch.float32)
        return self._judge(chosen, exact)

    def _judge(self, chosen: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
        late = self.masks.position >= len(self.x) // 2
        size = exact.sum(-1).clamp(min=1)
        share = ((chosen & exact).sum(-1) / size).mean(0)  # over kv heads, per position
        moved = torch.cat([chosen[:, :1], chosen[:, :-1]], 1)
        union = chosen.any(0).sum(-1) / chosen.sum(-1).float().mean(0).clamp(min=1)
        right, wrong = late & self.accepted, late & ~self.accepted
        return {
            "agreement": float(share[late].mean()),
            "agreement_accepted": float(share[right].mean()) if right.any() else float("nan"),
            "agreement_rejected": float(share[wrong].mean()) if wrong.any() else float("nan"),
            "union": float(union[late].mean()),
            "new": float(((chosen & ~moved).sum(-1) / size)[:, late].mean()),
        }


@torch.no_grad()
def agreement(
    model: Model, text: torch.Tensor, budgets: tuple[float, ...], *, sequences: int = 6,
    length: int = 4096, methods: tuple[str, ...] = METHODS, records: bool = True, seed: int = 7,
) -> list[dict[str, Any]]:  # fmt: skip
    """Play held-out sequences; one row for each budget (a share of the context) and method."""
    model.dtype = torch.float32
    generator = torch.Generator(model.device).manual_seed(seed)
    masks = Masks(length, model.device)
    batches = [draw(text, 1, length, held=True, generator=generator) for _ in range(sequences)]
    if not records:
        batches = [plain(text, length, generator) for _ in range(sequences)]
    full = [model.forward(batch.inputs) for batch in batches]
    lookups = [prompt_lookup(batch.inputs[0].tolist()) for batch in batches]
    rows = []
    for share in budgets:
        for method in methods:
            played = []
            for batch, lookup in zip(batches, lookups, strict=True):
                tokens = batch.inputs[0]
                drafts = tokens if method == "true" else torch.tensor(lookup, device=tokens.device)
                budget = int(length * share) // BLOCK
                played.append(Played(model, tokens, drafts, method, budget, masks))
            rows.append({"share": share, "method": method} | _row(batches, full, played))
    return rows


def plain(text: torch.Tensor, length: int, generator: torch.Generator) -> Batch:
    """Held-out text without records."""
    batch = draw(text, 1, length, held=True, generator=generator)
    start = (
        len(text)
        - length
        - 1
        - int(
            torch.rand(1, generator=generator, device=text.device)
            * (len(text) * 0.045 - length - 2)
        )
    )
    return Batch(text[None, start : start + length + 1].long(), torch.zeros_like(batch.answers))


def _row(batches: list[Batch], full: list[torch.Tensor], played: list[Played]) -> dict[str, Any]:
    def loss(logits: torch.Tensor, batch: Batch) -> float:
        half = slice(len(logits) // 2, None)
        return float(functional.cross_entropy(logits.float()[half], batch.targets[0][half]))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    late = [p.masks.position >= len(p.x) // 2 for p in played]
    count = range(len(played))
    per_layer = range(len(played[0].layers))
    names = played[0].layers[0]
    found: dict[str, Any] = {
        name: [round(mean([p.layers[n][name] for p in played]), 4) for n in per_layer]
        for name in names
    }
    found |= {f"{name}_mean": mean(found[name]) for name in names}
    pairs = list(zip(played, late, strict=True))
    asked = all(batch.answers.any() for batch in batches)
    return found | {
        "acceptance": mean([float(p.accepted[m].float().mean()) for p, m in pairs]),
        "drafted": mean([float(p.drafted[m].float().mean()) for p, m in pairs]),
        "loss_full": mean([loss(full[i], batches[i]) for i in count]),
        "loss_sparse": mean([loss(played[i].logits, batches[i]) for i in count]),
        "recall_full": mean([recall_pct(full[i], batches[i]) for i in count]) if asked else None,
        "recall_sparse": (
            mean([recall_pct(played[i].logits, batches[i]) for i in count]) if asked else None
        ),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        recall = (
            f"recall {row['recall_full']:.1f} -> {row['recall_sparse']:.1f} "
            if row["recall_full"] is not None
            else ""
        )
        lines.append(
            f"1/{round(1 / row['share'])} {row['method']:8} agreement {row['agreement_mean']:.4f} "
            f"{row['agreement']} accepted {row['agreement_accepted_mean']:.3f} rejected "
            f"{row['agreement_rejected_mean']:.3f} union {row['union_mean']:.2f} new "
            f"{row['new_mean']:.3f} acceptance {row['acceptance']:.3f} of {row['drafted']:.3f} "
            f"{recall}loss {row['loss_full']:.4f} -> {row['loss_sparse']:.4f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("weights", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--shares", type=float, nargs="*", default=[1 / 16, 1 / 8, 1 / 4])
    parser.add_argument("--plain", action="store_true", help="text without records")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Model.load(options.weights, device)
    text = source_text(60_000_000).to(device)
    rows = agreement(
        model, text, tuple(options.shares), sequences=options.sequences, length=options.length,
        records=not options.plain,
    )  # fmt: skip
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

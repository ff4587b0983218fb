"""Trains the models of bench/kv_model.py in minutes on one GPU.

python -m bench.kv_train small --seconds 120 --out bench/data/kv_small.safetensors
python -m bench.kv_train medium --seconds 150 --out medium.safetensors

A curriculum teaches recall: sequences start at 256 symbols and grow when recall is learned, so
that the heads that find a record form where they are easy to find. Weights are AdamW's average
towards the end, rounded to bf16 as they are saved.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn import functional

from bench.kv_model import (
    KEYS,
    MEDIUM,
    SMALL,
    Batch,
    Guide,
    Model,
    draw,
    drill,
    join,
    recall_pct,
    source_text,
)

TOKENS = 32_768  # a step
LENGTHS = (256, 512, 1024, 2048, 4096)
LEARNED_PCT = 93.0
ANSWER_WEIGHT = 12.0
GUIDANCE = 0.1
RATES = {"small": 3e-3, "medium": 1.5e-3}


class Curriculum:
    """Which length is trained now: the next one once recall is learned or its time is up."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = lengths
        self.stage = 0
        self.entered = 0.0
        self.recall = 0.0

    @property
    def length(self) -> int:
        return self.lengths[self.stage]

    def learn(self, recall: float, progress: float) -> None:
        self.recall += 0.1 * (recall - self.recall)
        # Recall is learned at the shortest length or not at all, so that one gets most of the time.
        share = 0.35 if self.stage == 0 else 0.1
        done = self.recall > LEARNED_PCT or progress - self.entered > share
        if done and self.stage + 1 < len(self.lengths):
            self.stage, self.entered, self.recall = self.stage + 1, progress, 0.0


def loss_of(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss to train on, and the plain mean."""
    each = functional.cross_entropy(logits.float(), batch.targets.flatten(), reduction="none")
    weight = 1 + (ANSWER_WEIGHT - 1) * batch.answers.flatten().float()
    return (each * weight).sum() / weight.sum(), each.mean()


def guides_of(batch: Batch, generator: torch.Generator) -> tuple[Guide, Guide]:
    """The two heads that recall is made of: the previous place, and where the answer stands."""
    assert batch.rows is not None
    assert batch.sources is not None
    size, length = batch.rows.shape, batch.answers.shape[1]
    anywhere = torch.rand(*size, generator=generator, device=batch.rows.device)
    anywhere = 1 + (anywhere * (length - 1)).long()
    return (Guide(0, anywhere, anywhere - 1), Guide(1, batch.rows, batch.sources))


def rate(progress: float, step: int, peak: float) -> float:
    cooling = 1.0 if progress < 0.65 else max(0.02, (1 - progress) / 0.35)
    return peak * min(1.0, (step + 1) / 100) * cooling


def train(
    name: str,
    model: Model,
    text: torch.Tensor,
    seconds: float,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    tokens: int = TOKENS,
) -> dict[str, float]:
    """Train `model` in place for so many seconds, the first compilation included."""
    device = model.device
    generator = torch.Generator(device).manual_seed(1)
    if device.type == "cuda":
        model.before = torch.compile(model.before, dynamic=False)
        model.after = torch.compile(model.after, dynamic=False)
    weights = list(model.weights.values())
    for weight in weights:
        weight.requires_grad_(True)
    matrices = [w for w in weights if w.ndim == 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=device.type == "cuda")
    plan, step, began = Curriculum(lengths), 0, time.perf_counter()
    recall = mean = 0.0
    while (progress := (time.perf_counter() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, step, RATES[name])
        count = tokens // plan.length
        drilled = count // (2 if plan.stage == 0 else 8)
        batch = draw(text, count - drilled, plan.length, held=False, generator=generator)
        if drilled:
            pairs = min(KEYS, 8 << plan.stage)
            more = drill(drilled, plan.length, pairs=pairs, generator=generator)
            batch = join(batch, more)
        guides = guides_of(batch, generator)
        logits = model.forward(batch.inputs, guides)
        loss, plain = loss_of(logits, batch)
        loss = loss + GUIDANCE * (guides[0].loss + guides[1].loss)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            mean = float(plain.detach())
            recall = recall_pct(logits.detach(), batch, count - drilled)
            plan.learn(recall, progress)
        if step % 200 == 0:
            took = time.perf_counter() - began
            seen = " ".join(f"{float(g.loss.detach()):.2f}" for g in guides)
            line = f"{step} length {plan.length} loss {mean:.3f} recall {recall:.1f} "
            line += f"guides {seen} {took:.0f}s"
            print(name, line, flush=True)
    for weight in weights:
        weight.requires_grad_(False)
        weight.copy_(weight.bfloat16())
    return {"steps": step, "loss": mean, "recall_pct": recall, "length": plan.length}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=["small", "medium"])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--text-mb", type=float, default=100)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model = Model({"small": SMALL, "medium": MEDIUM}[options.size], device)
    text = source_text(int(options.text_mb * 1e6)).to(device)
    print(
        f"{options.size}: {model.parameters / 1e6:.2f} M parameters, {len(text) / 1e6:.0f} MB text"
    )
    found = train(options.size, model, text, options.seconds)
    model.save(options.out)
    print(json.dumps({"size": options.size, "parameters": model.parameters, **found}))


if __name__ == "__main__":
    main()

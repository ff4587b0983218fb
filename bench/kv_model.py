"""The model that OasisKV is judged on: GQA in Llama's layout, small enough to keep its weights.

It reads bytes of Python source with key-value records scattered among them. A record is `KEY k k'
v`: a key is a word of two symbols, the second of which follows from the first, as in most words.
The same four symbols ask for it later, and the model has to name `v` from up to 4,096 positions
away. Names of the weights are those of transformers' Llama, so the same file also makes a model for
the transformers rig.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY, FIRST_KEY, FIRST_VALUE = 256, 258, 386
KEYS, VALUES = 64, 62
WEIGHTS = Path(__file__).with_name("data") / "kv_small.safetensors"
RECORD = 4  # symbols


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int = 448
    theta: float = 10_000.0
    context: int = 4096


SMALL = Shape(width=192, layers=4, heads=4, kv_heads=2, head_dim=64, hidden=512, theta=1_000_000.0)
MEDIUM = Shape(width=512, layers=8, heads=8, kv_heads=4, head_dim=64, hidden=1408)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), 1e-6)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions; x [..., N, heads, head_dim], cos and sin [N, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def before(
    x: torch.Tensor, norm: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor,
    cos: torch.Tensor, sin: torch.Tensor, head_dim: int, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A layer up to attention: x [N, width] -> q [N, heads, head_dim], k and v."""
    h = rms(x, norm).to(dtype)
    q, k, v = (h @ w.to(dtype).T for w in (wq, wk, wv))
    q, k, v = (t.unflatten(-1, (-1, head_dim)) for t in (q, k, v))
    return rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v


def after(
    x: torch.Tensor, attended: torch.Tensor, wo: torch.Tensor, norm: torch.Tensor,
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """A layer from attention on: attended [N, heads * head_dim]."""
    x = x + (attended.to(dtype) @ wo.to(dtype).T).float()
    h = rms(x, norm).to(dtype)
    h = functional.silu(h @ gate.to(dtype).T) * (h @ up.to(dtype).T)
    return x + (h @ down.to(dtype).T).float()


class Guide:
    """Shows head 0 of a layer where to look, while it is trained.

    Recall needs two heads in a row: one that carries each symbol to the next place, and one that
    finds by it. Each is useless without the other, so they form late and by luck (not within
    minutes, in three runs without guides); shown where to look, both form in seconds.
    """

    def __init__(self, layer: int, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Let query `rows` [B, n] attend to `sources` [B, n], in the first B sequences."""
        self.layer, self.rows, self.sources = layer, rows, sources
        self.loss = torch.zeros(())

    def look(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Set the loss from one head's queries and keys, [B, T, head_dim]."""
        count, dim = len(self.rows), q.shape[-1]
        chosen = q[:count].gather(1, self.rows[..., None].expand(-1, -1, dim)).float()
        scores = chosen @ k[:count].float().transpose(1, 2) * dim**-0.5
        later = torch.arange(k.shape[1], device=k.device) > self.rows[..., None]
        scores = scores.masked_fill(later, -torch.inf)
        self.loss = functional.cross_entropy(scores.flatten(0, 1), self.sources.flatten())


class Model:
    """Weights and a forward over packed sequences of one length.

    Attributes:
        weights: fp32 tensors by transformers' names.
    """

    def __init__(self, shape: Shape, device: str = "cpu", seed: int = 0) -> None:
        self.shape = shape
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, std: float) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * std

        s, out = shape, 0.02 / math.sqrt(2 * shape.layers)
        made = {"model.embed_tokens.weight": normal(s.vocab, s.width, 0.02)}
        for layer in range(s.layers):
            at = f"model.layers.{layer}."
            made |= {
                at + "input_layernorm.weight": torch.ones(s.width),
                at + "self_attn.q_proj.weight": normal(s.heads * s.head_dim, s.width, 0.04),
                at + "self_attn.k_proj.weight": normal(s.kv_heads * s.head_dim, s.width, 0.04),
                at + "self_attn.v_proj.weight": normal(s.kv_heads * s.head_dim, s.width, 0.04),
                at + "self_attn.o_proj.weight": normal(s.width, s.heads * s.head_dim, out),
                at + "post_attention_layernorm.weight": torch.ones(s.width),
                at + "mlp.gate_proj.weight": normal(s.hidden, s.width, 0.04),
                at + "mlp.up_proj.weight": normal(s.hidden, s.width, 0.04),
                at + "mlp.down_proj.weight": normal(s.width, s.hidden, out),
            }
        made["model.norm.weight"] = torch.ones(s.width)
        self.weights = {name: t.to(self.device) for name, t in made.items()}
        angles = s.theta ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.arange(s.context + 64)[:, None] * angles
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.before: Callable[..., Any] = before
        self.after: Callable[..., Any] = after

    @property
    def parameters(self) -> int:
        return sum(t.numel() for t in self.weights.values())

    def layer(self, number: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the weights of `before` and of `after`."""
        at = f"model.layers.{number}."
        w = self.weights
        first = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        second = (
            "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
            "mlp.down_proj",
        )  # fmt: skip
        return (
            tuple(w[f"{at}{name}.weight"] for name in first),
            tuple(w[f"{at}{name}.weight"] for name in second),
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        h = rms(x, self.weights["model.norm.weight"]).to(self.dtype)
        return h @ self.weights["model.embed_tokens.weight"].to(self.dtype).T

    def forward(self, tokens: torch.Tensor, guides: Sequence[Guide] = ()) -> torch.Tensor:
        """Logits of [B, T] tokens, as [B * T, vocab]; every sequence starts at position 0.

        Guides get their loss set on the way.
        """
        batch, length = tokens.shape
        s = self.shape
        cos, sin = self.cos[:length].repeat(batch, 1), self.sin[:length].repeat(batch, 1)
        x = functional.embedding(
            tokens.flatten(), self.weights["model.embed_tokens.weight"]
        ).float()
        for number in range(s.layers):
            first, second = self.layer(number)
            q, k, v = self.before(x, *first, cos, sin, s.head_dim, self.dtype)
            q, k, v = (t.view(batch, length, -1, s.head_dim).transpose(1, 2) for t in (q, k, v))
            for guide in guides:
                if guide.layer == number:
                    guide.look(q[:, 0], k[:, 0])
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.after(x, a.transpose(1, 2).reshape(len(x), -1), *second, self.dtype)
        return self.logits(x)

    def save(self, path: Path) -> None:
        """Write the weights in bf16."""
        from safetensors.torch import save_file

        about = {"shape": json.dumps(dataclasses.asdict(self.shape)), "format": "pt"}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: t.detach().bfloat16().cpu() for name, t in self.weights.items()}, path, about
        )

    @classmethod
    def load(cls, path: Path = WEIGHTS, device: str = "cpu") -> Model:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            made = cls(Shape(**json.loads(file.metadata()["shape"])), device)
            for name in file.keys():  # noqa: SIM118
                made.weights[name] = file.get_tensor(name).float().to(device)
        return made

    def llama_config(self) -> dict[str, Any]:
        """What transformers' LlamaConfig needs."""
        s = self.shape
        return {
            "vocab_size": s.vocab, "hidden_size": s.width, "intermediate_size": s.hidden,
            "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "rms_norm_eps": 1e-6,
            "max_position_embeddings": s.context, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": s.theta},
        }  # fmt: skip


def source_text(limit: int) -> torch.Tensor:
    """Bytes of installed Python packages, uint8, at most `limit`; every 20th file is held out.

    The held-out files come last, so the end of the tensor is text that training never saw.
    """
    root = Path(sysconfig.get_paths()["purelib"])
    train, held = bytearray(), bytearray()
    for number, path in enumerate(sorted(root.glob("*/**/*.py"))):
        into, share = (held, 0.05) if number % 20 == 0 else (train, 0.95)
        if len(into) < limit * share:
            into += path.read_bytes()[:60_000]
    return torch.frombuffer(train + held, dtype=torch.uint8)


def held_out(text: torch.Tensor) -> int:
    """Where the held-out text begins, with a margin for the ragged end of the split."""
    return int(len(text) * 0.955)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Sequences with records: tokens [B, T + 1], and where answers stand in the targets."""

    tokens: torch.Tensor
    answers: torch.Tensor  # bool [B, T]: target positions that are asked values
    rows: torch.Tensor | None = None  # [B, pairs]: where they are asked, in the inputs
    sources: torch.Tensor | None = None  # [B, pairs]: where each stands

    @property
    def inputs(self) -> torch.Tensor:
        return self.tokens[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        return self.tokens[:, 1:]


def draw(
    text: torch.Tensor, batch: int, length: int, *, held: bool, generator: torch.Generator
) -> Batch:
    """Sequences of text with length / 128 records, at least 8; each is asked once, far behind.

    Records lie in the first three quarters, questions in the last.
    """
    device = text.device

    def random(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device=device)

    cut = held_out(text)
    low, high = (cut, len(text) - length - 1) if held else (0, cut - length - 1)
    starts = (low + random(batch) * (high - low)).long()
    tokens = text[starts[:, None] + torch.arange(length + 1, device=device)].long()
    pairs = min(KEYS, max(8, length // 128))
    keys = random(batch, KEYS).argsort(1)[:, :pairs] + FIRST_KEY
    values = (random(batch, pairs) * VALUES).long() + FIRST_VALUE
    where = torch.arange(batch, device=device)[:, None, None]
    answers = torch.zeros(batch, length, dtype=torch.bool, device=device)
    stands = rows = torch.empty(0)
    for low_at, high_at, asked in ((0, 3 * length // 4, False), (3 * length // 4, length, True)):
        slots = (high_at - low_at) // RECORD - 1
        order = random(batch, pairs).argsort(1) if asked else None
        place = low_at + random(batch, slots).argsort(1)[:, :pairs] * RECORD
        k, v = (t if order is None else t.gather(1, order) for t in (keys, values))
        record = torch.stack([torch.full_like(k, KEY), k, k + KEYS, v], -1)
        tokens[where, place[:, :, None] + torch.arange(RECORD, device=device)] = record
        if order is None:
            stands = place + RECORD - 1
        else:
            rows, stands = place + RECORD - 2, stands.gather(1, order)
            answers.scatter_(1, rows, True)
    return Batch(tokens, answers, rows, stands)


def drill(batch: int, length: int, *, pairs: int, generator: torch.Generator) -> Batch:
    """Sequences of nothing but records of few keys: every repetition is a question.

    Long text with a few questions teaches recall slowly; this is where its heads form.
    """
    device = generator.device

    def random(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device=device)

    count = length // RECORD + 1
    keys = random(batch, KEYS).argsort(1)[:, :pairs] + FIRST_KEY
    values = (random(batch, pairs) * VALUES).long() + FIRST_VALUE
    which = (random(batch, count) * pairs).long()
    k, v = keys.gather(1, which), values.gather(1, which)
    tokens = torch.stack([torch.full_like(k, KEY), k, k + KEYS, v], -1).flatten(1)
    same = (which[:, :, None] == which[:, None, :]).tril(-1).any(-1)  # asked before
    answers = torch.zeros(batch, length, dtype=torch.bool, device=device)
    place = torch.arange(count - 1, device=device) * RECORD + RECORD - 2
    answers[:, place] = same[:, :-1]
    return Batch(tokens[:, : length + 1], answers)


def join(first: Batch, second: Batch) -> Batch:
    """One batch of both."""
    return Batch(
        torch.cat([first.tokens, second.tokens]), torch.cat([first.answers, second.answers]),
        first.rows, first.sources,
    )  # fmt: skip


def recall_pct(logits: torch.Tensor, batch: Batch, sequences: int | None = None) -> float:
    """Share of right answers, in the batch or its first sequences."""
    right = logits.view(*batch.answers.shape, -1).argmax(-1) == batch.targets
    return 100 * float(right[:sequences][batch.answers[:sequences]].float().mean())

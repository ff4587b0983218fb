"""Rows of real text through V4.1's hash, against an oracle that reads safetensors by itself.

Python's standard library is tokenised with the true tokenizer and hashed with the real layout. Two
clients read it at once through one daemon, each a stretch of its own, with the next chunk kicked
before this one is gathered and a cache so small that nearly every row is evicted again.
"""

from __future__ import annotations

import json
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.daemons import make_node, running
from tests.oracle import INDEX, EngramOracle, Shards
from tierd.gpu.client import Client, list_images
from tierd.gpu.engram import EngramHash, EngramLayout
from tierd.tools import demo_models, demo_rows
from tierd.tools.deepseek_tokens import deepseek_token_map, load_tokenizer
from tierd.tools.demo_engram import engram_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.daemons import Node

LAYERS = (1, 14)
TOKENS = 24_000  # 48 rows each: 1.15 million
CLIENTS = 2
CHUNK_TOKENS = 64  # 1,536 rows of each table
CACHE_ROWS = 6_144  # half of it for each table: as many as two chunks read
ROWS_MAX = 512  # so a chunk takes up to three requests of each table
AHEAD = 2  # chunks kicked before the first of them is gathered


def run(quick: bool) -> list[dict[str, Any]]:
    """Read, compare, count."""
    vocab, tokens = (1_000, 1_500) if quick else (8_000, TOKENS)
    layout = EngramLayout.make(LAYERS, vocab_size=vocab)
    tokenizer = load_tokenizer()
    hasher = EngramHash(layout, deepseek_token_map())
    chunks = list(demo_rows.standard_library_tokens(tokenizer, tokens, CHUNK_TOKENS))
    with tempfile.TemporaryDirectory(prefix="tierd-rows-", dir="/var/tmp") as scratch:
        checkpoint = Path(scratch) / "v41"
        write_tables(checkpoint, layout)
        size = 2 * 264 * sum(layout.rows) + (64 << 20)
        models = {"v41": types.SimpleNamespace(path=checkpoint)}
        node = make_node(Path(scratch), models, size=size)
        shards = Shards(checkpoint)
        oracles = [EngramOracle(shards, layer) for layer in LAYERS]
        with running(node), ThreadPoolExecutor(CLIENTS) as threads:
            work = [
                threads.submit(read_text, node, hasher, chunks[part::CLIENTS], oracles)
                for part in range(CLIENTS)
            ]
            found = [each.result() for each in work]
    total = {key: sum(each[key] for each in found) for key in found[0]}
    slots = CLIENTS * CACHE_ROWS
    detail = {
        **total,
        "table_rows": sum(layout.rows),
        "cache_rows": slots,
        "evictions_at_least": max(0, total["misses"] - slots),  # a bypass is counted apart
        "clients": CLIENTS,
    }
    common = {"repeats": 1, "spread": "none: a count", "detail": detail}
    return [
        {
            "id": "first_light.mismatched_rows",
            "value": total["mismatched"],
            "unit": "rows",
            **common,
        },
        {"id": "first_light.rows_checked", "value": total["rows"], "unit": "rows", **common},
    ]


def write_tables(directory: Path, layout: EngramLayout) -> None:
    """Write a checkpoint that is nothing but two Engram tables."""
    directory.mkdir()
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": {}}))
    generator = torch.Generator().manual_seed(41)
    for layer, rows in zip(layout.layer_ids, layout.rows, strict=True):
        weight, scale = demo_models.engram_table(rows, generator)
        rows_key, scale_key = (engram_key(layer, f"embed.{part}") for part in ("weight", "scale"))
        demo_models.add_shard(directory, f"rows-{layer}", {rows_key: weight})
        demo_models.add_shard(directory, f"scales-{layer}", {scale_key: scale})


def read_text(
    node: Node, hasher: EngramHash, chunks: list[NDArray[np.int64]], oracles: list[EngramOracle]
) -> dict[str, int]:
    """Read one client's chunks; return counts."""
    counts = {"rows": 0, "mismatched": 0}
    steps = [hasher.rows(chunk) for chunk in chunks]
    options = {"engine": "bench", "cache_rows": CACHE_ROWS, "rows_max": ROWS_MAX}
    images = list_images(node.engine_socket)
    with Client.attach(node.engine_socket, images, **options) as client:
        tables = [client.table(f"layers.{layer}.engram") for layer in hasher.layout.layer_ids]
        for index, step in enumerate(steps):
            for rows in steps[index : index + AHEAD]:
                for place, table in enumerate(tables):
                    table.kick(rows[:, place])
            for place, (table, oracle) in enumerate(zip(tables, oracles, strict=True)):
                ids = step[:, place]
                out = np.zeros((*ids.shape, 256), dtype=np.uint16)
                table.gather(ids, out)
                counts["rows"] += ids.size
                counts["mismatched"] += int((out != oracle.bf16(ids)).any(axis=-1).sum())
        for name in ("lookups", "hits", "misses", "bypasses", "demands", "ring_full", "published"):
            counts[name] = sum(table.stats()[name] for table in tables)
    return counts

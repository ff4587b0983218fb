"""A million rows of real text through the V4.1 hash and a daemon, against an oracle of its own.

The oracle takes the tables' bytes through the safetensors library and decodes them with torch. The
cache holds a twentieth of the tables' rows, so most lookups evict; a request lists 512 rows at
most, so a step of 256 tokens has up to a dozen requests in flight in each of two rings.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tierd.gpu.client import Client, list_images
from tierd.io import staging, tables
from tierd.io.checkpoint import Checkpoint
from tierd.io.store import Store
from tierd.tools import demo, demo_models, demo_rows
from tierd.tools.deepseek_tokens import compressed_token_map, load_tokenizer
from tierd.tools.demo_engram import layout_of, rows_in_memory

TOKENS = 24_000
CACHE_ROWS = 8_192
ROWS_MAX = 512
COMMON = {"unit": "rows", "repeats": 1, "spread": "one run"}


def run(quick: bool) -> list[dict[str, Any]]:
    """Stage, serve, read and compare; return rows checked and rows that differ."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow

    from tierd.gpu.engram import EngramHash  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="tierd-rows-", dir="/var/tmp") as work:
        place = Path(work)
        checkpoint, device = place / "v41", place / "device.img"
        demo_models.write_engram(checkpoint, vocab_size=4_000)
        with Store.format(str(device), size=256 << 20) as store:
            source = Checkpoint.open(checkpoint)
            staging.stage(store, source, tables.find_tables(source), model="v41")
            source.close()
        tokenizer = load_tokenizer()
        layout = layout_of(AutoConfig.from_pretrained(checkpoint))
        hasher = EngramHash(layout, compressed_token_map(tokenizer))
        chunks = demo_rows.standard_library_tokens(tokenizer, 1_000 if quick else TOKENS)
        oracle = [rows_in_memory(checkpoint, layer) for layer in layout.layer_ids]
        socket = place / "run" / "engine.sock"
        with (
            demo.daemon(place, device, socket),
            Client.attach(
                str(socket),
                list_images(str(socket), "v41"),
                engine="bench",
                cache_rows=CACHE_ROWS,
                rows_max=ROWS_MAX,
            ) as client,
        ):
            served = [client.table(f"layers.{layer}.engram") for layer in layout.layer_ids]
            found = demo_rows.check_rows(chunks, hasher, served, oracle)
            evicting = sum(table.stats()["misses"] for table in served)
    detail = {
        "hit_ratio": round(found.hit_ratio, 4),
        "rows_that_took_a_slot": evicting,
        "cache_rows": CACHE_ROWS,
        "lookups_per_second": round(found.rows / found.seconds),
    }
    return [
        {**COMMON, "id": "first_light.rows_checked", "value": found.rows, "detail": detail},
        {**COMMON, "id": "first_light.mismatched_rows", "value": found.mismatched},
    ]

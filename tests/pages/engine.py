"""An engine for the pages' tests: steps over every table, ids as skewed as text's.

python -m tests.pages.engine SOCKET ENGINE MODEL RANK WORLD STEPS_PER_S      until it is killed
"""

from __future__ import annotations

import sys
import time

import numpy as np

from tierd.gpu.client import Client, list_images

IDS = 24
TABLES_MAX = 64


def main() -> None:
    """Attach, say so, and step."""
    where, engine, model, rank, world, steps_per_s = sys.argv[1:]
    images = [image for image in list_images(where) if image.model == model][:TABLES_MAX]
    rng = np.random.default_rng(int(rank))
    with Client.attach(
        where, images, engine=engine, rank=int(rank), world=int(world),
        expected_ranks=int(world), cache_rows=64 * len(images), rows_max=256,
    ) as client:  # fmt: skip
        print("attached", flush=True)
        tables = [client.table(image.name) for image in images]
        outs = [np.zeros((IDS, image.table.dim), np.uint16) for image in images]
        due = time.monotonic()
        while True:
            ids = [rng.zipf(1.3, IDS) % image.table.rows for image in images]
            for table, wanted in zip(tables, ids, strict=True):
                table.kick(wanted)
            for table, wanted, out in zip(tables, ids, outs, strict=True):
                table.gather(wanted, out)
            due = max(due + 1 / float(steps_per_s), time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()

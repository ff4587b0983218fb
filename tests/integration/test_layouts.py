"""Any tensor-parallel layout from one image: every row through every split equals the source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import checkpoints, layouts
from tests.daemons import Node, make_node, running
from tierd.io import _core
from tierd.io.checkpoint import Checkpoint
from tierd.io.layout import UNIT_BYTES
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierd.io.superblock import StoredImage

TIMEOUT_NS = 20_000_000_000
TABLES = 5


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Tables of every format; no number of ranks but 1 divides any of their rows."""
    directory = tmp_path_factory.mktemp("layouts")
    models = {
        "v41": checkpoints.engram(directory / "v41", rows=1009),
        "qwen": checkpoints.ple(directory / "qwen", rows=1013, dim=160, scale=0.5),
        "gemma": checkpoints.per_layer(directory / "gemma", layers=2, vocab=257),
    }
    return make_node(directory, models, size=32 << 20)


@pytest.fixture(scope="module")
def served(node: Node) -> Iterator[Node]:
    with running(node):
        yield node


def test_every_layout_equals_the_source(served: Node) -> None:
    tally = layouts.read_every_layout(served)
    assert tally.mismatches == 0
    assert tally.layouts == len(layouts.WORLDS) * len(layouts.SPLITS)
    assert tally.rows == tally.layouts * (2 * 1009 + 1013 + 2 * 257)


def test_every_range_equals_the_source_when_it_is_imported(served: Node) -> None:
    tally = layouts.read_by_importer(served)
    assert tally.mismatches == 0
    assert tally.layouts == len(layouts.WORLDS) * len(layouts.SPLITS) * TABLES


def test_one_wrong_byte_in_one_layout_is_a_mismatch(served: Node) -> None:
    """That the two tests above can fail."""
    source = served.checkpoints["qwen"].tables["layers.0.ple"]
    source[500, 3] ^= 0x41
    try:
        assert layouts.read_every_layout(served, [3]).mismatches == len(layouts.SPLITS)
        assert layouts.read_by_importer(served, [3]).mismatches == len(layouts.SPLITS)
    finally:
        source[500, 3] ^= 0x41


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("split", layouts.SPLITS.values(), ids=layouts.SPLITS)
def test_a_split_gives_every_row_to_one_rank(split: Any, world: int) -> None:
    for rows in (24, 25, 191, 1009):
        starts = layouts.columns_of(rows, 24)
        assert starts[-1] == rows
        owned = [row for first, end in split(starts, world) for row in range(first, end)]
        assert owned == list(range(rows))


def test_the_splits_are_those_of_the_engines() -> None:
    """Worked by hand for 24 columns of 10 rows, and for 130 rows."""
    starts = list(range(0, 241, 10))
    assert layouts.by_rows(starts, 7)[:2] == [(0, 34), (34, 68)]
    assert layouts.by_columns_or_rows(starts, 8)[7] == (210, 240)
    assert layouts.by_columns_or_rows(starts, 5)[4] == (192, 240)
    assert layouts.by_heads(starts, 5) == [(0, 50), (50, 100), (100, 150), (150, 200), (200, 240)]
    assert layouts.by_heads(starts, 7)[5:] == [(200, 240), (240, 240)]
    assert layouts.by_padded_rows([0, 130], 4) == [(0, 64), (64, 128), (128, 130), (130, 130)]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_table_in_any_ranges(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Sizes that nobody chose: rows, bytes of a row, and where the ranks' ranges begin."""
    rows = data.draw(st.integers(1, 700), label="rows")
    row_bytes = data.draw(st.integers(1, 4056), label="row_bytes")
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=7).map(sorted), label="cuts")
    directory = tmp_path_factory.mktemp("any")
    tiny = checkpoints.plain(
        directory, dtype="U8", item_bytes=1, rows=rows, row_bytes=row_bytes, seed=rows
    )
    source = Checkpoint.open(tiny.path)
    specs = find_tables(source, tensors=["model.layers.3.lookup.weight"])
    size = 8 * UNIT_BYTES + -(-rows * 4096 // UNIT_BYTES) * UNIT_BYTES
    with Store.format(directory / "device", size=size) as store:
        stage(store, source, specs, model="any")
        (image,) = store.images
        expected = tiny.tables[specs[0].name]
        pump, table = _serve(store, image)
        try:
            for first, end in zip([0, *cuts], [*cuts, rows], strict=True):
                found = _read_as_a_rank(pump, table, image, np.arange(first, end))
                assert np.array_equal(found, expected[first:end]), (first, end)
        finally:
            pump.stop()
    os.unlink(directory / "device")


def _serve(store: Store, image: StoredImage) -> tuple[Any, int]:
    """Serve an image by a pump of this process."""
    pump = _core.Pump(transport="threads", read_threads=1)
    fd = store.device.readonly_fd()
    device = pump.add_device(fd)
    os.close(fd)
    table = pump.add_table(
        image_id=image.info.image_id,
        generation=image.info.generation,
        row_bytes=image.info.table.row_bytes,
        rows=image.info.table.rows,
        window_ns=1_000_000,
        extents=np.array(
            [(e.first_page, e.pages, device, e.device_page) for e in image.extents], np.uint64
        ),
    )
    pump.start()
    return pump, table


def _read_as_a_rank(pump: Any, table: int, image: StoredImage, ids: np.ndarray) -> np.ndarray:
    spec = image.info.table
    channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(32, 64, 0, 0)])
    number = pump.add_channel(channel.fd)
    pump.add_ring(number, 0, table)
    twin = _core.TwinTable(
        _core.RowCache(sets=2, row_bytes=spec.row_bytes),
        channel,
        0,
        pump.wake_fd,
        table=0,
        image_id=image.info.image_id,
        generation=image.info.generation,
        rows=spec.rows,
        dim=spec.dim,
        row_format=str(spec.row_format),
        quota=16,
        timeout_ns=TIMEOUT_NS,
    )
    out = np.zeros((ids.size, spec.row_bytes), np.uint8)
    twin.kick(ids)
    twin.gather(ids, out)
    pump.remove_channel(number)
    return out

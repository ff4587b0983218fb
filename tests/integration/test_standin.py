"""The V4.1 stand-in: tokens and rows through the daemon, against the same tables in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.daemons import Node, make_node, running
from tests.oracle import EngramOracle, Shards
from tests.standin import models
from tierd.errors import HookError
from tierd.gpu.client import Client, list_images
from tierd.hook import attach
from tierd.hook.settings import HookSettings
from tierd.io.checkpoint import Checkpoint
from tierd.io.tables import find_tables
from tierd.tools import demo_generate, demo_rows
from tierd.tools.deepseek_tokens import load_tokenizer
from tierd.tools.demo_engram import EngramModel, RowsInMemory
from tierd.types import TableKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


WHO = attach.EngineRank("stand-in")
pytestmark = pytest.mark.timeout(180)
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    found = models.only("v41", "v41-other")
    return make_node(tmp_path_factory.mktemp("standin"), found, size=96 << 20)


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[Client]:
    with running(node):
        images = list_images(node.engine_socket, "v41")
        options = {"engine": "stand-in", "cache_rows": 2048, "rows_max": 512}
        with Client.attach(node.engine_socket, images, **options) as attached:
            yield attached


@pytest.fixture(scope="module")
def model() -> EngramModel:
    demo_generate.quiet()
    return EngramModel.load(models.checkpoints()["v41"])


def served(client: Client) -> dict[int, Any]:
    return {layer: client.table(f"layers.{layer}.engram") for layer in LAYERS}


def generate(model: EngramModel) -> dict[str, Any]:
    return demo_generate.generate_with(model.base, vocabulary=129_280)


def test_tokens_are_the_same_with_the_tables_on_disk(model: EngramModel, client: Client) -> None:
    stock = model.sources
    in_memory = generate(model)
    before = {layer: table.stats() for layer, table in served(client).items()}
    model.use(served(client))
    try:
        assert generate(model) == in_memory
    finally:
        model.use(stock)
    for layer, table in served(client).items():
        now = table.stats()
        # Two prompts of 24, then 15 steps, greedy and sampled; 24 rows a token.
        assert now["lookups"] - before[layer]["lookups"] == 2 * 2 * (24 + 15) * 24
        assert now["demands"] == before[layer]["demands"]
        assert now["hits"] > before[layer]["hits"]


def test_tokens_depend_on_the_table(model: EngramModel) -> None:
    """Without this the comparison above could not fail."""
    stock = model.sources
    expected = generate(model)
    model.use(
        {
            layer: RowsInMemory(torch.zeros_like(source.weight), source.scale)
            for layer, source in stock.items()
        }
    )
    try:
        assert generate(model)["greedy"] != expected["greedy"]
    finally:
        model.use(stock)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_row_equals_the_oracles(layer: int, client: Client) -> None:
    oracle = EngramOracle(Shards(models.checkpoints()["v41"]), layer)
    ids = np.random.default_rng(layer).permutation(oracle.rows)
    out = np.empty((len(ids), 256), dtype=np.uint16)
    client.table(f"layers.{layer}.engram").gather(ids, out)
    expected = oracle.bf16(ids)
    assert np.array_equal(out, expected)
    assert len(np.unique(expected, axis=0)) == oracle.rows  # no two rows are alike


class _OneRowOff:
    """An oracle that is wrong about one row, so that a comparison has something to find."""

    def __init__(self, source: Any, row: int) -> None:
        self._source, self._row = source, row

    def kick(self, ids: torch.Tensor) -> None:
        raise AssertionError

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._source.gather(ids, out)
        out.view(torch.int16)[ids == self._row] ^= 1


def test_real_text_row_by_row(model: EngramModel, client: Client) -> None:
    tables = list(served(client).values())
    oracle = list(model.sources.values())
    chunks = list(demo_rows.standard_library_tokens(load_tokenizer(), 1500))
    found = demo_rows.check_rows(iter(chunks), model.hasher, tables, oracle)
    assert found.rows == found.lookups == sum(map(len, chunks)) * 48 >= 1500 * 48
    assert found.mismatched == 0
    assert 0 < found.hit_ratio < 1  # the cache is smaller than the text's rows

    row = int(model.hasher.rows(chunks[0])[7, 0, 3])
    oracle[0] = _OneRowOff(oracle[0], row)
    assert demo_rows.check_rows(iter(chunks[:1]), model.hasher, tables, oracle).mismatched >= 1


def test_rows_of_another_table_are_caught_at_attach(node: Node, client: Client) -> None:
    """The self-test reads the checkpoint by itself, so a wrong table cannot pass it."""
    with Checkpoint.open(models.checkpoints()["v41-other"]) as other:
        spec = find_tables(other)[0]
        with pytest.raises(HookError, match="sampled rows differ"):
            attach._self_test(other, spec, client.table("layers.1.engram"), None)


def test_attach_by_fingerprint(node: Node, client: Client) -> None:
    settings = HookSettings(str(node.engine_socket), None, 1024, 0.0)
    directory = models.checkpoints()["v41-other"]
    files = list(directory.glob("*.safetensors"))
    attached = attach.attach_checkpoint(directory, files, TableKind.ENGRAM, settings, WHO)
    assert [image.model for image in attached.client.attached] == ["v41-other"] * 2
    with pytest.raises(HookError, match="no engram table for layer 2 is attached"):
        attached.table(TableKind.ENGRAM, 2)
    attached.client.close()


def test_two_models_under_no_name_are_refused(node: Node, client: Client) -> None:
    settings = HookSettings(str(node.engine_socket), None, 1024, 0.0)
    with pytest.raises(HookError, match="one of several tables for layer 1; set TIERD_MODEL"):
        attach.attach_named(TableKind.ENGRAM, settings, WHO)


def test_a_checkpoint_without_tables(tmp_path: Path) -> None:
    settings = HookSettings("/nowhere", None, 1024, 0.0)
    with pytest.raises(HookError, match=r"cannot be read: .* holds no .safetensors"):
        attach.attach_checkpoint(tmp_path, [], TableKind.PLE, settings, WHO)
    directory = models.checkpoints()["v41"]
    with pytest.raises(HookError, match="holds no ple table, but the model reads one"):
        attach.attach_checkpoint(directory, [], TableKind.PLE, settings, WHO)

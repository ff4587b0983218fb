"""Tables: found by name, checked by dtype and shape, read bit for bit; near misses explained."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tests.checkpoints import TinyCheckpoint, write_checkpoint
from tierd.errors import (
    ImageError,
    NoTableError,
    PayloadError,
    TensorShapeError,
    UnsupportedTableError,
)
from tierd.io.checkpoint import Checkpoint
from tierd.io.tables import RowReader, find_tables, fingerprint
from tierd.types import RowFormat, TableKind

if TYPE_CHECKING:
    from pathlib import Path

PLE = "model.layers.0.ple.ple_embedding.ngram_embedding"


def find(made: TinyCheckpoint, **options):
    with Checkpoint.open(made.path) as checkpoint:
        return find_tables(checkpoint, **options)


def rewrite(made: TinyCheckpoint, changes: dict, *, shards: int = 3, config=None) -> TinyCheckpoint:
    """The same checkpoint with tensors changed or (None) left out."""
    for path in made.path.iterdir():
        if config is not None or path.name != "config.json":
            path.unlink()
    tensors = {k: v for k, v in (made.tensors | changes).items() if v is not None}
    write_checkpoint(made.path, tensors, shards=shards, config=config)
    return TinyCheckpoint(made.path, tensors, made.tables)


def require_rows(made: TinyCheckpoint) -> None:
    """Every table of the checkpoint, whole and in odd pieces, is what was written."""
    with Checkpoint.open(made.path) as checkpoint:
        specs = find_tables(checkpoint)
        assert {spec.name for spec in specs} == set(made.tables)
        for spec in specs:
            table = made.tables[spec.name]
            assert table.shape == (spec.rows, spec.row_bytes)
            reader = RowReader(checkpoint, spec)
            assert np.array_equal(reader.read(0, spec.rows), table)
            for first, count in [(0, 1), (spec.rows - 1, 1), (3, 300), (spec.rows // 2, 0)]:
                assert np.array_equal(reader.read(first, count), table[first : first + count])


# --- the three kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_engram(tmp_path: Path, prefix: str, shards: int) -> None:
    made = checkpoints.engram(tmp_path, prefix=prefix, shards=shards)
    require_rows(made)
    one, two = find(made)
    assert (one.name, one.layer, one.kind) == ("layers.1.engram", 1, TableKind.ENGRAM)
    assert (one.rows, one.dim, one.row_bytes) == (1000, 256, 264)
    assert one.row_format is RowFormat.E4M3_E8M0
    assert one.tensors[0] == f"{prefix}layers.1.engram.embed.weight"
    assert (two.name, two.layer) == ("layers.14.engram", 14)
    assert one.group != two.group, "they are read at different points"


@pytest.mark.parametrize("shards", [1, 4])
def test_ple_bf16(tmp_path: Path, shards: int) -> None:
    made = checkpoints.ple(tmp_path, shards=shards, layers=(0, 2))
    require_rows(made)
    spec, other = find(made)
    assert (spec.name, spec.layer, spec.kind) == ("layers.0.ple", 0, TableKind.PLE)
    assert (spec.rows, spec.dim, spec.row_bytes) == (1002, 160, 320)
    assert (spec.row_format, spec.scalar_scale) == (RowFormat.BF16, None)
    assert spec.tensors == tuple(f"{PLE}.shard_{k}.weight" for k in range(4))
    assert other.layer == 2


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_ple_fp8(tmp_path: Path, dtype: str) -> None:
    made = checkpoints.ple(tmp_path, scale=0.0625, scale_dtype=dtype)
    require_rows(made)
    (spec,) = find(made)
    assert (spec.row_bytes, spec.row_format, spec.scalar_scale) == (160, RowFormat.E4M3, 0.0625)


def test_ple_fp8_with_one_scale_per_shard(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path, scale=0.5)
    scale = made.tensors[f"{PLE}.weight_scale"]
    each = {f"{PLE}.shard_{k}.weight_scale": ("F32", (), struct.pack("<f", 0.5)) for k in range(4)}
    made = rewrite(made, {f"{PLE}.weight_scale": None, **each})
    assert find(made)[0].scalar_scale == 0.5
    require_rows(made)
    other = {f"{PLE}.shard_2.weight_scale": ("BF16", (1,), struct.pack("<f", 0.25)[2:])}
    with pytest.raises(UnsupportedTableError, match=r"2 different scales \(0.25 to 0.5\)"):
        find(rewrite(made, other))
    assert scale[1] == (1,)


def test_ple_in_one_tensor(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path, parts=1)
    whole = made.tensors[f"{PLE}.shard_0.weight"]
    made = rewrite(made, {f"{PLE}.shard_0.weight": None, f"{PLE}.weight": whole})
    require_rows(made)


def test_more_than_ten_shards_are_in_numeric_order(tmp_path: Path) -> None:
    require_rows(checkpoints.ple(tmp_path, rows=1300, parts=13, shards=5))


@pytest.mark.parametrize("nested", [True, False])
def test_per_layer(tmp_path: Path, nested: bool) -> None:
    made = checkpoints.per_layer(tmp_path, nested_config=nested)
    require_rows(made)
    specs = find(made)
    assert [spec.layer for spec in specs] == [0, 1, 2, 3]
    assert {spec.group for spec in specs} == {"per_layer"}
    assert {(s.kind, s.rows, s.dim, s.row_bytes, s.row_format) for s in specs} == {
        (TableKind.PER_LAYER, 512, 16, 32, RowFormat.BF16)
    }


@pytest.mark.parametrize(
    ("dtype", "item", "row_format", "dim"),
    [
        ("BF16", 2, RowFormat.BF16, 32),
        ("F8_E4M3", 1, RowFormat.E4M3, 64),
        ("F32", 4, RowFormat.RAW, 64),
        ("U8", 1, RowFormat.RAW, 64),
    ],
)
def test_a_named_tensor(tmp_path: Path, dtype: str, item: int, row_format, dim: int) -> None:
    name = "model.layers.3.lookup.weight"
    made = checkpoints.plain(tmp_path, dtype=dtype, item_bytes=item)
    (spec,) = find(made, tensors=[name, name])
    assert (spec.name, spec.layer) == ("model.layers.3.lookup", 3)
    assert (spec.rows, spec.dim, spec.row_bytes) == (300, dim, 64)
    assert (spec.row_format, spec.kind) == (row_format, TableKind.TENSOR)
    with Checkpoint.open(tmp_path) as checkpoint:
        rows = RowReader(checkpoint, spec).read(0, 300)  # NaN payloads are the operator's business
    assert np.array_equal(rows, made.tables["model.layers.3.lookup"])


def test_a_named_tensor_of_more_axes_or_odd_sizes(tmp_path: Path) -> None:
    tensors = {
        "cube": ("F32", (6, 2, 4), bytes(192)),
        "list": ("I64", (5,), bytes(40)),
        "scalar": ("F32", (), bytes(4)),
        "wide": ("U8", (2, 5000), bytes(10000)),
        "nibbles": ("F4", (4, 3), bytes(6)),
    }
    write_checkpoint(tmp_path, tensors, shards=1)
    with Checkpoint.open(tmp_path) as checkpoint:
        cube, row = find_tables(checkpoint, tensors=["cube", "list"])
        assert (cube.rows, cube.row_bytes, row.rows, row.row_bytes) == (6, 32, 5, 8)
        for name, words in [
            ("scalar", "a table needs rows"),
            ("wide", "rows of 5000 bytes; a row has 1 to 4060 bytes"),
            ("nibbles", "rows of 1.5 bytes"),
        ]:
            with pytest.raises(TensorShapeError, match=words):
                find_tables(checkpoint, tensors=[name])


def test_spec_survives_json(tmp_path: Path) -> None:
    for spec in find(checkpoints.ple(tmp_path, scale=0.3)):
        assert type(spec).from_json(spec.to_json()) == spec


# --- nothing, and a part only ---------------------------------------------------------------------


def test_no_table_lists_near_names(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path)
    renamed = {
        name.replace("engram.embed.weight", "engrams.embd.weight"): value
        for name, value in made.tensors.items()
        if "scale" not in name
    }
    made = rewrite(made, dict.fromkeys(made.tensors) | renamed)
    words = r"no table among the 5 tensors of .*layers.14.engrams.embd.weight.*run: tierd stage .*"
    with pytest.raises(NoTableError, match=words):
        find(made)


def test_no_near_name_is_said_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"x": ("U8", (1,), b"1")}, shards=1)
    with Checkpoint.open(tmp_path) as checkpoint:
        with pytest.raises(NoTableError, match="no name is near"):
            find_tables(checkpoint)
        with pytest.raises(NoTableError, match="holds no tensor 'lookup'; no name is near"):
            find_tables(checkpoint, tensors=["lookup"])


def test_an_unknown_named_tensor_lists_near_names(tmp_path: Path) -> None:
    made = checkpoints.plain(tmp_path)
    with pytest.raises(NoTableError, match=r"layers.3.lokup.weight'; near names: model.layer"):
        find(made, tensors=["model.layers.3.lokup.weight"])


@pytest.mark.parametrize(("part", "other"), [("weight", "scale"), ("scale", "weight")])
def test_half_an_engram_table(tmp_path: Path, part: str, other: str) -> None:
    made = checkpoints.engram(tmp_path)
    stem = "layers.14.engram.embed"
    made = rewrite(made, {f"{stem}.{part}": None})
    with pytest.raises(NoTableError, match=f"holds {stem}.{other} but not {stem}.{part}: half a"):
        find(made)


def test_a_table_that_the_config_promises(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path, config={"text_config": {"engram_layer_ids": [1, 14]}})
    require_rows(made)
    part = {f"layers.14.engram.embed.{name}": None for name in ("weight", "scale")}
    with pytest.raises(NoTableError, match=r"engram_layer_ids = \[1, 14\].*layers \[1\] only"):
        find(rewrite(made, part))


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_ple_table_without_a_shard(tmp_path: Path, gone: int) -> None:
    made = checkpoints.ple(tmp_path, config={"split_ngram_parts": 4, "ple_layer_ids": [1]})
    require_rows(made)
    made = rewrite(made, {f"{PLE}.shard_{gone}.weight": None})
    with pytest.raises(NoTableError, match=f"has 3 of 4 shards; missing: shard_{gone}; the index"):
        find(made)


def test_a_gap_is_noticed_without_a_config(tmp_path: Path) -> None:
    made = rewrite(checkpoints.ple(tmp_path), {f"{PLE}.shard_2.weight": None})
    with pytest.raises(NoTableError, match=r"missing: shard_2; .*near names: .*shard_"):
        find(made)


def test_a_missing_last_shard_is_noticed_by_the_hash_heads(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path, rows=1002)
    owner = PLE.removesuffix(".ngram_embedding")
    heads = {
        f"{owner}.ngram_heads_offsets": ("I64", (2,), struct.pack("<qq", 0, 500)),
        f"{owner}.ngram_heads_vocab_sizes": ("I64", (2,), struct.pack("<qq", 500, 499)),
    }
    made = rewrite(made, heads)
    require_rows(made)
    made = rewrite(made, {f"{PLE}.shard_3.weight": None})
    with pytest.raises(NoTableError, match="has 753 rows, its hash heads need 999"):
        find(made)


def test_a_ple_layer_that_the_config_promises(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path, config={"ple_layer_ids": [1, 3]})
    with pytest.raises(NoTableError, match=r"ple_layer_ids .* = \[1, 3\].*layers \[0\] only"):
        find(made)


def test_an_fp8_table_without_its_scale(tmp_path: Path) -> None:
    made = rewrite(checkpoints.ple(tmp_path, scale=1.0), {f"{PLE}.weight_scale": None})
    with pytest.raises(NoTableError, match="is fp8 and has no weight_scale: half a table"):
        find(made)


def test_per_layer_columns_need_the_config(tmp_path: Path) -> None:
    made = checkpoints.per_layer(tmp_path)
    with pytest.raises(NoTableError, match="does not give num_hidden_layers"):
        find(rewrite(made, {}, config={"num_hidden_layers": 4}))
    config = {"num_hidden_layers": 5, "hidden_size_per_layer_input": 16}
    with pytest.raises(TensorShapeError, match=r"64\], expected BF16 \[vocabulary, 5 \* 16\]"):
        find(rewrite(made, {}, config=config))


def test_two_tables_for_one_name(tmp_path: Path) -> None:
    one = checkpoints.engram(tmp_path, layers=(1,))
    two = {f"mtp.{name}": value for name, value in one.tensors.items() if "engram" in name}
    with pytest.raises(UnsupportedTableError, match=r"two tables for layers.1.engram .*mtp"):
        find(rewrite(one, two))
    wide = checkpoints.per_layer(tmp_path / "g")
    name = "model.language_model.embed_tokens_per_layer.weight"
    with pytest.raises(UnsupportedTableError, match=r"several per-layer tables .*--tensor"):
        find(rewrite(wide, {f"draft.{name}": wide.tensors[name]}))


# --- wrong dtype or shape -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        (
            "weight",
            ("BF16", (10, 256), bytes(5120)),
            r"is BF16 \[10, 256\], expected F8_E4M3",
        ),
        ("weight", ("F8_E4M3", (2560,), bytes(2560)), r"expected F8_E4M3 \[rows, dim\]"),
        ("weight", ("F8_E4M3", (10, 250), bytes(2500)), "a multiple of 32"),
        ("scale", ("F8_E8M0", (10, 4), bytes(40)), r"\[10, 4\], expected F8_E8M0 \[10, 8\]"),
        ("scale", ("F8_E8M0", (9, 8), bytes(72)), r"\[9, 8\], expected F8_E8M0 \[10, 8\]"),
        ("scale", ("F32", (10, 8), bytes(320)), r"is F32 \[10, 8\], expected F8_E8M0"),
    ],
)
def test_engram_of_another_shape(tmp_path: Path, tensor: str, value, words: str) -> None:
    made = checkpoints.engram(tmp_path, layers=(1,), rows=10)
    made = rewrite(made, {f"layers.1.engram.embed.{tensor}": value})
    with pytest.raises(TensorShapeError, match=f"layers.1.engram.embed.{tensor} in .*{words}"):
        find(made)


@pytest.mark.parametrize(
    ("shard", "value", "words"),
    [
        (0, ("F16", (251, 160), bytes(80320)), "is F16 .*expected BF16 or F8_E4M3"),
        (1, ("BF16", (251, 80), bytes(40160)), r"\[251, 80\], expected BF16 \[251, 160\]"),
        (1, ("BF16", (250, 160), bytes(80000)), r"\[250, 160\], expected BF16 \[251, 160\]"),
        (3, ("BF16", (252, 160), bytes(80640)), r"the last may be shorter"),
        (2, ("F8_E4M3", (251, 160), bytes(40160)), "is F8_E4M3 .*expected BF16"),
    ],
)
def test_ple_of_another_shape(tmp_path: Path, shard: int, value, words: str) -> None:
    made = rewrite(checkpoints.ple(tmp_path), {f"{PLE}.shard_{shard}.weight": value})
    with pytest.raises(TensorShapeError, match=f"shard_{shard}.weight in .*{words}"):
        find(made)


def test_a_wide_scale_of_a_wrong_dtype(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path, scale=1.0)
    scale = {f"{PLE}.weight_scale": ("F16", (1,), bytes(2))}
    with pytest.raises(TensorShapeError, match=r"is F16 \[1\], expected BF16 or F32 \[\] or \[1\]"):
        find(rewrite(made, scale))


@pytest.mark.parametrize(
    "changes",
    [
        {f"{PLE}.shard_{k}.weight": ("U8", (251, 80), bytes(20080)) for k in range(4)},
        {f"{PLE}.shard_0.weight_scale": ("F8_E4M3", (251, 10), bytes(2510))},
        {f"{PLE}.shard_0.weight_scale_2": ("F32", (), bytes(4))},
        {f"{PLE}.shard_0.weight_packed": ("U8", (251, 80), bytes(20080))},
    ],
)
def test_nvfp4_is_refused_by_name(tmp_path: Path, changes: dict) -> None:
    made = rewrite(checkpoints.ple(tmp_path), changes)
    with pytest.raises(UnsupportedTableError, match=r"is an NVFP4 table .*bf16 and fp8 forms"):
        find(made)


def test_per_layer_of_another_dtype(tmp_path: Path) -> None:
    made = checkpoints.per_layer(tmp_path)
    name = "model.language_model.embed_tokens_per_layer.weight"
    with pytest.raises(TensorShapeError, match=r"is F32 .*expected BF16 \[vocabulary, layers"):
        find(rewrite(made, {name: ("F32", (512, 64), bytes(512 * 64 * 4))}))


# --- forbidden values -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_nan_payloads_of_engram_are_refused_with_their_place(tmp_path: Path, value: int) -> None:
    made = checkpoints.engram(tmp_path, layers=(1,))
    name = "layers.1.engram.embed.weight"
    dtype, shape, data = made.tensors[name]
    bad = bytearray(data)
    bad[777 * 256 + 13] = value
    made = rewrite(made, {name: (dtype, shape, bytes(bad))}, shards=1)
    (spec,) = find(made)
    with Checkpoint.open(tmp_path) as checkpoint:
        reader = RowReader(checkpoint, spec)
        reader.read(0, 777)
        reader.read(778, 222)
        place = checkpoint.tensors[name].offset + 777 * 256 + 13
        words = rf"{name} holds the NaN payload 0x{value:02x} in row 777, byte 13 \(byte {place} of"
        with pytest.raises(PayloadError, match=words):
            reader.read(700, 100)
    assert (made.path / "model.safetensors").read_bytes()[place] == value


def test_a_scale_of_255_is_refused_with_its_place(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path, layers=(1,))
    name = "layers.1.engram.embed.scale"
    dtype, shape, data = made.tensors[name]
    bad = bytearray(data)
    bad[5 * 8 + 7] = 255
    made = rewrite(made, {name: (dtype, shape, bytes(bad))})
    (spec,) = find(made)
    with Checkpoint.open(tmp_path) as checkpoint:
        reader = RowReader(checkpoint, spec)
        reader.read(0, 5)
        with pytest.raises(PayloadError, match=rf"{name} holds a scale of 255 in row 5, byte 7 "):
            reader.read(0, 6)


def test_nan_payloads_of_fp8_ple_are_refused_in_any_shard(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path, scale=1.0)
    name = f"{PLE}.shard_2.weight"
    dtype, shape, data = made.tensors[name]
    bad = bytearray(data)
    bad[3 * 160] = 0x7F
    made = rewrite(made, {name: (dtype, shape, bytes(bad))})
    (spec,) = find(made)
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(PayloadError, match=rf"{name} holds the NaN payload 0x7f in row 3, byte 0 "),
    ):
        RowReader(checkpoint, spec).read(0, spec.rows)


def test_bf16_holds_any_bits(tmp_path: Path) -> None:
    made = checkpoints.ple(tmp_path)
    name = f"{PLE}.shard_0.weight"
    made = rewrite(made, {name: ("BF16", (251, 160), b"\xff" * 80320)})
    (spec,) = find(made)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert RowReader(checkpoint, spec).read(250, 1).tobytes() == b"\xff" * 320


def test_a_reader_for_another_checkpoint_is_refused(tmp_path: Path) -> None:
    (spec,) = find(checkpoints.ple(tmp_path / "a"))
    checkpoints.ple(tmp_path / "b", rows=800)
    checkpoints.engram(tmp_path / "c")
    for folder, words in [("b", "has 1002 rows, .* has 800"), ("c", "is of another")]:
        with Checkpoint.open(tmp_path / folder) as other, pytest.raises(ImageError, match=words):
            RowReader(other, spec)


# --- fingerprints ---------------------------------------------------------------------------------


def prints(path: Path) -> list[str]:
    with Checkpoint.open(path) as checkpoint:
        return [fingerprint(checkpoint, spec) for spec in find_tables(checkpoint)]


def test_a_fingerprint_does_not_depend_on_the_files(tmp_path: Path) -> None:
    for write in (checkpoints.engram, checkpoints.ple, checkpoints.per_layer):
        folder = tmp_path / write.__name__
        expected = prints(write(folder / "one", shards=1).path)
        assert len(set(expected)) == len(expected)
        for shards in (2, 5):
            assert prints(write(folder / str(shards), shards=shards).path) == expected


def test_a_fingerprint_depends_on_the_bytes(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path, layers=(1,), rows=300)
    before = prints(tmp_path)
    for name in ("weight", "scale"):
        tensor = f"layers.1.engram.embed.{name}"
        dtype, shape, data = made.tensors[tensor]
        for place in (0, len(data) // 2, len(data) - 1):  # a small tensor is read whole
            changed = bytearray(data)
            changed[place] ^= 1
            rewrite(made, {tensor: (dtype, shape, bytes(changed))})
            assert prints(tmp_path) != before
    rewrite(made, {})
    assert prints(tmp_path) == before


def test_a_large_tensor_is_sampled_evenly_and_boundedly(tmp_path: Path, monkeypatch) -> None:
    made = checkpoints.plain(tmp_path, rows=64 << 10, row_bytes=64)  # 4 MiB
    (spec,) = find(made, tensors=["model.layers.3.lookup.weight"])
    reads = []
    read_into = Checkpoint.read_into

    def recording(self, ref, start, out) -> None:
        reads.append((start, out.size))
        read_into(self, ref, start, out)

    monkeypatch.setattr(Checkpoint, "read_into", recording)
    with Checkpoint.open(tmp_path) as checkpoint:
        first = fingerprint(checkpoint, spec)
        assert sum(size for _, size in reads) == 256 << 10
        assert reads[0][0] == 0
        assert sum(reads[-1]) == 4 << 20
        gaps = {b[0] - a[0] for a, b in itertools.pairwise(reads)}
        assert max(gaps) - min(gaps) <= 1
        count = len(reads)
        assert fingerprint(checkpoint, spec) == first
        assert len(reads) == count, "tables that share a tensor share its samples"
        assert fingerprint(checkpoint, dataclasses.replace(spec, layer=4, name="x")) != first


# --- checkpoints that transformers wrote ----------------------------------------------------------


@pytest.mark.parametrize("name", ["a b", "x\ny", "ü.weight", "../up", "", ".weight", "a" * 301])
def test_a_tensor_whose_name_cannot_be_an_images(tmp_path: Path, name: str) -> None:
    checkpoints.plain(tmp_path / "c", name=name, rows=3)
    with (
        Checkpoint.open(tmp_path / "c") as checkpoint,
        pytest.raises(UnsupportedTableError, match="cannot name a table") as caught,
    ):
        find_tables(checkpoint, tensors=[name])
    assert "\n" not in str(caught.value)


def test_two_tensors_for_one_table_are_refused(tmp_path: Path) -> None:
    tensors = {name: ("U8", (3, 64), bytes(192)) for name in ("lookup", "lookup.weight")}
    checkpoints.write_checkpoint(tmp_path / "c", tensors, shards=1)
    with (
        Checkpoint.open(tmp_path / "c") as checkpoint,
        pytest.raises(UnsupportedTableError, match="two tables for lookup"),
    ):
        find_tables(checkpoint, tensors=list(tensors))


def tiny_model(kind: str):
    transformers = pytest.importorskip("transformers")
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    gemma = {
        "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 64,
        "hidden_size_per_layer_input": 16, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16,
        "num_kv_shared_layers": 0, "layer_types": layers,
    }  # fmt: skip
    if kind == "gemma4":
        config = transformers.Gemma4TextConfig(**gemma)
        return transformers.Gemma4ForCausalLM(config)
    if kind == "gemma3n":
        sparse = {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4}
        config = transformers.Gemma3nTextConfig(**gemma, **sparse)
        return transformers.Gemma3nForCausalLM(config)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1]}  # fmt: skip
    config = transformers.Qwen4ExpTextConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2, hc_count=2,
        hc_lowrank=16, ple_layer_ids=[1, 3], ple_embed_dim=64, ngram_size=3, heads_per_ngram=4,
        ngram_vocab_size_base=1000, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=4,
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=32,
        indexer_compress_ratio=4, eos_token_id=2, pad_token_id=0, bos_token_id=1,
        rope_parameters=rope,
    )  # fmt: skip
    return transformers.Qwen4ExpForCausalLM(config)


def bf16_bytes(weight) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return weight.detach().contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("kind", ["gemma4", "gemma3n", "qwen4_exp"])
def test_what_transformers_saves_is_found_and_read(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    model = tiny_model(kind).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    if kind == "qwen4_exp":
        expected = {
            layer: bf16_bytes(model.model.layers[layer].ple.ple_embedding.ngram_embedding.weight)
            for layer in (0, 2)
        }
    else:
        wide = bf16_bytes(model.model.embed_tokens_per_layer.weight)
        expected = {layer: wide[:, layer * 32 : (layer + 1) * 32] for layer in range(4)}
    with Checkpoint.open(tmp_path) as checkpoint:
        specs = find_tables(checkpoint)
        assert [spec.layer for spec in specs] == list(expected)
        for spec in specs:
            rows = RowReader(checkpoint, spec).read(0, spec.rows)
            assert np.array_equal(rows, expected[spec.layer])

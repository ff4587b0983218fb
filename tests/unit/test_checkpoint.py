"""Checkpoints: every way in which files on disk are not what their headers and index say."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from tests import checkpoints
from tests.checkpoints import Tensor, write_checkpoint, write_safetensors
from tierd.errors import (
    CheckpointError,
    HeaderError,
    ShardLengthError,
    ShardMissingError,
    TensorMissingError,
)
from tierd.io.checkpoint import Checkpoint

MIB = 1 << 20


def tensors(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "a.weight": ("BF16", (100, 8), rng.bytes(1600)),
        "b.weight": ("F8_E4M3", (64, 32), rng.bytes(2048)),
        "c.scalar": ("F32", (), rng.bytes(4)),
        "d.empty": ("F32", (0, 4), b""),
        "e.new_dtype": ("F8_E9M9", (3,), rng.bytes(7)),
    }


def one_file(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A single shard with a header of the test's choosing."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "U8", shape=(4,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_tensors_are_read_whatever_the_layout(tmp_path: Path, shards: int) -> None:
    written = tensors()
    write_checkpoint(tmp_path, written, shards=shards, config={"model_type": "x"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(written)
        assert checkpoint.config == {"model_type": "x"}
        for name, (dtype, shape, data) in written.items():
            ref = checkpoint.tensors[name]
            assert (ref.dtype, ref.shape, ref.size) == (dtype, shape, len(data))
            assert checkpoint.read(name, 0, ref.rows).tobytes() == data[: ref.rows * ref.row_bytes]
        rows = checkpoint.read("a.weight", 7, 3)
        assert rows.shape == (3, 16)
        assert rows.tobytes() == written["a.weight"][2][7 * 16 : 10 * 16]


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "any.safetensors", tensors())
    for path in (tmp_path, tmp_path / "any.safetensors"):
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.read("b.weight", 63, 1).tobytes() == tensors()["b.weight"][2][-32:]


def test_several_shards_without_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(), shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors())


def test_an_index_of_another_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.rename(tmp_path / "diffusion.safetensors.index.json")
    Checkpoint.open(tmp_path).close()
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several indexes"):
        Checkpoint.open(tmp_path)


def test_the_reference_reader_agrees(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    written = {name: tensors()[name] for name in ("a.weight", "c.scalar")}
    write_safetensors(tmp_path / "x.safetensors", written)
    with (
        safetensors.safe_open(tmp_path / "x.safetensors", "np") as file,
        Checkpoint.open(tmp_path) as checkpoint,
    ):
        assert set(file.keys()) == set(written)
        scalar = file.get_tensor("c.scalar")
        assert scalar.tobytes() == checkpoint.read("c.scalar", 0, 1).tobytes()


def test_nothing_is_mapped_and_nothing_stays_open(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint.open(made.path) as checkpoint:
        for name, ref in checkpoint.tensors.items():
            checkpoint.read(name, 0, ref.rows)
        assert str(made.path) not in Path("/proc/self/maps").read_text()
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before
    Checkpoint.open(made.path).read("model.norm.weight", 0, 1)  # forgotten, not leaked
    assert len(os.listdir("/proc/self/fd")) == before
    made.shards[0].write_bytes(b"short")
    with pytest.raises(HeaderError):
        Checkpoint.open(made.path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_strided_reads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(), shards=1)
    with Checkpoint.open(tmp_path) as checkpoint:
        whole = checkpoint.read("a.weight", 0, 100)
        out = np.empty((20, 6), np.uint8)
        checkpoint.read_strided(checkpoint.tensors["a.weight"], 5 * 16 + 4, 16, out)
        assert np.array_equal(out, whole[5:25, 4:10])
        os.truncate(tmp_path / "model.safetensors", 300)
        with pytest.raises(ShardLengthError, match="became shorter"):
            checkpoint.read_strided(checkpoint.tensors["a.weight"], 0, 16, out)


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 4096, 24 * MIB])
def test_a_shard_that_was_cut(tmp_path: Path, cut: int) -> None:
    size = 32 * MIB
    path = one_file(tmp_path, {"t": entry(shape=(size,), offsets=(0, size))})
    header = path.stat().st_size
    os.truncate(path, header + size)
    Checkpoint.open(tmp_path).close()
    os.truncate(path, header + size - cut)
    words = (
        rf"{path} is {cut} bytes too short: .* {header + size} bytes, it has {header + size - cut};"
    )
    with pytest.raises(ShardLengthError, match=words):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("extra", [1, 4096])
def test_trailing_bytes(tmp_path: Path, extra: int) -> None:
    path = one_file(tmp_path, {"t": entry()}, b"1234" + bytes(extra))
    with pytest.raises(ShardLengthError, match=rf"{path} has {extra} trailing bytes: .* asks for"):
        Checkpoint.open(tmp_path)


def test_every_shard_is_checked_not_only_those_of_tables(tmp_path: Path) -> None:
    made = checkpoints.engram(tmp_path, shards=4)
    for shard in made.shards:
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1])
        with pytest.raises(ShardLengthError, match=shard.name):
            Checkpoint.open(tmp_path)
        shard.write_bytes(whole)
    Checkpoint.open(tmp_path).close()


def test_a_shard_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    made = checkpoints.plain(tmp_path, rows=2000)
    name = "model.layers.3.lookup.weight"
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.require_unchanged()
        os.truncate(made.shards[0], 50_000)
        with pytest.raises(ShardLengthError, match="became shorter while it was read"):
            checkpoint.read(name, 0, 2000)
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            checkpoint.require_unchanged()


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes, too few"),
        (b"1234567", "has 7 bytes, too few"),
        (struct.pack("<Q", 100) + b"{}", "header should have 100 bytes, the whole file has 10"),
        (b"version https://git-lfs", "a Git LFS pointer"),
        (struct.pack("<Q", 9) + b"{'a': 1}x", "is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "is not JSON"),
    ],
)
def test_headers_that_are_none(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError, match=f"{path}.*{words}"):
        Checkpoint.open(tmp_path)


def test_an_oversized_header(tmp_path: Path) -> None:
    path = one_file(tmp_path, b"", length=200_000_000)
    os.truncate(path, 300_000_000)
    with pytest.raises(HeaderError, match="200000000 bytes, more than"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"t": entry(shape=(5,))}, r"'t' of dtype U8 and shape \[5\] needs 5 bytes.*range has 4"),
        ({"t": entry("BF16")}, "needs 8 bytes"),
        ({"t": entry("F4", (9,))}, "needs 4.5 bytes"),
        ({"t": entry(offsets=(4, 0))}, "makes no sense"),
        ({"t": entry(offsets=(-4, 0))}, "makes no sense"),
        ({"t": entry(shape=(-4,))}, "makes no sense"),
        ({"t": entry(shape=(4.0,))}, "makes no sense"),
        ({"t": {"dtype": "U8"}}, "makes no sense"),
        ({"t": 7}, "makes no sense"),
        ({"t": entry(), "u": entry(offsets=(2, 6))}, "'u' .*overlaps"),
        ({"t": entry(), "u": entry()}, "overlaps"),
        ({"t": entry(), "u": entry(offsets=(6, 10))}, "'u' .*follows a gap"),
        ({"t": entry(offsets=(2, 6))}, "follows a gap"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, header: dict, words: str) -> None:
    one_file(tmp_path, header, bytes(4))
    with pytest.raises(HeaderError, match=words):
        Checkpoint.open(tmp_path)


def test_a_tensor_that_is_named_twice(tmp_path: Path) -> None:
    text = json.dumps({"t": entry()})
    one_file(tmp_path, (text[:-1] + "," + text[1:]).encode(), bytes(4))
    with pytest.raises(HeaderError, match="names 't' twice"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "one.safetensors", tensors())
    write_safetensors(tmp_path / "two.safetensors", {"a.weight": tensors()["a.weight"]})
    with pytest.raises(HeaderError, match=r"'a.weight' is in .*one.* and in .*two"):
        Checkpoint.open(tmp_path)


# --- index ----------------------------------------------------------------------------------------


def change_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def test_a_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(), shards=2)
    gone = tmp_path / "model-00001-of-00002.safetensors"
    gone.unlink()
    with pytest.raises(ShardMissingError, match=f"{gone} is missing; the index places 3 tensors"):
        Checkpoint.open(tmp_path)
    gone.symlink_to(tmp_path / "blobs" / "absent")  # a cache that lost its blob
    with pytest.raises(ShardMissingError, match=f"{gone} is missing"):
        Checkpoint.open(tmp_path)


def test_an_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(), shards=2)
    shard = "model-00002-of-00002.safetensors"
    change_index(tmp_path, lambda weights: weights.update({"ghost.weight": shard}))
    with pytest.raises(TensorMissingError, match=f"'ghost.weight' in {shard}, which does not"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shard", ["/etc/passwd", "../x.safetensors", 7])
def test_an_index_that_leads_elsewhere(tmp_path: Path, shard: object) -> None:
    write_checkpoint(tmp_path, tensors(), shards=2)
    change_index(tmp_path, lambda weights: weights.update({"a.weight": shard}))
    with pytest.raises(HeaderError, match="no file beside it"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, tensors(), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HeaderError, match=r"index.json (is not|has no)"):
        Checkpoint.open(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory and no file"):
        Checkpoint.open(tmp_path / "nowhere")
    write_checkpoint(tmp_path, tensors(), shards=1)
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(HeaderError, match=r"config.json is not JSON"):
        Checkpoint.open(tmp_path)


def test_an_unreadable_shard_is_one_line(tmp_path: Path, monkeypatch) -> None:
    checkpoints.plain(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
            checkpoint.read("model.norm.weight", 0, 1)

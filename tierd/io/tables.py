"""Tables in a checkpoint: recognised by tensor names, checked, and described as TableSpecs.

Three kinds are known; a fourth is any tensor that the operator names. A kind either matches
whole or the checkpoint is refused: an empty table, or a table without its last shard, is worse
than an error. Reading their rows is in rows.py, which this module offers too.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tierd.errors import NoTableError, TensorShapeError, UnsupportedTableError
from tierd.io import _core
from tierd.io.rows import RowReader, fingerprint
from tierd.io.safetensors_header import DTYPE_BITS, TensorRef
from tierd.types import RowFormat, TableKind, TableSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierd.io.checkpoint import Checkpoint

__all__ = ["RowReader", "choose_tables", "find_tables", "fingerprint"]

E8M0_BLOCK = 32  # values that share one e8m0 scale

_ENGRAM = re.compile(r"((?:.*\.)?layers\.(\d+)\.engram\.embed)\.(weight|scale)")
_PLE = re.compile(r"(.*\blayers\.(\d+)\..*\bngram_embedding)\.(?:shard_(\d+)\.)?(\w+)")
_PER_LAYER = "embed_tokens_per_layer.weight"
_LAYER = re.compile(r"\blayers\.(\d+)\.")

# One name of each kind, for "near names" when nothing matches.
_PATTERNS = (
    "layers.N.engram.embed.weight",
    "layers.N.engram.embed.scale",
    "model.layers.N.ple.ple_embedding.ngram_embedding.shard_K.weight",
    "model.language_model.embed_tokens_per_layer.weight",
)
_TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@:-]*(/[A-Za-z0-9_][A-Za-z0-9._+@:-]*)*")
_TABLE_NAME_MAX = 300
_NEAR_POOL_MAX = 4000  # distinct name patterns that are compared; a bound on difflib's time


def find_tables(checkpoint: Checkpoint, *, tensors: Sequence[str] = ()) -> list[TableSpec]:
    """Find the tables of a checkpoint, in order of their layers.

    Args:
        checkpoint: opened, its headers checked.
        tensors: names of tensors that are tables because the operator says so; then no others
            are looked for.

    Raises:
        NoTableError: nothing matches, or a part of a table is missing.
        TensorShapeError: a dtype or shape is not what the kind has.
        UnsupportedTableError: a format that is known and not served.
    """
    specs = (
        [_named_table(checkpoint, name) for name in dict.fromkeys(tensors)]
        if tensors
        else [*_find_engram(checkpoint), *_find_ple(checkpoint), *_find_per_layer(checkpoint)]
    )
    if not specs:
        raise NoTableError(
            f"no table among the {len(checkpoint.tensors)} tensors of {checkpoint.path}: none is "
            f"called like {', '.join(_PATTERNS[:3:2])} or embed_tokens_per_layer.weight"
            f"{_near(checkpoint.tensors, _PATTERNS)}; to stage a tensor by its name, "
            f"run: tierd stage {checkpoint.path} --device DEVICE --tensor NAME"
        )
    owners: dict[str, TableSpec] = {}
    for spec in specs:
        _require_fit(spec)
        other = owners.setdefault(spec.name, spec)
        if other is not spec:
            raise UnsupportedTableError(
                f"{checkpoint.path} holds two tables for {spec.name} ({other.tensors[0]} and "
                f"{spec.tensors[0]}); name the one to stage; "
                f"run: tierd stage {checkpoint.path} --device DEVICE --tensor {spec.tensors[0]}"
            )
    return specs if tensors else sorted(specs, key=lambda spec: (spec.layer, spec.name))


# --- DeepSeek-V4.1 Engram ------------------------------------------------------------------------


def choose_tables(
    specs: list[TableSpec], wanted: Sequence[str], checkpoint: Checkpoint
) -> list[TableSpec]:
    """Return the tables of these names, in the order of ``specs``; all if none is named.

    Raises:
        NoTableError: there is no table of a name; the message lists near names.
    """
    names = [spec.name for spec in specs]
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            text = f"{checkpoint.path}: no table {name!r} among its {len(names)}"
            raise NoTableError(f"{text}; near names: {', '.join(near)}")
    return [spec for spec in specs if not wanted or spec.name in wanted]


def _find_engram(checkpoint: Checkpoint) -> list[TableSpec]:
    found: dict[str, dict[str, TensorRef]] = defaultdict(dict)
    layers: dict[str, int] = {}
    for name, ref in checkpoint.tensors.items():
        match = _ENGRAM.fullmatch(name) if "engram" in name else None
        if match:
            found[match[1]][match[3]] = ref
            layers[match[1]] = int(match[2])
    specs = [_engram_table(checkpoint, layers[stem], found[stem]) for stem in sorted(found)]
    wanted = _config_list(checkpoint, "engram_layer_ids")
    if specs and wanted - set(layers.values()):
        _raise_partial(checkpoint, "engram_layer_ids", wanted, layers.values())
    return specs


def _engram_table(checkpoint: Checkpoint, layer: int, parts: dict[str, TensorRef]) -> TableSpec:
    for part, other in (("weight", "scale"), ("scale", "weight")):
        if part not in parts:
            missing = parts[other].name.removesuffix(other) + part
            raise NoTableError(
                f"{checkpoint.path} holds {parts[other].name} but not {missing}: half a table; "
                f"the index or the download is incomplete{_near(checkpoint.tensors, [missing])}"
            )
    weight, scale = parts["weight"], parts["scale"]
    _require(weight, "F8_E4M3", "[rows, dim]", len(weight.shape) == 2)
    rows, dim = weight.shape
    _require(weight, "F8_E4M3", f"[rows, a multiple of {E8M0_BLOCK}]", dim % E8M0_BLOCK == 0)
    blocks = dim // E8M0_BLOCK
    _require(scale, "F8_E8M0", f"[{rows}, {blocks}]", scale.shape == (rows, blocks))
    name = f"layers.{layer}.engram"
    return TableSpec(
        name=name,
        kind=TableKind.ENGRAM,
        layer=layer,
        rows=rows,
        dim=dim,
        row_bytes=dim + blocks,
        row_format=RowFormat.E4M3_E8M0,
        group=name,
        tensors=(weight.name, scale.name),
    )


# --- Qwen4Exp PLE --------------------------------------------------------------------------------


def _find_ple(checkpoint: Checkpoint) -> list[TableSpec]:
    found: dict[str, dict[tuple[int, str], TensorRef]] = defaultdict(dict)
    layers: dict[str, int] = {}
    for name, ref in checkpoint.tensors.items():
        match = _PLE.fullmatch(name) if "ngram_embedding" in name else None
        if match:
            shard = -1 if match[3] is None else int(match[3])
            found[match[1]][shard, match[4]] = ref
            layers[match[1]] = int(match[2])
    specs = [_ple_table(checkpoint, layers[stem], stem, found[stem]) for stem in sorted(found)]
    wanted = _config_list(checkpoint, "ple_layer_ids")
    if specs and len(wanted) > len(specs):
        _raise_partial(checkpoint, "ple_layer_ids (from 1)", wanted, layers.values())
    return specs


def _ple_table(
    checkpoint: Checkpoint, layer: int, stem: str, parts: dict[tuple[int, str], TensorRef]
) -> TableSpec:
    _refuse_nvfp4(stem, parts)
    shards = _ple_shards(checkpoint, stem, parts)
    first = shards[0]
    dtypes = ("BF16", "F8_E4M3")
    _require(first, " or ".join(dtypes), "[rows, dim]", len(first.shape) == 2, dtypes)
    for index, shard in enumerate(shards[1:], 1):
        same = shard.shape[1:] == first.shape[1:]
        whole = shard.rows == first.rows or (index == len(shards) - 1 and shard.rows < first.rows)
        shape = f"[{first.rows}, {first.shape[1]}] as the first shard (the last may be shorter)"
        _require(shard, first.dtype, shape, same and whole)
    rows, dim = sum(shard.rows for shard in shards), first.shape[1]
    _require_ple_rows(checkpoint, stem, rows)
    is_fp8 = first.dtype == "F8_E4M3"
    name = f"layers.{layer}.ple"
    return TableSpec(
        name=name,
        kind=TableKind.PLE,
        layer=layer,
        rows=rows,
        dim=dim,
        row_bytes=dim if is_fp8 else 2 * dim,
        row_format=RowFormat.E4M3 if is_fp8 else RowFormat.BF16,
        group=name,
        tensors=tuple(shard.name for shard in shards),
        scalar_scale=_ple_scale(checkpoint, stem, parts) if is_fp8 else None,
    )


def _refuse_nvfp4(stem: str, parts: dict[tuple[int, str], TensorRef]) -> None:
    for (_, part), ref in parts.items():
        packed = part in {"weight_packed", "weight_scale_2", "weight_global_scale"}
        halves = part == "weight" and ref.dtype in {"U8", "F4"}
        blocks = part == "weight_scale" and (ref.dtype == "F8_E4M3" or math.prod(ref.shape) > 1)
        if packed or halves or blocks:
            raise UnsupportedTableError(
                f"{stem} is an NVFP4 table ({ref.name} is {ref.dtype} {list(ref.shape)}); tierd "
                "serves its bf16 and fp8 forms; use one of those checkpoints"
            )


def _ple_shards(
    checkpoint: Checkpoint, stem: str, parts: dict[tuple[int, str], TensorRef]
) -> list[TensorRef]:
    weights = {shard: ref for (shard, part), ref in parts.items() if part == "weight"}
    if set(weights) == {-1}:  # one tensor, not split
        return [weights[-1]]
    weights.pop(-1, None)
    parts_wanted = _config_value(checkpoint, "split_ngram_parts")
    count = max(weights, default=-1) + 1
    if isinstance(parts_wanted, int) and count < parts_wanted:
        count = parts_wanted
    missing = [shard for shard in range(count) if shard not in weights]
    if missing or not weights:
        shown = ", ".join(f"shard_{shard}" for shard in missing[:5]) or "every shard"
        example = f"{stem}.shard_{missing[0] if missing else 0}.weight"
        raise NoTableError(
            f"{stem} in {checkpoint.path} has {len(weights)} of {count} shards; missing: {shown}"
            f"{' and more' if len(missing) > 5 else ''}; the index or the download is incomplete"
            f"{_near(checkpoint.tensors, [example])}"
        )
    return [weights[shard] for shard in range(count)]


def _require_ple_rows(checkpoint: Checkpoint, stem: str, rows: int) -> None:
    """The hash heads' row ranges stand beside the table; they must end within it."""
    owner = stem.removesuffix(".ngram_embedding")
    refs = [
        checkpoint.tensors.get(f"{owner}.ngram_heads_{part}") for part in ("offsets", "vocab_sizes")
    ]
    if any(ref is None or ref.dtype != "I64" or ref.size == 0 for ref in refs):
        return
    offsets, sizes = (
        checkpoint.read(ref.name, 0, ref.rows).reshape(-1).view(np.int64) for ref in refs if ref
    )
    if offsets.size == sizes.size and int(np.max(offsets + sizes)) > rows:
        raise NoTableError(
            f"{stem} in {checkpoint.path} has {rows} rows, its hash heads need "
            f"{int(np.max(offsets + sizes))}; the last shards are missing"
        )


def _ple_scale(checkpoint: Checkpoint, stem: str, parts: dict[tuple[int, str], TensorRef]) -> float:
    refs = [ref for (_, part), ref in sorted(parts.items()) if part == "weight_scale"]
    if not refs:
        raise NoTableError(
            f"{stem} in {checkpoint.path} is fp8 and has no weight_scale: half a table; the index "
            f"or the download is incomplete{_near(checkpoint.tensors, [f'{stem}.weight_scale'])}"
        )
    values = set()
    for ref in refs:
        _require(ref, "BF16 or F32", "[] or [1]", ref.shape in {(), (1,)}, ("BF16", "F32"))
        raw = checkpoint.read(ref.name, 0, ref.rows).tobytes()
        word = b"\0\0" + raw if ref.dtype == "BF16" else raw
        values.add(float(np.frombuffer(word, np.float32)[0]))
    if len(values) > 1:
        raise UnsupportedTableError(
            f"the shards of {stem} have {len(values)} different scales ({min(values):g} to "
            f"{max(values):g}); tierd serves one scale per table"
        )
    return values.pop()


# --- Gemma 3n and Gemma 4 ------------------------------------------------------------------------


def _find_per_layer(checkpoint: Checkpoint) -> list[TableSpec]:
    refs = [
        ref
        for name, ref in checkpoint.tensors.items()
        if name == _PER_LAYER or name.endswith("." + _PER_LAYER)
    ]
    if not refs:
        return []
    if len(refs) > 1:
        names = ", ".join(ref.name for ref in refs)
        raise UnsupportedTableError(
            f"{checkpoint.path} holds several per-layer tables ({names}); name the one to stage; "
            f"run: tierd stage {checkpoint.path} --device DEVICE --tensor {refs[0].name}"
        )
    ref = refs[0]
    _require(ref, "BF16", "[vocabulary, layers * dim]", len(ref.shape) == 2)
    layers = _config_value(checkpoint, "num_hidden_layers")
    dim = _config_value(checkpoint, "hidden_size_per_layer_input")
    if not isinstance(layers, int) or not isinstance(dim, int) or layers <= 0 or dim <= 0:
        raise NoTableError(
            f"{ref.name} is a per-layer table, but {checkpoint.path}/config.json does not give "
            "num_hidden_layers and hidden_size_per_layer_input, so its columns cannot be told "
            f"apart; run: ls {checkpoint.path}"
        )
    shape = f"[vocabulary, {layers} * {dim}] by config.json"
    _require(ref, "BF16", shape, ref.shape[1] == layers * dim)
    return [
        TableSpec(
            name=f"layers.{layer}.per_layer",
            kind=TableKind.PER_LAYER,
            layer=layer,
            rows=ref.rows,
            dim=dim,
            row_bytes=2 * dim,
            row_format=RowFormat.BF16,
            group="per_layer",
            tensors=(ref.name,),
        )
        for layer in range(layers)
    ]


# --- a tensor that the operator named ----------------------------------------------------------


def _named_table(checkpoint: Checkpoint, name: str) -> TableSpec:
    ref = checkpoint.tensors.get(name)
    if ref is None:
        raise NoTableError(
            f"{checkpoint.path} holds no tensor {name!r}{_near(checkpoint.tensors, [name])}"
        )
    if not ref.shape or not ref.size:
        raise TensorShapeError(
            f"{name} has shape {list(ref.shape)}; a table needs rows: a first axis and some bytes"
        )
    if not _TABLE_NAME.fullmatch(name.removesuffix(".weight")) or len(name) > _TABLE_NAME_MAX:
        raise UnsupportedTableError(
            f"{name[:_TABLE_NAME_MAX]!r} cannot name a table: letters, digits and ._+@:- in parts "
            f"joined by /, {_TABLE_NAME_MAX} characters at most; rename the tensor in the "
            f"checkpoint; run: ls {checkpoint.path}"
        )
    bits = DTYPE_BITS.get(ref.dtype, 8)
    if ref.size % ref.rows or (ref.size // ref.rows * 8) % bits:
        raise TensorShapeError(f"{name} has rows of {ref.size / ref.rows:g} bytes: not whole ones")
    known = {"BF16": RowFormat.BF16, "F8_E4M3": RowFormat.E4M3}
    row_format = known.get(ref.dtype, RowFormat.RAW)
    row_bytes = ref.size // ref.rows
    layer = _LAYER.search(name)
    spec = TableSpec(
        name=name.removesuffix(".weight"),
        kind=TableKind.TENSOR,
        layer=int(layer[1]) if layer else 0,
        rows=ref.rows,
        dim=row_bytes * 8 // bits if row_format is not RowFormat.RAW else row_bytes,
        row_bytes=row_bytes,
        row_format=row_format,
        group=name.removesuffix(".weight"),
        tensors=(name,),
    )
    _require_fit(spec)
    return spec


# --- what they share ----------------------------------------------------------------------------


def _require(
    ref: TensorRef, dtype: str, shape: str, shape_ok: bool, dtypes: tuple[str, ...] = ()
) -> None:
    if ref.dtype in (dtypes or (dtype,)) and shape_ok:
        return
    raise TensorShapeError(
        f"{ref.name} in {ref.shard} is {ref.dtype} {list(ref.shape)}, expected {dtype} {shape}; "
        "the checkpoint is of another version or was converted"
    )


def _require_fit(spec: TableSpec) -> None:
    limit = int(_core.ROW_BYTES_MAX)
    if not 0 < spec.row_bytes <= limit or spec.rows <= 0:
        raise TensorShapeError(
            f"{spec.name} has {spec.rows} rows of {spec.row_bytes} bytes; a row has 1 to {limit} "
            "bytes, since it must fit a page"
        )


def _config_value(checkpoint: Checkpoint, key: str) -> Any:
    """Look a key up in config.json: in its text part, where it has one, then at the top."""
    for part in ("text_config", "language_config", "llm_config"):
        nested = checkpoint.config.get(part)
        if isinstance(nested, dict) and nested.get(key) is not None:
            return nested[key]
    return checkpoint.config.get(key)


def _config_list(checkpoint: Checkpoint, key: str) -> set[int]:
    value = _config_value(checkpoint, key)
    if not isinstance(value, list):
        return set()
    return {item for item in value if isinstance(item, int)}


def _raise_partial(
    checkpoint: Checkpoint, key: str, wanted: Iterable[int], found: Iterable[int]
) -> None:
    raise NoTableError(
        f"{checkpoint.path}/config.json says {key} = {sorted(wanted)}, but there are tables of "
        f"layers {sorted(found)} only; the index or the download is incomplete; "
        f"run: ls {checkpoint.path}"
    )


def _near(names: Iterable[str], wanted: Iterable[str]) -> str:
    """Say which names are near the wanted ones; layer and shard numbers do not count."""
    pool: dict[str, str] = {}
    for name in names:
        pool.setdefault(re.sub(r"\d+", "N", name), name)
        if len(pool) >= _NEAR_POOL_MAX:
            break
    near: dict[str, None] = {}
    for name in wanted:
        pattern = re.sub(r"\d+|\bK\b", "N", name)
        for match in difflib.get_close_matches(pattern, pool, n=2, cutoff=0.5):
            near.setdefault(pool[match])
    return f"; near names: {', '.join(list(near)[:4])}" if near else "; no name is near"

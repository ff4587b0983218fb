"""Plain data that several rooms share. No behaviour beyond derived values and JSON."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TableKind(StrEnum):
    """Which rule recognised a table's tensors in a checkpoint."""

    ENGRAM = "engram"  # DeepSeek-V4.1: layers.{i}.engram.embed.weight + .scale
    PLE = "ple"  # Qwen4Exp: ...ngram_embedding.shard_{k}.weight
    PER_LAYER = "per_layer"  # Gemma 3n/4: columns of embed_tokens_per_layer
    TENSOR = "tensor"  # a tensor the operator named


class RowFormat(StrEnum):
    """How a row's bytes become numbers."""

    E4M3_E8M0 = "e4m3_e8m0"  # dim fp8 payloads, then dim/32 power-of-two scales; served as bf16
    E4M3 = "e4m3"  # dim fp8 payloads, one scalar scale applied by the engine; served as bf16
    BF16 = "bf16"  # dim bf16 values
    RAW = "raw"  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as a checkpoint holds it.

    Attributes:
        name: unique within a model, such as ``layers.1.engram``.
        layer: the decoder layer that reads it, counted from 0.
        rows: number of rows.
        dim: values in a row.
        row_bytes: bytes of one row as stored (payload and scales together).
        group: tables of one group are read at the same point and share a quota.
        tensors: names of the checkpoint's tensors, in row order.
        scalar_scale: the per-tensor scale of E4M3 tables; the engine applies it.
    """

    name: str
    kind: TableKind
    layer: int
    rows: int
    dim: int
    row_bytes: int
    row_format: RowFormat
    group: str
    tensors: tuple[str, ...]
    scalar_scale: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**dataclasses.asdict(self), "tensors": list(self.tensors)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from :meth:`to_json`'s dict; unknown keys are ignored (newer writers)."""
        known = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        known["kind"] = TableKind(known["kind"])
        known["row_format"] = RowFormat(known["row_format"])
        known["tensors"] = tuple(known["tensors"])
        return cls(**known)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInfo:
    """A staged table: what a root's manifest says of it.

    Attributes:
        image_id: 64-bit identity, in every page's trailer.
        generation: raised when the image is deleted or staged anew.
        model: the name under which the checkpoint's tables were staged.
        fingerprint: hex sha256 of the checkpoint's headers and sampled bytes of this table.
        digest: hex digest of all rows, in order.
        digest_kind: the algorithm of ``digest``.
        staged_at: Unix time of the commit, seconds.
        page_version: format of its pages.
    """

    image_id: int
    generation: int
    model: str
    table: TableSpec
    fingerprint: str
    digest: str
    digest_kind: str
    rows_per_page: int
    pages: int
    staged_at: float
    page_version: int = 1

    @property
    def name(self) -> str:
        """``model/table``: how people and REST name an image."""
        return f"{self.model}/{self.table.name}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict (image_id as 16 hex digits)."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**data, "image_id": f"{self.image_id:016x}", "table": self.table.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from :meth:`to_json`'s dict; unknown keys are ignored (newer writers)."""
        known = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        known["image_id"] = int(known["image_id"], 16)
        known["table"] = TableSpec.from_json(known["table"])
        return cls(**known)


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous run of an image's pages on one device.

    Attributes:
        first_page: page number in the image.
        pages: number of pages.
        device_page: page number on the device where the run starts.
    """

    first_page: int
    pages: int
    device_page: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowSamples:
    """Row numbers of one table that its client looked up, sampled by a hash of the row (SHARDS).

    Attributes:
        table: the client's table number.
        rows: int64 [n], in the order of the lookups (within one kick in any order).
        stamps: int64 [n], low 24 bits of the number of the kick; tables that share a row cache
            share the counter.
        prefill: bool [n], asked for by a prefill or a warm-up.
        rate: the share of all rows that is sampled; a distance counted in samples is to be
            divided by it.
        lost: samples that were overwritten before they were read.
    """

    table: int
    rows: NDArray[np.int64]
    stamps: NDArray[np.int64]
    prefill: NDArray[np.bool_]
    rate: float
    lost: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProbedWindows:
    """What the window probe found for one model on one GPU (docs/probe.md; SlackTier 6.3).

    Attributes:
        gpu: the GPU's name, as CUDA tells it.
        engine: name and version of the engine that ran the steps.
        model: the name under which the model's tables are staged.
        versions: of what a window depends on: tierd, torch, driver and so on.
        date: ISO 8601, UTC.
        step_s: batch size -> length of an undelayed step, seconds.
        layers: layer -> batch size -> window: seconds from step start until the layer needs its
            rows. A window as long as the longest delay tried is a lower bound.
    """

    gpu: str
    engine: str
    model: str
    versions: dict[str, str]
    date: str
    step_s: dict[int, float]
    layers: dict[int, dict[int, float]]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; JSON has no integer keys, so they become text."""
        data = dataclasses.asdict(self)
        data["step_s"] = {str(batch): value for batch, value in self.step_s.items()}
        data["layers"] = {
            str(layer): {str(batch): {"window_s": value} for batch, value in windows.items()}
            for layer, windows in self.layers.items()
        }
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from :meth:`to_json`'s dict; unknown keys are ignored (newer writers)."""
        known = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        known["step_s"] = {int(batch): float(value) for batch, value in data["step_s"].items()}
        known["layers"] = {
            int(layer): {int(batch): float(one["window_s"]) for batch, one in windows.items()}
            for layer, windows in data["layers"].items()
        }
        return cls(**known)


@dataclasses.dataclass(frozen=True, slots=True)
class SeenSet:
    """Which rows of a table traces ever saw; lossy skipping leaves the others out.

    Attributes:
        model, table, rows, fingerprint: which table it is of.
        lookups: lookups that it was built from.
        share: of the rows, how many were seen.
        bits: uint8 [ceil(rows / 8)], row r is bit r % 8 of byte r // 8.
    """

    model: str
    table: str
    rows: int
    fingerprint: str
    lookups: int
    share: float
    bits: NDArray[np.uint8]

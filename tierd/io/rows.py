"""A table's rows as they are stored: read from the checkpoint, joined, and checked.

Also the fingerprint by which a table that is staged already is recognised.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import ImageError, PayloadError
from tierd.types import RowFormat, TableKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierd.io.checkpoint import Checkpoint
    from tierd.io.safetensors_header import TensorRef
    from tierd.types import TableSpec

_E4M3_NAN = 0x7F  # with either sign: 0x7f and 0xff
_E8M0_NAN = 0xFF
_SAMPLES = 1024  # per table, spread evenly over its tensors
_SAMPLES_MIN = 16  # per tensor
_SAMPLE_BYTES = 256
_FINGERPRINT = "tierd fingerprint 1"


class RowReader:
    """Reads a table's rows.

    Buffers are kept between calls, so each thread needs a reader of its own.
    """

    def __init__(self, checkpoint: Checkpoint, spec: TableSpec) -> None:
        """Look the tensors up.

        Raises:
            ImageError: the checkpoint has no such tensors or they have other sizes.
        """
        self.spec = spec
        self._checkpoint = checkpoint
        missing = [name for name in spec.tensors if name not in checkpoint.tensors]
        if missing:
            raise ImageError(
                f"{checkpoint.path} holds no {missing[0]}, so {spec.name} is of another "
                f"checkpoint; run: ls {checkpoint.path}"
            )
        self._refs = [checkpoint.tensors[name] for name in spec.tensors]
        forbidding = {TableKind.ENGRAM, TableKind.PLE}
        self._forbids_nan = spec.kind in forbidding and spec.row_format is not RowFormat.BF16
        self._scratch: dict[str, NDArray[np.uint8]] = {}
        rows = self._refs[0].rows
        if spec.kind is TableKind.PLE:
            rows = sum(ref.rows for ref in self._refs)
        if rows != spec.rows:
            raise ImageError(
                f"{spec.name} has {spec.rows} rows, {checkpoint.path} has {rows}: another "
                f"checkpoint; run: ls {checkpoint.path}"
            )

    def read(self, first_row: int, count: int) -> NDArray[np.uint8]:
        """Return rows as uint8 [count, row_bytes].

        Raises:
            PayloadError: a value that the table's format forbids.
            CheckpointError: the shard cannot be read.
        """
        out = np.empty((count, self.spec.row_bytes), np.uint8)
        self.read_into(first_row, out)
        return out

    def read_into(self, first_row: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` (uint8 [count, row_bytes], contiguous); errors as :meth:`read`."""
        if self.spec.kind is TableKind.ENGRAM:
            self._read_engram(first_row, out)
        elif self.spec.kind is TableKind.PER_LAYER:
            ref = self._refs[0]
            start = first_row * ref.row_bytes + self.spec.layer * self.spec.row_bytes
            self._checkpoint.read_strided(ref, start, ref.row_bytes, out)
        else:
            self._read_split(first_row, out)

    def _read_engram(self, first_row: int, out: NDArray[np.uint8]) -> None:
        """Join each row's payload and scales into one record."""
        at = 0
        for ref, bad in zip(self._refs, (_E4M3_NAN, _E8M0_NAN), strict=True):
            part = self._buffer(ref.name, len(out), ref.row_bytes)
            self._checkpoint.read_into(ref, first_row * ref.row_bytes, part)
            self._refuse(part, bad, ref, first_row)
            out[:, at : at + ref.row_bytes] = part
            at += ref.row_bytes

    def _read_split(self, first_row: int, out: NDArray[np.uint8]) -> None:
        """Read rows that lie whole in tensors which follow one another."""
        done, start = 0, 0
        for ref in self._refs:
            inside = first_row + done - start
            if done < len(out) and inside < ref.rows:
                count = min(len(out) - done, ref.rows - inside)
                part = out[done : done + count]
                self._checkpoint.read_into(ref, inside * ref.row_bytes, part)
                if self._forbids_nan:
                    self._refuse(part, _E4M3_NAN, ref, inside)
                done += count
            start += ref.rows
        assert done == len(out), "beyond the table's last row"

    def _refuse(self, part: NDArray[np.uint8], bad: int, ref: TensorRef, first_row: int) -> None:
        """Raise if a byte is the forbidden one (its top bit does not count below 0x80)."""
        masked: NDArray[np.uint8] = part
        if bad == _E4M3_NAN:
            masked = np.bitwise_and(part, 0x7F, out=self._buffer("mask", *part.shape))
        if int(masked.max(initial=0)) != bad:
            return
        row, column = (int(index) for index in np.argwhere(masked == bad)[0])
        value = int(part[row, column])
        what = "a scale of 255" if bad == _E8M0_NAN else f"the NaN payload 0x{value:02x}"
        place = ref.offset + (first_row + row) * ref.row_bytes + column
        raise PayloadError(
            f"{ref.name} holds {what} in row {first_row + row}, byte {column} (byte {place} of "
            f"{ref.shard}); the format forbids it, so the shard is damaged or of another format; "
            "fetch it again"
        )

    def _buffer(self, key: str, rows: int, width: int) -> NDArray[np.uint8]:
        buffer = self._scratch.get(key)
        if buffer is None or buffer.size < rows * width:
            buffer = self._scratch[key] = np.empty(rows * width, np.uint8)
        return buffer[: rows * width].reshape(rows, width)


def fingerprint(checkpoint: Checkpoint, spec: TableSpec) -> str:
    """Return the hex sha256 of the tensors' names, dtypes, shapes and sampled bytes.

    It does not depend on how tensors are spread over files, and reads at most some hundred KiB
    whatever the table's size. The samples lie at fixed places: first and last bytes, and evenly
    between. It recognises a checkpoint; it does not prove every byte, which staging's digest does.
    """
    described = {
        "fingerprint": _FINGERPRINT,
        "kind": spec.kind,
        "name": spec.name,
        "rows": spec.rows,
        "dim": spec.dim,
        "row_format": spec.row_format,
        "scalar_scale": spec.scalar_scale,
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    samples = max(_SAMPLES_MIN, _SAMPLES // len(spec.tensors))
    for name in spec.tensors:
        ref = checkpoint.tensors[name]
        digest.update(json.dumps([ref.name, ref.dtype, list(ref.shape)]).encode())
        digest.update(_sample_digest(checkpoint, ref, samples))
    return digest.hexdigest()


def _sample_digest(checkpoint: Checkpoint, ref: TensorRef, samples: int) -> bytes:
    """Digest of a tensor's sampled bytes; kept, since several tables may share the tensor."""
    cached = checkpoint.sample_digests.get((ref.name, samples))
    if cached is not None:
        return cached
    digest = hashlib.sha256()
    if ref.size <= samples * _SAMPLE_BYTES:
        places = [(0, ref.size)]
    else:
        last = ref.size - _SAMPLE_BYTES
        places = [(last * i // (samples - 1), _SAMPLE_BYTES) for i in range(samples)]
    for start, size in places:
        piece = np.empty(size, np.uint8)
        checkpoint.read_into(ref, start, piece)
        digest.update(piece.data)
    result = digest.digest()
    checkpoint.sample_digests[ref.name, samples] = result
    return result

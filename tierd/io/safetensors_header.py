"""The header of a safetensors file: read with pread, believed only after it has been checked.

A file is 8 bytes of header length (little endian), the header (JSON: name -> dtype, shape and
byte range), and the tensors back to back. A download that was cut off shows here as a file that
is shorter than its header says; a reader that maps such a file would serve zeroes or crash.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING, Any

from tierd.errors import HeaderError, ShardLengthError

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES_MAX = 100_000_000  # the reference implementation's own limit
_LENGTH_BYTES = 8

# Bits of one element. A dtype that is not here is taken at its byte range's word.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor lies.

    Attributes:
        offset: byte in the shard where it starts.
        size: bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    offset: int
    size: int

    @property
    def rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis, 0 for an empty tensor."""
        return self.size // self.rows if self.rows else 0


def read_header(fd: int, path: Path) -> dict[str, TensorRef]:
    """Read and check the header of an open shard.

    Args:
        fd: the shard.
        path: its name, for messages and the refs.

    Raises:
        HeaderError: the header is cut off, oversized, not JSON, or its byte ranges overlap, leave
            gaps or do not fit shape and dtype.
        ShardLengthError: the file is shorter or longer than the header says.
    """
    actual = os.fstat(fd).st_size
    length = _header_length(fd, path, actual)
    text = os.pread(fd, length, _LENGTH_BYTES)
    if len(text) != length:
        raise HeaderError(f"{path}: the header could not be read in full; run: ls -l {path}")
    entries = _parse(text, path)
    data_start = _LENGTH_BYTES + length
    refs = [_ref(name, entry, path, data_start) for name, entry in entries.items()]
    expected = _check_ranges(refs, path, data_start)
    if actual < expected:
        raise ShardLengthError(
            f"{path} is {expected - actual} bytes too short: its header asks for {expected} bytes, "
            f"it has {actual}; the download or copy was cut off, fetch the file again; "
            f"run: ls -l {path}"
        )
    if actual > expected:
        raise ShardLengthError(
            f"{path} has {actual - expected} trailing bytes: its header asks for {expected} bytes, "
            f"it has {actual}; two versions were mixed or the file is damaged, fetch it again; "
            f"run: ls -l {path}"
        )
    return {ref.name: ref for ref in refs}


def _header_length(fd: int, path: Path, actual: int) -> int:
    head = os.pread(fd, _LENGTH_BYTES, 0)
    if len(head) < _LENGTH_BYTES:
        raise HeaderError(
            f"{path} has {actual} bytes, too few for a safetensors header; the download was cut "
            f"off; run: ls -l {path}"
        )
    length = int.from_bytes(head, "little")
    if _LENGTH_BYTES + length > actual:
        raise HeaderError(
            f"{path}: the header should have {length} bytes, the whole file has {actual}; it was "
            f"cut off or is no safetensors file (a Git LFS pointer?); run: head -c 200 {path}"
        )
    if length > HEADER_BYTES_MAX:
        raise HeaderError(
            f"{path}: the header has {length} bytes, more than the {HEADER_BYTES_MAX} that "
            f"safetensors allows; it is damaged; run: head -c 200 {path}"
        )
    return length


def _parse(text: bytes, path: Path) -> dict[str, dict[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise HeaderError(f"{path}: the header names {twice!r} twice; fetch the file again")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError(
            f"{path}: the header is not JSON ({error}); the file is damaged or no safetensors "
            f"file; run: head -c 200 {path}"
        ) from None
    if not isinstance(header, dict):
        raise HeaderError(f"{path}: the header is not a JSON object; run: head -c 200 {path}")
    header.pop("__metadata__", None)
    return header


def _ref(name: str, entry: Any, path: Path, data_start: int) -> TensorRef:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        good = isinstance(dtype, str) and all(
            isinstance(value, int) and value >= 0 for value in (*shape, begin, end)
        )
    except (KeyError, TypeError, ValueError):
        good = False
    if not good or begin > end:
        raise HeaderError(f"{path}: the header's entry for {name!r} makes no sense: {entry!r:.200}")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise HeaderError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {list(shape)} needs "
            f"{math.prod(shape) * bits / 8:g} bytes, its byte range has {end - begin}"
        )
    return TensorRef(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _check_ranges(refs: list[TensorRef], path: Path, data_start: int) -> int:
    """Tensors must lie back to back; return where the last one ends."""
    position = data_start
    for ref in sorted(refs, key=lambda ref: (ref.offset, ref.size)):
        if ref.offset != position:
            fault = "overlaps the one before it" if ref.offset < position else "follows a gap"
            raise HeaderError(
                f"{path}: tensor {ref.name!r} at byte {ref.offset} {fault} (expected {position}); "
                "the header is damaged, fetch the file again"
            )
        position += ref.size
    return position

"""A checkpoint: safetensors shards with or without an index, read by pread alone.

Nothing is mapped: a mapped file that is cut off later kills the reader or feeds it zeroes.
Every shard's length is checked against its header before any tensor is believed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tierd.errors import (
    CheckpointError,
    HeaderError,
    ShardLengthError,
    ShardMissingError,
    TensorMissingError,
)
from tierd.io.safetensors_header import TensorRef, read_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INDEX = "model.safetensors.index.json"
_JSON_BYTES_MAX = 256 << 20
_TRANSFER_MAX = 64 << 20

__all__ = ["Checkpoint", "TensorRef"]


class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: its directory (or its one file).
        tensors: every tensor, by name.
        config: config.json, empty if there is none.
        sample_digests: digests of sampled bytes, kept by :func:`tierd.io.rows.fingerprint`.
    """

    def __init__(
        self,
        path: Path,
        shards: dict[Path, int],
        tensors: dict[str, TensorRef],
        config: dict[str, Any],
    ) -> None:
        """Take over open shards (path -> descriptor); use :meth:`open`."""
        self.path = path
        self.tensors = tensors
        self.config = config
        self.sample_digests: dict[tuple[str, int], bytes] = {}
        self._states = {shard: _state(fd) for shard, fd in shards.items()}
        self._lock = threading.Lock()
        self._shards = shards

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Self:
        """Open a directory with shards and perhaps an index JSON, or a single shard.

        Raises:
            CheckpointError: it does not exist or holds no safetensors.
            ShardMissingError: a shard that the index names does not exist.
            TensorMissingError: a shard lacks a tensor that the index places there.
            HeaderError: a header cannot be read.
            ShardLengthError: a shard is shorter or longer than its header says.
        """
        path = Path(directory)
        index = _find_index(path)
        weight_map = None if index is None else _read_index(index)
        names = _list_shards(path) if weight_map is None else sorted(set(weight_map.values()))
        folder = path.parent if path.is_file() else path
        config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        shards: dict[Path, int] = {}
        try:
            headers = {name: _open_shard(folder / name, shards, weight_map) for name in names}
            tensors = _merge(headers) if weight_map is None else _pick(weight_map, headers, index)
            return cls(path, shards, tensors, config)
        except BaseException:
            for fd in shards.values():
                os.close(fd)
            raise

    def close(self) -> None:
        """Close the shards; a second call does nothing."""
        with self._lock:
            shards, self._shards = self._shards, {}
            for fd in shards.values():
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_shards"):  # the last attribute that __init__ sets
            self.close()

    def read(self, name: str, first_row: int, row_count: int) -> NDArray[np.uint8]:
        """Return rows of a tensor as uint8 [row_count, bytes per row].

        Raises:
            ShardLengthError: the shard became shorter since it was opened.
            CheckpointError: it cannot be read.
        """
        ref = self.tensors[name]
        out = np.empty((row_count, ref.row_bytes), np.uint8)
        self.read_into(ref, first_row * ref.row_bytes, out)
        return out

    def read_into(self, ref: TensorRef, start: int, out: NDArray[np.uint8]) -> None:
        """Fill a contiguous array from byte ``start`` of a tensor; errors as :meth:`read`."""
        assert 0 <= start <= start + out.size <= ref.size, "outside the tensor"
        view = out.reshape(-1).data
        fd = self._shards[ref.shard]
        done = 0
        while done < len(view):
            part = view[done : done + _TRANSFER_MAX]
            try:
                count = os.preadv(fd, [part], ref.offset + start + done)
            except OSError as error:
                raise _unreadable(ref.shard, error) from None
            if count == 0:
                raise ShardLengthError(
                    f"{ref.shard} ends at byte {ref.offset + start + done} in the middle of "
                    f"{ref.name}; it became shorter while it was read; run: ls -l {ref.shard}"
                )
            done += count

    def read_strided(self, ref: TensorRef, start: int, stride: int, out: NDArray[np.uint8]) -> None:
        """Fill out[i] (uint8 [n, width]) from byte ``start + i * stride``; errors as :meth:`read`.

        For narrow columns of a wide tensor, where reading whole rows would read many times more.
        """
        fd = self._shards[ref.shard]
        width = out.shape[1]
        base = ref.offset + start
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, base, (len(out) - 1) * stride + width, os.POSIX_FADV_WILLNEED)
        pread = os.pread
        try:
            pieces = [pread(fd, width, base + i * stride) for i in range(len(out))]
        except OSError as error:
            raise _unreadable(ref.shard, error) from None
        joined = b"".join(pieces)
        if len(joined) != out.size:
            raise ShardLengthError(
                f"{ref.shard} became shorter while {ref.name} was read; run: ls -l {ref.shard}"
            )
        out[:] = np.frombuffer(joined, np.uint8).reshape(out.shape)

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a shard was written to since the checkpoint was opened."""
        for shard, fd in self._shards.items():
            if _state(fd) != self._states[shard]:
                raise CheckpointError(
                    f"{shard} was changed while it was read; wait until the download is complete "
                    f"and start again; run: ls -l {shard}"
                )


def _state(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_size, info.st_mtime_ns


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    reason = os.strerror(error.errno or 0)
    return CheckpointError(f"{path}: cannot be read: {reason}; run: ls -l {path}")


def _find_index(path: Path) -> Path | None:
    try:
        path.stat()
    except OSError as error:  # such as no permission, or a name that no file can have
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            raise _unreadable(path, error) from None
    if path.is_file():
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory and no file; run: ls {path.parent}")
    if (path / _INDEX).is_file():
        return path / _INDEX
    others = sorted(path.glob("*.safetensors.index.json"))
    if len(others) > 1:
        names = ", ".join(other.name for other in others)
        raise CheckpointError(
            f"{path} has several indexes ({names}) and none is {_INDEX}; keep the one that counts; "
            f"run: ls {path}"
        )
    return others[0] if others else None


def _list_shards(path: Path) -> list[str]:
    if path.is_file():
        return [path.name]
    names = sorted(shard.name for shard in path.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{path} holds no .safetensors file; name the checkpoint's own directory; "
            f"run: ls {path}"
        )
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise HeaderError(f"{path} has more than {_JSON_BYTES_MAX} bytes; run: ls -l {path}")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path} is not JSON ({error}); run: head -c 200 {path}") from None
    if not isinstance(document, dict):
        raise HeaderError(f"{path} is not a JSON object; run: head -c 200 {path}")
    return document


def _read_index(path: Path) -> dict[str, str]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(f"{path} has no weight_map; run: head -c 200 {path}")
    usable: set[str] = set()  # each file name is looked at once: there are few, of many tensors
    for name, shard in weight_map.items():
        if isinstance(shard, str) and (shard in usable or _is_beside(shard)):
            usable.add(shard)
            continue
        raise HeaderError(
            f"{path} places {name!r} in {shard!r}, which is no file beside it; "
            f"run: head -c 200 {path}"
        )
    return weight_map


def _is_beside(shard: str) -> bool:
    return bool(shard) and not shard.startswith("/") and ".." not in Path(shard).parts


def _open_shard(
    path: Path, shards: dict[Path, int], weight_map: dict[str, str] | None
) -> dict[str, TensorRef]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        count = sum(shard == path.name for shard in (weight_map or {}).values())
        raise ShardMissingError(
            f"{path} is missing; the index places {count} tensors in it; the download is "
            f"incomplete, fetch the file; run: ls {path.parent}"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    shards[path] = fd
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        return read_header(fd, path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _merge(headers: dict[str, dict[str, TensorRef]]) -> dict[str, TensorRef]:
    tensors: dict[str, TensorRef] = {}
    for header in headers.values():
        for name, ref in header.items():
            if name in tensors:
                raise HeaderError(
                    f"{name!r} is in {tensors[name].shard} and in {ref.shard}, and there is no "
                    f"index that says which counts; remove the file that does not belong here; "
                    f"run: ls -l {ref.shard.parent}"
                )
            tensors[name] = ref
    return tensors


def _pick(
    weight_map: dict[str, str], headers: dict[str, dict[str, TensorRef]], index: Path | None
) -> dict[str, TensorRef]:
    tensors = {}
    for name, shard in weight_map.items():
        ref = headers[shard].get(name)
        if ref is None:
            raise TensorMissingError(
                f"{index} places {name!r} in {shard}, which does not hold it; index and shards are "
                f"of different versions, fetch both again; run: ls -l {index}"
            )
        tensors[name] = ref
    return tensors

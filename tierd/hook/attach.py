"""From a checkpoint directory to its tables at the daemon, or a refusal that names the cure.

A model must never read rows of another checkpoint, so nothing is matched by name alone: the tables'
fingerprints are taken from the files that the engine is about to load and images of exactly these
fingerprints are demanded. After attach a few rows of every table go the whole way and are compared
with bytes read from the checkpoint by itself. A model that is built without a checkpoint can only
be bound by the name under which its tables were staged.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

from tierd.errors import CheckpointError, HookError
from tierd.gpu import client as gpu_client
from tierd.gpu.tables import TableOptions
from tierd.io import _core
from tierd.io import tables as io_tables
from tierd.io.checkpoint import Checkpoint
from tierd.types import ImageInfo, RowFormat, TableKind, TableSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from tierd.gpu.tables import Table
    from tierd.hook.settings import HookSettings

SELF_TEST_ROWS = 16  # per table; reading them costs a few milliseconds
# Missing rows that one request of each table may list, all tables together: 32 MiB of channel.
_ROWS_MAX_TOTAL = 2048
_ROWS_MAX_LEAST = 128


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRank:
    """Who attaches.

    Attributes:
        engine: name and version, for people.
        rank: this rank's number.
        world: ranks of the engine.
        expected_ranks: how many of them this node's daemon should see.
        applies_scale: whether the engine multiplies rows of an fp8 table by its scale.
    """

    engine: str
    rank: int = 0
    world: int = 1
    expected_ranks: int = 1
    applies_scale: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FoundTables:
    """A checkpoint's tables and the images with their fingerprints, in the same order.

    Attributes:
        directory: the checkpoint; None for tables that are bound by name.
        specs: the tables as the checkpoint, or the image, has them.
    """

    directory: Path | None
    specs: tuple[TableSpec, ...]
    images: tuple[ImageInfo, ...]


class AttachedTables:
    """Tables of one model, attached; one lock, since a channel's client side is one thread's.

    Attributes:
        client: the attached client.
        lock: held by whoever kicks or gathers.
        device: the CUDA device whose tensors the tables take; None for the CPU twin.
    """

    def __init__(
        self,
        client: gpu_client.Client,
        again: Callable[[str], AttachedTables] | None = None,
        device: str | None = None,
    ) -> None:
        """Take an attached client; ``again`` attaches the same tables for another device."""
        self.client = client
        self.lock = threading.Lock()
        self.device = device
        self._again = again
        self._elsewhere: dict[str, AttachedTables] = {}
        # The last model that holds these tables takes the channel with it.
        weakref.finalize(self, _close, client, os.getpid()).atexit = False
        self._by_place = {
            (image.table.kind, image.table.layer): client.table(image.name)
            for image in client.attached
        }

    def on(self, device: str) -> AttachedTables:
        """Return the same tables for a CUDA device, attached and tried when first asked for.

        Raises:
            HookError: no memory there, a graph is being captured, or a row differs.
            AttachError: no daemon, or it refused.
        """
        if device == self.device:
            return self
        if device not in self._elsewhere:
            assert self._again is not None
            self._elsewhere[device] = self._again(device)
        return self._elsewhere[device]

    def table(self, kind: TableKind, layer: int) -> Table:
        """Return the table that a layer reads.

        Raises:
            HookError: the checkpoint, or the staged model, has none for it.
        """
        found = self._by_place.get((kind, layer))
        if found is None:
            have = ", ".join(image.name for image in self.client.attached)
            raise HookError(
                f"no {kind.value} table for layer {layer} is attached, but the model has one there "
                f"(attached: {have}); run: tierd images"
            )
        return found


def _close(client: gpu_client.Client, pid: int) -> None:
    """Detach, but not from a forked child: its socket is the parent's, too."""
    if os.getpid() == pid:
        client.close()


def attach_checkpoint(
    directory: Path, files: Iterable[Path], kind: TableKind, settings: HookSettings, who: EngineRank
) -> AttachedTables:
    """Attach a checkpoint's tables of one kind and try them.

    Args:
        directory: the checkpoint.
        files: the shards that the engine loads; the tables must lie in these.
        kind: which tables.
        settings: socket, name and cache size.
        who: the engine.

    Raises:
        HookError: no image has the fingerprint of these tables, or a row differs.
        AttachError: no daemon, or it refused.
    """
    found = find_checkpoint(directory, files, kind, settings)
    attached = attach_found(found, settings, who)
    try:
        test_rows(found, attached)
    except BaseException:
        attached.client.close()
        raise
    return attached


def attach_named(kind: TableKind, settings: HookSettings, who: EngineRank) -> AttachedTables:
    """Attach the tables that were staged under ``settings.model``, for a model without files.

    Raises:
        HookError: that name has no table of this kind.
        AttachError: no daemon, or it refused.
    """
    return attach_found(find_named(kind, settings), settings, who)


def find_checkpoint(
    directory: Path, files: Iterable[Path], kind: TableKind, settings: HookSettings
) -> FoundTables:
    """Find the images of a checkpoint's tables of one kind at the daemon.

    Raises:
        HookError: no image has the fingerprint of these tables.
        AttachError: no daemon.
    """
    with _open(directory) as checkpoint:
        specs = _specs(checkpoint, files, kind)
        images = _images(settings)
        chosen = [_match(checkpoint, spec, images, settings) for spec in specs]
    return FoundTables(directory, tuple(specs), tuple(chosen))


def find_named(kind: TableKind, settings: HookSettings) -> FoundTables:
    """Find the images of the tables that were staged under ``settings.model``.

    Raises:
        HookError: that name has no table of this kind.
        AttachError: no daemon.
    """
    chosen = [image for image in _images(settings) if image.table.kind == kind]
    if not chosen:
        raise HookError(
            f"the daemon at {settings.socket} has no {kind.value} table of model "
            f"{settings.model!r}; run: tierd images"
        )
    return FoundTables(None, tuple(image.table for image in chosen), tuple(chosen))


def test_rows(found: FoundTables, attached: AttachedTables) -> None:
    """Compare sampled rows of every table with the checkpoint's bytes.

    Raises:
        HookError: a row differs.
    """
    assert found.directory is not None
    with _open(found.directory) as checkpoint:
        for spec in found.specs:
            _self_test(checkpoint, spec, attached.table(spec.kind, spec.layer), attached.device)


def stored_rows(found: FoundTables, spec: TableSpec, ids: Iterable[int]) -> NDArray[np.uint8]:
    """Return rows as the checkpoint stores them, by reads of its files alone.

    Returns:
        uint8 [ids, row_bytes].
    """
    assert found.directory is not None
    with _open(found.directory) as checkpoint:
        reader = io_tables.RowReader(checkpoint, spec)
        return np.concatenate([reader.read(int(row), 1) for row in ids])


def _open(directory: Path) -> Checkpoint:
    try:
        return Checkpoint.open(directory)
    except CheckpointError as error:
        raise _unreadable(error) from None


def _unreadable(error: CheckpointError) -> HookError:
    return HookError(f"the model's tables cannot be read: {error}")


def _specs(checkpoint: Checkpoint, files: Iterable[Path], kind: TableKind) -> list[TableSpec]:
    directory = checkpoint.path
    try:
        found = io_tables.find_tables(checkpoint)
    except CheckpointError as error:
        raise _unreadable(error) from None
    specs = [spec for spec in found if spec.kind == kind]
    if not specs:
        raise HookError(f"{directory}: holds no {kind.value} table, but the model reads one")
    loaded = {path.resolve() for path in files}
    for spec in specs:
        for name in spec.tensors:
            shard = checkpoint.tensors[name].shard
            if shard.resolve() not in loaded:
                raise HookError(
                    f"{directory}: the model is loaded from other files than {shard.name}, which "
                    f"holds its table {spec.name}; load without `variant`, or stage a directory "
                    "that holds only these files"
                )
    return specs


def _images(settings: HookSettings) -> list[ImageInfo]:
    return gpu_client.list_images(settings.socket, settings.model, wait_s=settings.wait_s)


def _match(
    checkpoint: Checkpoint,
    spec: TableSpec,
    images: Sequence[ImageInfo],
    settings: HookSettings,
) -> ImageInfo:
    """Return the image with this table's fingerprint."""
    directory = checkpoint.path
    fingerprint = io_tables.fingerprint(checkpoint, spec)
    for image in images:
        if image.fingerprint == fingerprint and image.table.kind == spec.kind:
            return image
    where = f"the daemon at {settings.socket}"
    if settings.model is not None:
        where += f" (model {settings.model})"
    cure = f"run: tierd stage {directory} --device DEVICE"
    others = [image.name for image in images if image.table.name == spec.name]
    if others:
        raise HookError(
            f"{where} has {', '.join(others)}, but staged from other data than {directory} holds "
            f"(fingerprint {fingerprint[:12]}): the checkpoint changed, or is another; " + cure
        )
    raise HookError(f"{where} has no image of table {spec.name} of {directory}; {cure}")


def attach_found(
    found: FoundTables, settings: HookSettings, who: EngineRank, **options: Any
) -> AttachedTables:
    """Attach tables that were found.

    Args:
        found: which.
        settings: socket, cache size and audit.
        who: the engine and its rank.
        options: for :meth:`tierd.gpu.client.Client.attach`, such as ``rows_max``.

    Raises:
        HookError: two tables for one layer, or fp8 rows for an engine that does not scale them.
        AttachError: no daemon, or it refused.
    """
    images = found.images
    for image in images:
        if image.table.row_format == RowFormat.E4M3 and not who.applies_scale:
            raise HookError(
                f"{image.name}: {who.engine} does not apply the scale of an fp8 table, so its own "
                "rows would be wrong, too; use a checkpoint with a bf16 table"
            )
    places = [(image.table.kind, image.table.layer) for image in images]
    for image, place in zip(images, places, strict=True):
        if places.count(place) > 1:
            raise HookError(
                f"{image.name} is one of several tables for layer {image.table.layer}; set "
                "TIERD_MODEL to the name of the model to serve; run: tierd images"
            )
    options.setdefault("options", TableOptions(audit_every=settings.audit_every))
    options.setdefault("rows_max", max(_ROWS_MAX_LEAST, _ROWS_MAX_TOTAL // len(images)))
    client = gpu_client.Client.attach(
        settings.socket,
        images,
        engine=who.engine,
        rank=who.rank,
        world=who.world,
        expected_ranks=who.expected_ranks,
        cache_rows=settings.cache_rows,
        wait_s=settings.wait_s,
        **options,
    )
    device = options["options"].device if "options" in options else None
    again = functools.partial(_attach_elsewhere, found, settings, who)
    return AttachedTables(client, again, device)


def _attach_elsewhere(
    found: FoundTables, settings: HookSettings, who: EngineRank, device: str
) -> AttachedTables:
    options = TableOptions(device=device, audit_every=settings.audit_every)
    attached = attach_found(found, settings, who, options=options)
    try:
        if found.directory is not None:
            test_rows(found, attached)
    except BaseException:
        attached.client.close()
        raise
    return attached


def _self_test(
    checkpoint: Checkpoint, spec: TableSpec, table: Table, device: str | None = None
) -> None:
    """Compare sampled rows that went the whole way with the checkpoint's bytes.

    Raises:
        HookError: a row differs.
    """
    ids = _sample(spec)
    ids = ids[table.is_read(ids)]
    if not len(ids):
        return  # the operator leaves all of them out
    expected = np.concatenate(
        [io_tables.RowReader(checkpoint, spec).read(int(row), 1) for row in ids]
    )
    served = np.empty((len(ids), spec.dim), dtype=np.uint16)
    if device is None:
        table.kick(ids)
        table.gather(ids, served)
    else:
        served = _served_on(device, table, ids, spec.dim)
    stored = _core.decode_rows(expected, spec.dim, spec.row_format.value)
    differs = (served != stored).any(axis=1)
    wrong = ids[differs]
    if len(wrong) > 0:
        raise HookError(
            f"{table.info.name}: row {wrong[0]} is not what {spec.tensors[0]} holds "
            f"({len(wrong)} of {len(ids)} sampled rows differ); "
            f"run: tierd verify --full --device DEVICE {table.info.name}"
        )


def _served_on(device: str, table: Table, ids: NDArray[np.int64], dim: int) -> NDArray[np.uint16]:
    """Return rows as bf16 bits [ids, dim], by way of a GPU."""
    import torch  # noqa: PLC0415 - the CPU twin does without

    wanted = torch.from_numpy(ids).to(device)
    out = torch.empty((len(ids), dim), dtype=torch.int16, device=device)
    table.kick(wanted)
    table.gather(wanted, out)
    return out.cpu().numpy().view(np.uint16)


def _sample(spec: TableSpec) -> NDArray[np.int64]:
    """First row, last row and others spread by a fixed seed."""
    chosen = {0, spec.rows - 1}
    generator = random.Random(spec.rows)  # noqa: S311 - a sample, not a secret
    while len(chosen) < min(SELF_TEST_ROWS, spec.rows):
        chosen.add(generator.randrange(spec.rows))
    return np.array(sorted(chosen), dtype=np.int64)

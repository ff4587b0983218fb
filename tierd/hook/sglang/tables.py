"""This rank's tables: found when the first is constructed, attached when the model is loaded.

To find them early costs a second and says so before hundreds of gigabytes of other weights were
loaded in vain. To attach them late lets one channel and one row cache serve all layers, whose row
ranges are known by then; and it still comes before SGLang shares the GPU's free memory out, so
the cache is accounted for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError
from tierd.gpu.tables import TableOptions
from tierd.hook import attach, autostart, settings
from tierd.hook.sglang import guards
from tierd.types import TableKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tierd.types import TableSpec

CACHE_ROWS = 1 << 20  # 285 MB of HBM at 264 B
# Rows of one token, in the public models: a graph's shape must fit one request.
COLUMNS = {TableKind.ENGRAM: 24, TableKind.PLE: 16}
_ROWS_MAX_LEAST = 2048
_ARENA_PAGES = 1 << 18  # of a client together: channel.arena_pages_max, unless it was changed
HINT_PAGES_MOST = 1 << 15  # 128 MiB of the daemon's memory for a table of a rank, unless asked for


def require_published() -> None:
    """Refuse a model that is constructed outside of SGLang's own launch.

    Raises:
        HookError: the engine has not published its settings.
    """
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - the engine's own

    if not get_context().is_config_namespace_published("model"):
        raise HookError(
            "a model with a lookup table is constructed before SGLang has published its settings, "
            "so tierd cannot know which checkpoint it is; start it by sglang.launch_server"
        )


def published(name: str) -> Any:
    """Return a setting of the engine as it was resolved; None if this release has no such."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - the engine's own

    try:
        return get_context().config_leaf(name)
    except ValueError:  # what SGLang raises for a name that this release does not have
        return None


class ServedTable:
    """One layer's table, or this rank's range of its rows.

    Attributes:
        kind: which kind of table.
        layer: the decoder layer; None until the loaded model tells.
        rows: rows of the whole table.
        dim: values of a row.
        first, end: the rows that this rank owns.
        device: where ids and rows are.
        on_gpu: whether the GPU path serves it, rather than its twin on the CPU.
        begin: what the window probe wants called when a step begins.
    """

    def __init__(
        self,
        kind: TableKind,
        layer: int | None,
        *,
        rows: int,
        dim: int,
        owned: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.kind = kind
        self.layer = layer
        self.rows = rows
        self.dim = dim
        self.first, self.end = owned
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.tested = False
        self.begin: Callable[[], None] | None = None
        self._table: Any = None
        self._attached: attach.AttachedTables | None = None

    @property
    def whole(self) -> bool:
        """Whether this rank owns every row."""
        return (self.first, self.end) == (0, self.rows)

    def bind(self, attached: attach.AttachedTables) -> None:
        """Take the table.

        Raises:
            HookError: the model has no table at this layer, or one of another shape.
        """
        assert self.layer is not None
        self._attached, self._table = attached, attached.table(self.kind, self.layer)

    def begins(self) -> None:
        """Tell the window probe, if there is one, that a step's row numbers are known."""
        if self.begin is not None:
            self.begin()

    def kick(self, ids: torch.Tensor) -> None:
        """Start reading the rows that this rank owns and has not cached.

        Args:
            ids: int64 of any shape, on the table's device.
        """
        if self._table is None or ids.numel() == 0 or self.first == self.end:
            return
        if self.on_gpu:
            self._table.kick(ids)
            return
        assert self._attached is not None
        wanted = ids.detach().to(torch.int64).contiguous()
        if not self.whole:
            wanted = wanted[(wanted >= self.first) & (wanted < self.end)]
        with self._attached.lock:
            self._table.kick(wanted)

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows that this rank owns, and +0 for the others.

        Args:
            ids: int64 of any shape, on the table's device.
            out: bf16 [*ids.shape, dim], contiguous.

        Raises:
            HookError: before the model was loaded.
        """
        if self._table is None:
            raise HookError(
                f"rows of layer {self.layer} are read before the model's tables were attached"
            )
        if self.first == self.end:
            out.zero_()
        elif self.on_gpu:
            self._table.gather(ids, out)
        else:
            self._gather_on_cpu(ids, out)

    def _gather_on_cpu(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        assert self._attached is not None
        wanted = ids.detach().to(torch.int64).contiguous()
        with self._attached.lock:
            if self.whole:
                self._table.gather(wanted, out)
                return
            owned = (wanted >= self.first) & (wanted < self.end)
            rows = torch.empty((int(owned.sum()), self.dim), dtype=torch.bfloat16)
            self._table.gather(wanted[owned], rows)
        out.zero_()
        out[owned] = rows

    def hint(self, ids: NDArray[np.int64], limit: int) -> int:
        """Tell the daemon which rows a prefill will read; from one thread.

        Args:
            ids: row numbers in the order of the tokens, any shape; what this rank does not own is
                left out.
            limit: rows to hint at most.

        Returns:
            Pages asked for.
        """
        if self._attached is None or self._table is None:
            return 0
        wanted = ids.reshape(-1)
        wanted = wanted[(wanted >= self.first) & (wanted < self.end)][:limit]
        return self._attached.client.hint(self._table.info.name, wanted)

    def stats(self) -> dict[str, int]:
        """Return the counters of the table's ring."""
        return dict(self._table.stats())


@dataclasses.dataclass
class Rank:
    """The tables of one kind in this process.

    Attributes:
        kind: which kind.
        found: their images at the daemon.
        tables: those that the model has constructed.
        hint_pages: memory for each table's hints, once attached.
    """

    kind: TableKind
    found: attach.FoundTables
    settings: settings.HookSettings
    tables: list[ServedTable] = dataclasses.field(default_factory=list)
    attached: attach.AttachedTables | None = None
    hint_pages: int = 0

    def attach(self) -> None:
        """Attach all tables of the model at once; does nothing the second time.

        Raises:
            HookError: the model and the images differ in their layers.
            AttachError: no daemon, or it refused.
        """
        if self.attached is not None:
            return
        wanted: dict[str, Any] = {"audit_every": self.settings.audit_every}
        more: dict[str, Any] = {}
        self.hint_pages = wanted["hint_pages"] = _hint_pages(self.kind, self.settings, self.tables)
        if self.tables[0].on_gpu:
            names = {spec.layer: image.name for spec, image in self._pairs()}
            ranges = {names[t.layer]: (t.first, t.end) for t in self.tables if t.layer in names}
            wanted |= {"device": str(self.tables[0].device), "row_ranges": ranges}
            more["rows_max"] = _rows_max(self.kind)
        self.attached = attach.attach_found(
            self.found, self.settings, who(), options=TableOptions(**wanted), **more
        )
        for table in self.tables:
            table.bind(self.attached)
            autostart.note_replaced()

    def spec(self, table: ServedTable) -> TableSpec:
        """Return what the checkpoint, or the image, says of a table.

        Raises:
            HookError: it has none for this layer, or another one.
        """
        for spec, image in self._pairs():
            if spec.layer != table.layer:
                continue
            if (spec.rows, spec.dim) != (table.rows, table.dim):
                raise HookError(
                    f"{image.name} has {spec.rows} rows of {spec.dim} values, the model's table "
                    f"{table.rows} of {table.dim}: the config is of another checkpoint"
                )
            return spec
        have = ", ".join(image.name for image in self.found.images)
        raise HookError(
            f"the model reads a table at layer {table.layer}, but there is none (there are: "
            f"{have}); run: tierd images"
        )

    def _pairs(self) -> list[tuple[TableSpec, Any]]:
        return list(zip(self.found.specs, self.found.images, strict=True))

    def test(self, table: ServedTable, stock: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Hold sampled rows of a table against the checkpoint's, decoded by the stock engine.

        Args:
            table: an attached one.
            stock: raw rows uint8 [n, row_bytes] on the table's device -> bf16 [n, dim] by the
                stock engine's own lookup.

        Raises:
            HookError: a row differs.
        """
        table.tested = True
        if self.found.directory is None:
            return  # a model without files: there is nothing to compare with
        spec = self.spec(table)
        chosen = sample(table)
        ids = torch.tensor(chosen, device=table.device)
        served = torch.empty((len(chosen), table.dim), dtype=torch.bfloat16, device=table.device)
        table.kick(ids)
        table.gather(ids, served)
        raw = attach.stored_rows(self.found, spec, chosen)
        expected = stock(torch.from_numpy(raw).to(table.device))
        owned = (ids >= table.first) & (ids < table.end)
        expected = expected.masked_fill(~owned[:, None], 0)
        differs = (served.view(torch.int16) != expected.view(torch.int16)).any(dim=1)
        if bool(differs.any()):
            row = chosen[int(differs.nonzero()[0, 0])]
            raise HookError(
                f"row {row} of {spec.tensors[0]} is served otherwise than SGLang reads it "
                f"({int(differs.sum())} of {len(chosen)} sampled rows differ); "
                "run: tierd verify --full --device DEVICE"
            )


def sample(table: ServedTable) -> list[int]:
    """Rows to compare: the ends of the table and of this rank's range, others by a fixed seed."""
    ends = {0, table.rows - 1, table.first, table.end - 1, table.end, table.first - 1}
    chosen = {row for row in ends if 0 <= row < table.rows}
    generator = torch.Generator().manual_seed(table.rows)
    more = torch.randint(table.rows, (attach.SELF_TEST_ROWS,), generator=generator)
    inside = torch.randint(
        table.first, max(table.end, table.first + 1), (attach.SELF_TEST_ROWS,), generator=generator
    )
    chosen.update(row for row in (more.tolist() + inside.tolist()) if row < table.rows)
    return sorted(chosen)


_ranks: dict[TableKind, Rank] = {}


def register(table: ServedTable) -> Rank:
    """Take note of a table that the model constructs; the first one finds the images.

    Raises:
        HookError: a setting that cannot be served, or no image of this checkpoint.
        AttachError: no daemon within ``TIERD_WAIT_S``.
    """
    if table.kind not in _ranks:
        guards.require_settings(published, hip=torch.version.hip is not None)
        _ranks[table.kind] = _find(table.kind)
    rank = _ranks[table.kind]
    if table.layer is not None:
        rank.spec(table)
    rank.tables.append(table)
    return rank


def ranks() -> tuple[Rank, ...]:
    """The tables of this process, by kind."""
    return tuple(_ranks.values())


def forget() -> None:
    """Detach everything: an engine that shuts down and starts again in one process."""
    for rank in _ranks.values():
        if rank.attached is not None:
            rank.attached.client.close()
    _ranks.clear()


def _find(kind: TableKind) -> Rank:
    device = torch.empty(0).device.type
    if device not in {"cpu", "cuda"}:
        raise HookError(f"tables on {device} are not served; run SGLang without tierd")
    rows = CACHE_ROWS if device == "cuda" else settings.DEFAULT_CACHE_ROWS
    wanted = settings.current(cache_rows=rows)
    directory = _checkpoint_directory()
    dummy = getattr(published("load_format"), "value", published("load_format")) == "dummy"
    if dummy and not any(directory.glob("*.safetensors")):
        if wanted.model is None:
            raise HookError(
                "--load-format dummy and no weights to tell which rows the model wants; set "
                "TIERD_MODEL=NAME to serve the tables staged under that name; run: tierd images"
            )
        return Rank(kind, attach.find_named(kind, wanted), wanted)
    files = sorted(directory.glob("*.safetensors"))
    return Rank(kind, attach.find_checkpoint(directory, files, kind, wanted), wanted)


def _checkpoint_directory() -> Path:
    """Return where the weights lie, which a model's name may have to be resolved to.

    Raises:
        HookError: the model is not on this machine.
    """
    path = str(published("model_path"))
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - SGLang needs it as well
    from huggingface_hub.errors import (  # noqa: PLC0415
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        found = snapshot_download(
            path,
            revision=published("revision"),
            cache_dir=published("download_dir"),
            local_files_only=True,
        )
    except (HFValidationError, LocalEntryNotFoundError):
        raise HookError(
            f"{path} is neither a directory nor a downloaded model, so its tables cannot have been "
            "staged; download it, then run: tierd stage CHECKPOINT --device DEVICE"
        ) from None
    return Path(found)


def who() -> attach.EngineRank:
    """Return this rank among the ranks of its engine, each with a channel of its own."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine's own

    parallel = get_parallel()
    replicas = 1 if published("enable_dp_attention") else int(published("dp_size") or 1)
    rank = int(parallel.tp_rank)
    if replicas > 1:
        rank += int(parallel.dp_rank or 0) * int(parallel.tp_size)
    world = int(parallel.tp_size) * replicas
    here = max(1, world // int(published("nnodes") or 1))
    expected = settings.count("TIERD_EXPECTED_RANKS", here, what="ranks")
    return attach.EngineRank(
        f"sglang {guards.version()}", rank, world, expected, applies_scale=True
    )


def _rows_max(kind: TableKind) -> int:
    """Return how many rows the largest decode or verify graph reads from one table.

    Under data parallel attention a rank looks up those of all its peers.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - the engine's own

    config = published("cuda_graph_config")
    batch = int(getattr(getattr(config, "decode", None), "max_bs", None) or 0)
    tokens = int(published("speculative_num_draft_tokens") or 1)
    rows = batch * tokens * COLUMNS[kind] * max(1, int(get_parallel().attn_dp_size))
    return settings.count("TIERD_ROWS_MAX", max(_ROWS_MAX_LEAST, rows))


def _hint_pages(
    kind: TableKind, wanted: settings.HookSettings, served: Sequence[ServedTable]
) -> int:
    """Return the memory for a table's hints: two chunks of a prefill, this rank's share of them.

    A CPU is busy with what hints would save, and Qwen4Exp's rows are hashed by the layer itself.
    """
    if kind != TableKind.ENGRAM:
        return 0
    if wanted.hint_pages is not None:
        return wanted.hint_pages
    if not served[0].on_gpu:
        return 0
    chunk = int(published("chunked_prefill_size") or 0)
    share = max((table.end - table.first) / table.rows for table in served)
    rows = int(chunk * COLUMNS[kind] * share) if chunk > 0 else HINT_PAGES_MOST
    room = _ARENA_PAGES // len(served) - 2 * _rows_max(kind)
    return max(0, min(HINT_PAGES_MOST, 2 * rows, room))

"""An engine rank's tables, whichever engine it is: found, attached at once, held against the stock.

An adapter constructs a :class:`ServedTable` in the place of each stock table and hands it to a
:class:`Rank`, which finds the images, attaches all of them over one channel and tries rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierd.errors import HookError
from tierd.gpu.tables import TableOptions
from tierd.hook import attach, autostart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from tierd.hook import settings
    from tierd.types import TableKind, TableSpec


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

    def read_of(self, rows: list[int]) -> list[int]:
        """Return those of some rows that are served as stored, not left out (lossy skipping)."""
        is_read = self._table.is_read(np.array(rows, np.int64))
        return [row for row, read in zip(rows, is_read.tolist(), strict=True) if read]

    def stats(self) -> dict[str, int]:
        """Return the counters of the table's ring."""
        return dict(self._table.stats())


@dataclasses.dataclass
class Rank:
    """The tables of one kind in this process.

    Attributes:
        engine: the engine's name, for people.
        kind: which kind.
        found: their images at the daemon.
        who: tells which rank this is, once the model is loaded.
        rows_max: tells how many rows the largest captured step reads from one table.
        options: more for :class:`tierd.gpu.tables.TableOptions` of a GPU's tables.
        hints: tells how many pages each table's hints may take, once the model is loaded.
        tables: those that the model has constructed.
        hint_pages: what ``hints`` told, once attached.
    """

    engine: str
    kind: TableKind
    found: attach.FoundTables
    settings: settings.HookSettings
    who: Callable[[], attach.EngineRank]
    rows_max: Callable[[], int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    hints: Callable[[Sequence[ServedTable]], int] = lambda _: 0
    tables: list[ServedTable] = dataclasses.field(default_factory=list)
    hint_pages: int = 0
    attached: attach.AttachedTables | None = None

    def attach(self) -> None:
        """Attach all tables of the model at once; does nothing the second time.

        Raises:
            HookError: the model and the images differ in their layers.
            AttachError: no daemon, or it refused.
        """
        if self.attached is not None:
            return
        self.hint_pages = self.hints(self.tables)
        wanted: dict[str, Any] = {"audit_every": self.settings.audit_every}
        wanted["hint_pages"] = self.hint_pages
        more: dict[str, Any] = {}
        if self.tables[0].on_gpu:
            names = {spec.layer: image.name for spec, image in self._pairs()}
            ranges = {names[t.layer]: (t.first, t.end) for t in self.tables if t.layer in names}
            wanted |= {"device": str(self.tables[0].device), "row_ranges": ranges, **self.options}
            more["rows_max"] = self.rows_max()
        self.attached = attach.attach_found(
            self.found, self.settings, self.who(), options=TableOptions(**wanted), **more
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

    def refuse_reload(self) -> None:
        """Refuse weights that come once the tables are attached.

        The engine would take another checkpoint's weights, and go on with this one's rows.

        Raises:
            HookError: the tables are attached.
        """
        if self.attached is not None:
            raise HookError(
                f"{self.engine} loads weights over tables that are served, whose rows would stay "
                "those of the first checkpoint; start the engine anew, or unset TIERD"
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
        chosen = table.read_of(sample(table))
        if not chosen:
            return  # the operator leaves all of them out
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
                f"row {row} of {spec.tensors[0]} is served otherwise than {self.engine} reads it "
                f"({int(differs.sum())} of {len(chosen)} sampled rows differ); "
                "run: tierd verify --full --device DEVICE"
            )


class Ranks:
    """This process's tables of every kind: each kind's found when its first is constructed."""

    def __init__(self) -> None:
        self._by_kind: dict[TableKind, Rank] = {}

    def take(self, table: ServedTable, find: Callable[[], Rank]) -> Rank:
        """Take note of a table that the model constructs.

        Args:
            table: the one that is constructed.
            find: finds the images of its kind; called for the first of a kind.

        Raises:
            HookError: no image of this checkpoint, or none for the table's layer; or this process
                serves a model already.
            AttachError: no daemon within ``TIERD_WAIT_S``.
        """
        if table.kind not in self._by_kind:
            self._by_kind[table.kind] = find()
        rank = self._by_kind[table.kind]
        if rank.attached is not None:
            raise HookError(
                f"this process has served a model's tables already, and {rank.engine} constructs "
                "another one; give each engine a process of its own"
            )
        if table.layer is not None:
            rank.spec(table)
        rank.tables.append(table)
        return rank

    def all(self) -> tuple[Rank, ...]:
        """Return them, by kind."""
        return tuple(self._by_kind.values())

    def serve(self, modules: Iterable[Any]) -> None:
        """Attach what is not attached yet, and try what was not tried.

        Args:
            modules: an adapter's, each with its table as ``tierd`` and with ``tierd_test()``.

        Raises:
            HookError: a table that is served wrongly, or not at all.
            AttachError: no daemon, or it refused.
        """
        for rank in self.all():
            rank.attach()
        for module in modules:
            if not module.tierd.tested:
                module.tierd_test()

    def keep_weights(self, model: Any, or_exit: Callable[[], Any]) -> None:
        """Let a loaded model be given no more weights of the tables that are served.

        Engines take weights while they run (``update_weights_from_disk`` and its like); the others
        pass. A table's would be dropped, and the first checkpoint's rows be served on.

        Args:
            model: its ``load_weights`` takes pairs of names and tensors.
            or_exit: a context that ends the process on a HookError.
        """
        stock = getattr(model, "load_weights", None)
        if stock is None:
            return
        owner = {
            name: rank for rank in self.all() for spec in rank.found.specs for name in spec.tensors
        }

        def passed(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                # Engines and trainers put their own prefixes before a checkpoint's names.
                for table, rank in owner.items():
                    if name == table or name.endswith("." + table):
                        with or_exit():
                            rank.refuse_reload()
                yield name, tensor

        @functools.wraps(stock)
        def load_weights(weights: Iterable[tuple[str, Any]], *args: Any, **options: Any) -> Any:
            return stock(passed(weights), *args, **options)

        model.load_weights = load_weights

    def forget(self) -> None:
        """Detach everything: an engine that shuts down and starts again in one process."""
        for rank in self.all():
            if rank.attached is not None:
                rank.attached.client.close()
        self._by_kind.clear()


def after_loading(runner: Any, then: Callable[[Any], None]) -> None:
    """Call something with a model runner whenever its ``load_model`` has loaded a model.

    Args:
        runner: the engine's class.
        then: gets the instance.
    """
    stock = runner.load_model

    @functools.wraps(stock)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        then(self)
        return result

    runner.load_model = load_model


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

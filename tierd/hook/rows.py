"""What stands in a model in place of a table: ids in, rows out, nothing stored.

A stand-in keeps a ``weight`` buffer of no rows. It is not saved with the model and not looked for
in a checkpoint, but it follows the model to another dtype or device as the table would, and so it
tells what the stock table's dtype and device were now.
"""

from __future__ import annotations

import copy
import os
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tierd.errors import HookError
from tierd.hook import attach, autostart, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.gpu.tables import Table
    from tierd.types import TableKind


LOADING: ContextVar[bool] = ContextVar("LOADING", default=False)
"""Whether a model is constructed by from_pretrained now, which binds its tables later."""

_engine = "transformers"


def set_engine(engine: str) -> None:
    """Set the engine's name and version, for people."""
    global _engine  # noqa: PLW0603 - one engine a process
    _engine = engine


class TablesOnMeta(TorchFunctionMode):
    """While it is entered, ``torch.empty`` gives tensors without memory.

    ``nn.Embedding`` makes its weight with ``torch.empty``, so a stock module that is constructed
    inside has everything but its table. Other ways to make a tensor are not touched.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Part of torch's function mode protocol."""
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class TableStandIn:
    """The rows of one stock table, from one or several tables of the daemon.

    Attributes:
        kind: which kind of table the model reads here.
        layers: decoder layers whose tables make up a row, side by side.
        rows: rows of the stock table.
        dim: values of one layer's row.
    """

    def __init__(self, kind: TableKind, layers: Sequence[int], rows: int, dim: int) -> None:
        self.kind = kind
        self.layers = tuple(layers)
        self.rows = rows
        self.dim = dim
        self._attached: attach.AttachedTables | None = None
        self._tables: tuple[Table, ...] = ()
        self._elsewhere: dict[str, tuple[Table, ...]] = {}
        self._casts: list[torch.dtype] = []
        self._pid = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies of a model share the tables, but each is cast on its own."""
        made = copy.copy(self)
        vars(made).update(_casts=list(self._casts), _elsewhere=dict(self._elsewhere))
        return made

    def bind(self, attached: attach.AttachedTables, dtype: torch.dtype) -> None:
        """Take the tables, after checking that they have the model's shape.

        Args:
            attached: where the tables are.
            dtype: the dtype in which the stock model would have loaded its table.

        Raises:
            HookError: a table is missing or has another shape than the model's.
        """
        if not dtype.is_floating_point:
            raise HookError(f"the model wants its table as {dtype}; tierd serves bf16 rows")
        tables = tuple(attached.table(self.kind, layer) for layer in self.layers)
        for table in tables:
            spec = table.info.table
            if (spec.rows, spec.dim) != (self.rows, self.dim):
                raise HookError(
                    f"{table.info.name} has {spec.rows} rows of {spec.dim} values, the model's "
                    f"table {self.rows} of {self.dim}: the config is of another checkpoint"
                )
        self._attached, self._tables = attached, tables
        self._casts = [dtype]
        self._pid = os.getpid()
        autostart.note_replaced()

    @property
    def bound(self) -> bool:
        """Whether rows can be read."""
        return self._attached is not None

    def cast(self, dtype: torch.dtype) -> None:
        """Follow the model to another dtype.

        The stock table would be rounded by every such step, so the steps are remembered and done
        to each row: bf16 -> fp16 -> fp32 is not bf16 -> fp32.
        """
        if self.bound and self._casts[-1] != dtype:
            self._casts.append(dtype)

    def kick(self, ids: torch.Tensor, like: torch.Tensor) -> None:
        """Start reading the rows that are not cached.

        Args:
            ids: int64 of any shape.
            like: a tensor of the dtype and device that the stock table would have now.
        """
        attached = self._ready(like)
        if like.device.type == "cuda":
            there, tables = self._tables_on(attached, like.device)
            with there.lock:
                for table in tables:
                    table.kick(ids)
            return
        rows = ids.detach().to("cpu", torch.int64).contiguous()
        with attached.lock:
            for table in self._tables:
                table.kick(rows)

    def gather(self, ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the rows.

        Args:
            ids: int64 of any shape, usually those that were kicked.
            like: as for :meth:`kick`.

        Returns:
            [*ids.shape, layers * dim] in the dtype and on the device of ``like``.
        """
        attached = self._ready(like)
        if like.device.type == "cuda":
            return self._gather_on(attached, ids, like.device)
        rows = ids.detach().to("cpu", torch.int64).contiguous()
        out = torch.empty((len(self._tables), *rows.shape, self.dim), dtype=torch.bfloat16)
        with attached.lock:
            for table, part in zip(self._tables, out, strict=True):
                table.gather(rows, part)
        return self._values(out).to(like.device)

    def _gather_on(
        self, attached: attach.AttachedTables, ids: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """The same on a GPU: work of its streams alone, which a CUDA graph may capture."""
        there, tables = self._tables_on(attached, device)
        shape = (len(tables), *ids.shape, self.dim)
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        with there.lock:
            for table, part in zip(tables, out, strict=True):
                table.gather(ids, part)
        return self._values(out)

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """Put the layers' rows [layers, ..., dim] side by side, cast as the model was."""
        values = rows[0] if len(rows) == 1 else rows.movedim(0, -2).flatten(-2)
        for dtype in self._casts:
            values = values.to(dtype)
        return values

    def _tables_on(
        self, attached: attach.AttachedTables, device: torch.device
    ) -> tuple[attach.AttachedTables, tuple[Table, ...]]:
        """Return the tables on a GPU, and whose lock keeps the calls of several threads apart.

        The lock orders what threads enqueue. That their streams run it in this order is up to
        them; threads that name no stream share one.
        """
        name = str(device)
        with attached.lock:  # two threads must not attach twice
            there = attached.on(name)
        if name not in self._elsewhere:
            self._elsewhere[name] = tuple(there.table(self.kind, layer) for layer in self.layers)
        return there, self._elsewhere[name]

    def _ready(self, like: torch.Tensor) -> attach.AttachedTables:
        if self._attached is None:
            self.bind(_attach_named(self.kind), like.dtype)
        if self._pid != os.getpid():
            raise HookError(
                f"the model was attached by process {self._pid} and is used after a fork in "
                f"{os.getpid()}; load it in the process that runs it"
            )
        assert self._attached is not None
        return self._attached


def check_origin() -> None:
    """Refuse a model of which nobody can say whose rows it wants.

    Raises:
        HookError: no checkpoint is being loaded and no staged model is named.
    """
    if not LOADING.get() and settings.current().model is None:
        raise HookError(
            "a model with a lookup table is built without a checkpoint, so tierd cannot know "
            "which rows it wants; load it by from_pretrained, or set TIERD_MODEL=NAME to serve "
            "the tables staged under that name; run: tierd images"
        )


_named: dict[tuple[settings.HookSettings, TableKind, int], attach.AttachedTables] = {}


def _attach_named(kind: TableKind) -> attach.AttachedTables:
    """Attach the tables of the model named in the settings, once a process."""
    wanted = settings.current()
    if wanted.model is None:
        raise HookError(
            "the model's lookup table was not bound to tierd: its weights did not come from "
            "safetensors files; load it by from_pretrained from such files, or set "
            "TIERD_MODEL=NAME; run: tierd images"
        )
    key = (wanted, kind, os.getpid())
    if key not in _named:
        _named[key] = attach.attach_named(kind, wanted, attach.EngineRank(_engine))
    return _named[key]


def refuse_training(module: nn.Module) -> None:
    """A served table gets no gradient, so training on would silently not be training on.

    Raises:
        HookError: the module is in training mode and gradients are recorded.
    """
    if module.training and torch.is_grad_enabled():
        raise HookError(
            "the model is being trained, but a table served by tierd is read-only; call "
            "model.eval() or use torch.no_grad(), or train without tierd"
        )

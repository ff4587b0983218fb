"""One table on the GPU: kick when the row numbers are known, gather where the layer needs them.

    cache = GpuCache(sets=32768, row_bytes=264)
    table = GpuTable(cache, ChannelMap(channel, cache.device), ring=0, image=..., quota=16)
    table.kick(ids)             # side stream: directory, miss list, doorbell
    ...                         # the layers before
    table.gather(ids, out)      # main stream: wait and fill, gather

Both may be captured in CUDA graphs, in any number of shapes; nothing in them depends on values
that change from step to step. Kicks run on the cache's own stream, forked from the current one
and joined by the gather, so a captured graph holds both.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tierd.errors import HookError, RowError
from tierd.gpu import kernels_fill, kernels_gather, kernels_kick, state
from tierd.gpu.fault import WATCH
from tierd.gpu.ids import IdLayout, layout_of
from tierd.gpu.ring import Lane, RingState
from tierd.io import _core
from tierd.types import RowFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierd.gpu.cache import GpuCache
    from tierd.gpu.shared import ChannelMap

FORMATS = {
    RowFormat.E4M3_E8M0: kernels_gather.E4M3_E8M0.value,
    RowFormat.E4M3: kernels_gather.E4M3.value,
    RowFormat.BF16: kernels_gather.BF16.value,
    RowFormat.RAW: kernels_gather.RAW.value,
}
TIMEOUT_NS = 10_000_000_000  # above take-over, retry and the next tier together
GRACE_NS = 5_000_000_000  # what the host has to say why before the GPU traps
# Programs, of one warp each. Few registers and few programs leave room for the engine's kernels.
LOOKUP_ROWS = 4
CLAIM_PROGRAMS = 264
FILL_PROGRAMS = 528  # four per multiprocessor of an H200: one round for most steps
GATHER_ROWS = 4
GATHER_ROWS_SMALL = 2
SMALL = 1024  # ids; below this, more programs are faster than fuller ones


def pow2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def gather_rows(count: int) -> int:
    """Return how many rows one program of a gather of ``count`` ids serves."""
    return GATHER_ROWS_SMALL if count < SMALL else GATHER_ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class TableImage:
    """What the kernels must know of an image.

    Attributes:
        number: the table's number in its cache, which is also its ring's.
        row_lo, row_hi: the rows that this rank owns; others are served as +0 and never read.
        canonical_zero: whether -0 becomes +0 (sharded engines).
        any_id: whether a number outside the table is served as +0; else it is a fault.
        scale_zero: whether an e8m0 scale of 0 stands for 0 rather than for 2^-127.
    """

    name: str
    number: int
    image_id: int
    generation: int
    rows: int
    dim: int
    row_bytes: int
    row_format: RowFormat
    row_lo: int = 0
    row_hi: int | None = None
    canonical_zero: bool = False
    any_id: bool = False
    scale_zero: bool = False

    def __post_init__(self) -> None:
        width = {"e4m3_e8m0": self.dim + self.dim // 32, "bf16": 2 * self.dim}
        if width.get(self.row_format, self.dim) != self.row_bytes:
            raise HookError(
                f"{self.name}: {self.dim} values as {self.row_format.value} do not make rows of "
                f"{self.row_bytes} B"
            )
        if self.row_format == RowFormat.E4M3_E8M0 and self.dim % 32:
            raise HookError(f"{self.name}: {self.dim} values are no whole number of 32-blocks")
        if not 0 < self.rows <= state.ROWS_LIMIT:
            raise HookError(f"{self.name}: {self.rows} rows; a directory word holds 2^34 - 2")

    @property
    def geometry(self) -> dict[str, int]:
        """The compile-time numbers that every kernel of this table shares."""
        words = int(_core.row_stride(self.row_bytes)) // 4
        return {
            "ROWS_PER_PAGE": int(_core.rows_per_page(self.row_bytes)),
            "ROW_WORDS": words,
            "BLOCK": pow2(words),
        }

    @property
    def checked_rows(self) -> int:
        """Rows beyond which a number is a fault; 0: none is."""
        return 0 if self.any_id else self.rows

    @property
    def zero_scale_bits(self) -> int:
        """The fp32 bits that an e8m0 scale of 0 stands for."""
        return 0 if self.scale_zero else 0x00400000

    @property
    def element(self) -> torch.dtype:
        """How the gather reads a stored element."""
        return torch.int16 if self.row_format == RowFormat.BF16 else torch.uint8

    @property
    def per_word(self) -> int:
        """Stored elements in 32 bits."""
        return 2 if self.row_format == RowFormat.BF16 else 4

    def output_view(self, out: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Check ``out`` and return it as the kernels write it.

        Raises:
            HookError: another shape or dtype, or not contiguous.
        """
        raw = self.row_format == RowFormat.RAW
        wanted = (torch.uint8,) if raw else (torch.bfloat16, torch.int16, torch.uint16)
        if out.dtype not in wanted or out.shape != (*shape, self.dim) or not out.is_contiguous():
            raise HookError(
                f"{self.name}: the output must be contiguous {wanted[0]} of shape "
                f"{(*shape, self.dim)}, got {out.dtype} {tuple(out.shape)}"
                f"{'' if out.is_contiguous() else ', not contiguous'}"
            )
        if raw:
            return out
        return out.view(torch.int16 if self.row_format == RowFormat.BF16 else torch.bfloat16)


@dataclasses.dataclass
class _Parts:
    """Sub-batches of one large kick: which are kicked (`events`) and how many gathered."""

    ids: torch.Tensor
    pieces: list[tuple[torch.Tensor, IdLayout]]
    events: list[torch.cuda.Event | None] = dataclasses.field(default_factory=list)
    gathered: int = 0


class GpuTable:
    """One ring of a channel and one table of a cache, driven from the GPU.

    Not thread-safe: one thread enqueues an engine rank's work.

    Attributes:
        image: what is served.
        rows_max: rows that one request may list; captured shapes must not exceed it.
    """

    def __init__(
        self,
        cache: GpuCache,
        channel: ChannelMap,
        *,
        ring: int,
        image: TableImage,
        quota: int,
        timeout_ns: int = TIMEOUT_NS,
        first_sequence: int = 0,
    ) -> None:
        """Attach a ring to a cache.

        Args:
            cache: of the image's row size.
            channel: the rank's channel, mapped for the cache's device.
            ring: the ring's index; its table number must be the image's.
            image: what the ring serves.
            quota: ways per set.
            timeout_ns: the most that a gather waits for the servers.
            first_sequence: level at which an untouched ring starts; for tests.

        Raises:
            HookError: the parts do not fit each other.
        """
        if cache.row_bytes != image.row_bytes:
            raise HookError(
                f"{image.name}: rows of {image.row_bytes} B do not fit a cache of "
                f"{cache.row_bytes} B rows"
            )
        self.image = image
        self._cache = cache
        self.ring = RingState(cache.device, channel, ring, image, first_sequence)
        self.rows_max = self.ring.rows_max
        cache.attach(image.number, quota)
        self.ring.stats[state.S_QUOTA.value] = 1 + quota
        self._timeout_ns = timeout_ns
        self._hi = image.rows if image.row_hi is None else image.row_hi
        self._slots = cache.slots.view(torch.int32)
        self._elements = cache.slots.view(image.element)
        self._cuda = cache.device.type == "cuda"
        # Sub-batches that may be out at once. With an arena for one alone a second would wait for
        # the first one's gather: fine on a GPU, but the interpreter runs one thing at a time.
        fit = min(self.ring.arena_pages // self.rows_max, int(_core.protocol.RING_DEPTH) - 1)
        self._at_once = max(1, fit)  # by a kick, whose stream waits for lookups and not for gathers
        self._ahead = max(2 if self._cuda else 1, fit)
        self.lanes = [Lane(cache.device, self.rows_max) for _ in range(1 + max(2, self._ahead))]
        self._parts: _Parts | None = None
        self._seen: torch.Tensor | None = None
        self._seen_before: list[torch.Tensor] = []  # captured graphs may still read them
        self._kicked: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._fault = self.ring.fault
        if self._cuda:
            WATCH.add(self._fault)

    # --- what an engine calls -------------------------------------------------------------------

    def kick(self, ids: torch.Tensor, *, join: bool = False) -> None:
        """Start the lookups of a step, behind what is on the current stream now.

        Outside a capture the current stream waits for the lookups (microseconds; not for the
        reads): a graph replayed later holds lookups of its own, and those of one cache must not
        overlap. In a capture the gather joins them.

        Args:
            ids: int32 or int64 row numbers on the cache's device, any strides that collapse to
                two dimensions. More than ``rows_max`` (outside a capture) go in sub-batches, of
                which as many start now as the ring's arena has room for.
            join: make the current stream wait for the kick at once, for engines that cut their
                graphs between kick and gather.

        Raises:
            HookError: wrong dtype, device or strides, or a captured shape above ``rows_max``.
        """
        layout = self._accept(ids)
        if layout.count == 0:
            return
        if layout.count > self.rows_max:
            self._begin_parts(ids, layout, self._at_once)
            assert self._parts is not None
            for event in self._parts.events:
                if event is not None:
                    torch.cuda.current_stream(self._cache.device).wait_event(event)
            return
        self._abandon_parts()
        self._launch_kick(ids, layout, self.lanes[0], drain=True, demand=False)
        self._kicked = ids
        if self._cuda and (join or not _capturing()):
            self._join()

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rows to ``out``, waiting for what is still missing.

        Ids that are the kicked tensor itself cost wait-and-fill and gather; others are looked up
        and demanded here, and counted.

        Args:
            ids: as for :meth:`kick`; more than ``rows_max`` go in overlapped sub-batches.
            out: bf16 [*ids.shape, dim], u8 for raw tables; contiguous.

        Raises:
            HookError: as for :meth:`kick`, or a wrong ``out``.
            RowError: in the interpreter, what a fault's reason says; on the GPU the fault watch
                prints it and ends the process.
        """
        layout = self._accept(ids)
        view = self.image.output_view(out, ids.shape)
        if layout.count == 0:
            return
        if layout.count > self.rows_max:
            self._gather_parts(ids, layout, view)
            return
        self._abandon_parts()
        if not _same(self._kicked, ids):
            self._launch_kick(ids, layout, self.lanes[0], drain=True, demand=True)
        self._kicked = None
        self._join()
        self._launch_wait_fill(self.lanes[0], layout.count)
        self._launch_gather(ids, layout, self.lanes[0], view)

    def warm(self, ids: torch.Tensor) -> None:
        """Bring rows into the cache without using them. The current stream waits for the rows.

        Raises:
            HookError: as for :meth:`kick`, or while a kick waits for its gather.
        """
        layout = self._accept(ids)
        if self._kicked is not None or self._parts is not None:
            raise HookError(f"{self.image.name}: warm comes between a kick and its gather")
        for part in layout.parts(ids, self.rows_max):
            self._launch_kick(*part, self.lanes[1], drain=True, demand=False, prefill=True)
            with self._cache.lookups(None):
                self._launch_wait_fill(self.lanes[1], part[1].count)
                self._launch_finish(self.lanes[1])
        self._event = self._record()
        self._join()

    def skip_unseen(self, bits: NDArray[np.uint8]) -> None:
        """Serve rows that a seen-set does not have as +0 from now on; not those of graphs before.

        Args:
            bits: u8, a bit a row, as of :mod:`tierd.io.seen`; copied to the cache's device.
        """
        if self._seen is not None:
            self._seen_before.append(self._seen)
        self._seen = torch.from_numpy(bits).to(self._cache.device)

    def set_quota(self, ways: int) -> None:
        """Change how many ways of each set this table may hold; nothing is flushed."""
        self._cache.set_quota(self.image.number, ways)
        with self._cache.lookups(None):
            self.ring.stats[state.S_QUOTA.value] = 1 + ways

    @property
    def quota(self) -> int:
        """Ways of each set that this table may hold; waits for the GPU."""
        return self._cache.quota(self.image.number)

    def stats(self) -> dict[str, int]:
        """Return RingStats' counters, exactly; waits for the GPU."""
        values = self.ring.stats.tolist()
        return dict(zip(state.STAT_NAMES, values, strict=False))

    def raise_fault(self) -> None:
        """Raise what a kernel has found wrong, if anything.

        Raises:
            RowError: the reason, in one line.
        """
        reason = self._fault.reason()
        if reason is not None:
            raise RowError(reason)

    def close(self) -> None:
        """Stop watching; the GPU must be done with the table."""
        WATCH.remove(self._fault)

    # --- launches -------------------------------------------------------------------------------

    def _accept(self, ids: torch.Tensor) -> IdLayout:
        layout = layout_of(ids, self._cache.device, self.image.name)
        if layout.count > self.rows_max and self._cuda and _capturing():
            raise HookError(
                f"{self.image.name}: a captured step of {layout.count} rows does not fit a "
                f"request of {self.rows_max}; start the engine with TIERD_ROWS_MAX="
                f"{layout.count} or more (the daemon's channel.rows_max is the most)"
            )
        if not self._cuda:
            self.raise_fault()
        return layout

    def _launch_kick(
        self, ids: torch.Tensor, layout: IdLayout, lane: Lane, *, drain: bool, demand: bool,
        prefill: bool = False,
    ) -> None:  # fmt: skip
        ring, cache = self.ring, self._cache
        stream = torch.cuda.current_stream(cache.device) if self._cuda else None
        with cache.lookups(stream):
            kernels_kick.look_up[(-(-layout.count // LOOKUP_ROWS),)](
                ids, layout.cols, layout.stride0, layout.stride1, layout.count,
                self.image.row_lo, self._hi, self.image.checked_rows, self.image.number,
                cache.words, cache.sets, cache.state, ring.words, lane.words, lane.desc,
                ring.missed_at, ring.missed_rows, ring.fault_words, ring.samples, int(prefill),
                ring.sample_threshold, cache.words if self._seen is None else self._seen,
                ROWS=LOOKUP_ROWS, DEMAND=demand, LOSSY=self._seen is not None, num_warps=1,
            )  # fmt: skip
            kernels_kick.claim_publish[(min(layout.count, CLAIM_PROGRAMS),)](
                layout.count, self.image.number, cache.words, cache.sets, cache.state, ring.words,
                lane.words, lane.desc, ring.missed_at, ring.missed_rows, ring.list_rows,
                ring.list_slots, ring.control, ring.control64, ring.descriptors, ring.arena,
                ring.arena_g_words, self._slots, ring.fault_words, ring.stats, ring.host_stats,
                ring.samples_written, ring.rows_max, ring.arena_pages, ring.array_words,
                int(prefill), *ring.keys, self._timeout_ns, GRACE_NS, **self.image.geometry,
                DRAIN=drain, num_warps=1,
            )  # fmt: skip
            self._event = self._record()

    def _launch_wait_fill(self, lane: Lane, count: int) -> None:
        ring = self.ring
        kernels_fill.wait_fill[(min(count, FILL_PROGRAMS),)](
            lane.words, self.image.number, ring.words, ring.control64, ring.list_rows,
            ring.list_slots, ring.arena, ring.arena_g_words, self._slots, self._cache.words,
            ring.fault_words, ring.stats, ring.rows_max, ring.arena_pages, *ring.keys,
            self._timeout_ns, GRACE_NS,
            **self.image.geometry, CHECK=True, num_warps=1,
        )  # fmt: skip
        if not self._cuda:
            self.raise_fault()

    def _launch_gather(
        self, ids: torch.Tensor, layout: IdLayout, lane: Lane, out: torch.Tensor
    ) -> None:
        ring, image = self.ring, self.image
        shared = (
            ids, layout.cols, layout.stride0, layout.stride1, layout.count, image.row_lo,
            self._hi, lane.desc, self._cache.words, self._elements, out, image.number,
            lane.words, ring.words, ring.arena, ring.arena_elements, ring.arena_g_words,
            ring.arena_pages, ring.fault_words, ring.stats, *ring.keys, GRACE_NS,
        )  # fmt: skip
        rows = gather_rows(layout.count)
        grid = (-(-layout.count // rows),)
        options = {"ROWS": rows, "CANONICAL": image.canonical_zero, "DIM": image.dim}
        options |= {"LOSSY": self._seen is not None, **image.geometry}
        if image.row_format == RowFormat.E4M3_E8M0:
            kernels_gather.gather_scaled[grid](
                *shared, **options, GROUPS=pow2(image.dim // 32), ZERO=image.zero_scale_bits,
                num_warps=1,
            )  # fmt: skip
        else:
            kernels_gather.gather_plain[grid](
                *shared, **options, WIDTH=pow2(image.dim), FORMAT=FORMATS[image.row_format],
                PER_WORD=image.per_word, num_warps=1,
            )  # fmt: skip
        if not self._cuda:
            self.raise_fault()

    def _launch_finish(self, lane: Lane) -> None:
        kernels_kick.finish_lane[(1,)](
            lane.words, self.ring.words, self._cache.state, self.ring.control, self.image.number,
            num_warps=1,
        )  # fmt: skip

    # --- more rows than a request takes -----------------------------------------------------------

    def _begin_parts(self, ids: torch.Tensor, layout: IdLayout, at_once: int) -> None:
        """Cut into sub-batches and kick the first ``at_once``."""
        self._abandon_parts()
        self._kicked = None
        self._join()
        # Whatever lane 0 still holds is filled and given back first.
        self._launch_wait_fill(self.lanes[0], FILL_PROGRAMS)
        self._launch_finish(self.lanes[0])
        self._parts = _Parts(ids, layout.parts(ids, self.rows_max))
        self._kick_parts(self._parts, at_once)

    def _kick_parts(self, parts: _Parts, end: int) -> None:
        while len(parts.events) < min(end, len(parts.pieces)):
            at = len(parts.events)
            lane = self._part_lane(at)
            self._launch_kick(*parts.pieces[at], lane, drain=False, demand=False, prefill=True)
            parts.events.append(self._event)
            self._event = None

    def _part_lane(self, index: int) -> Lane:
        return self.lanes[1 + index % (len(self.lanes) - 1)]

    def _fill_part(self, parts: _Parts, index: int) -> Lane:
        self._event = parts.events[index]
        self._join()
        lane = self._part_lane(index)
        self._launch_wait_fill(lane, parts.pieces[index][1].count)
        return lane

    def _gather_parts(self, ids: torch.Tensor, layout: IdLayout, out: torch.Tensor) -> None:
        """Work in sub-batches: the next ones' reads are out while this one gathers."""
        if self._parts is None or not _same(self._parts.ids, ids):
            self._begin_parts(ids, layout, self._ahead)
        parts = self._parts
        assert parts is not None
        flat = out.view(-1, self.image.dim)
        start = 0
        while parts.gathered < len(parts.pieces):
            self._kick_parts(parts, parts.gathered + self._ahead)
            piece = parts.pieces[parts.gathered]
            lane = self._fill_part(parts, parts.gathered)
            self._launch_gather(*piece, lane, flat[start : start + piece[1].count])
            self._launch_finish(lane)
            start += piece[1].count
            parts.gathered += 1
        self._parts = None

    def _abandon_parts(self) -> None:
        """Fill and give back sub-batches that were kicked and will not be gathered."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        for index in range(parts.gathered, len(parts.events)):
            self._launch_finish(self._fill_part(parts, index))

    # --- streams --------------------------------------------------------------------------------

    def _record(self) -> torch.cuda.Event | None:
        """Mark this point of the stream of lookups."""
        if not self._cuda:
            return None
        with self._cache.lookups(None):
            event = torch.cuda.Event()
            event.record()
        return event

    def _join(self) -> None:
        """Make the current stream wait for this table's last kick, and for no other's."""
        if self._event is not None:
            torch.cuda.current_stream(self._cache.device).wait_event(self._event)
            self._event = None


def _same(kicked: torch.Tensor | None, ids: torch.Tensor) -> bool:
    """Whether ``ids`` is the very memory that was kicked."""
    return (
        kicked is not None
        and kicked.data_ptr() == ids.data_ptr()
        and kicked.shape == ids.shape
        and kicked.stride() == ids.stride()
        and kicked.dtype == ids.dtype
    )


def _capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return bool(torch.cuda.is_current_stream_capturing())


def image_of(info: Any, number: int, **options: Any) -> TableImage:
    """Return the kernels' view of an attached image (types.ImageInfo)."""
    table = info.table
    return TableImage(
        name=info.name, number=number, image_id=info.image_id, generation=info.generation,
        rows=table.rows, dim=table.dim, row_bytes=table.row_bytes, row_format=table.row_format,
        **options,
    )  # fmt: skip

"""A ring as the GPU holds it: its words in device memory and its parts of the channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tierd.errors import HookError
from tierd.gpu import state
from tierd.gpu.fault import FaultBlock
from tierd.gpu.shared import HostBlock
from tierd.io import _core

if TYPE_CHECKING:
    from tierd.gpu.shared import ChannelMap
    from tierd.gpu.table import TableImage

_LISTS = 16  # one more than can be outstanding, rounded up: the next list never meets an old one


class Lane:
    """What one step in flight needs of its own.

    Attributes:
        words: int64 [state.LANE_WORDS].
        desc: int32 [rows_max], per id: a slot, -1 for a row of another rank, or -2 - k for row k
            of the request's pages.
    """

    def __init__(self, device: torch.device, rows_max: int) -> None:
        self.words = torch.zeros(state.LANE_WORDS, dtype=torch.int64, device=device)
        self.desc = torch.full((rows_max,), -1, dtype=torch.int32, device=device)


class RingState:
    """One ring: tensors over its channel memory, and its own words on the device.

    Attributes:
        words: int64 [state.RING_WORDS].
        missed_at, missed_rows: what this kick's lookup did not find: index and row number.
        list_rows, list_slots: per request the missing rows (int64) and their slots (int32).
        control, control64: the ring's control block as 32- and 64-bit words.
        descriptors: the eight descriptors, int32.
        arena, arena_elements: arena D onwards as int32 and as the gather's elements; arena G
            begins ``arena_g_words`` after it.
        samples, samples_written: the ring's SampleHeader and entries, int64.
        sample_threshold: rows whose hash is below it are sampled.
        keys: the image's tag key, two u32.
    """

    def __init__(
        self,
        device: torch.device,
        channel: ChannelMap,
        ring: int,
        image: TableImage,
        first_sequence: int = 0,
    ) -> None:
        entry = channel.entry(ring)
        if entry["table"] != image.number:
            raise HookError(
                f"{image.name}: ring {ring} carries table {entry['table']}, not {image.number}"
            )
        protocol = _core.protocol
        self.rows_max, self.arena_pages = entry["rows_max"], entry["arena_pages"]
        self.array_words = int(protocol.array_bytes(self.rows_max)) // 4
        block = channel.block
        control = entry["control"]
        self.control = block.view(control, protocol.CONTROL_BYTES // 4, torch.int32)
        self.control64 = block.view(control, protocol.CONTROL_BYTES // 8, torch.int64)
        size = int(protocol.descriptor_bytes(self.rows_max)) * int(protocol.RING_DEPTH)
        self.descriptors = block.view(entry["descriptors"], size // 4, torch.int32)
        first, second = entry["arena_d"], entry["arena_g"]
        span = second + self.arena_pages * 4096 - first
        if second <= first:
            raise HookError("the channel's arenas are out of order")
        self.arena = block.view(first, span // 4, torch.int32)
        element = torch.empty((), dtype=image.element).element_size()
        self.arena_elements = block.view(first, span // element, image.element)
        self.arena_g_words = (second - first) // 4
        self.host_stats = block.view(entry["stats"], state.STATS_WORDS.value, torch.int64)
        at = entry["samples"]
        self.samples_written = block.view(at, 1, torch.int64)
        self.samples = block.view(
            at + protocol.SAMPLE_HEADER_BYTES, protocol.SAMPLE_CAPACITY, torch.int64
        )
        self.sample_threshold = channel.sample_threshold(ring)
        self.keys = _core.tag_key(image.image_id, image.generation)
        self._allocate(device, first_sequence)
        self.fault = FaultBlock(image.name, int(_core.rows_per_page(image.row_bytes)))
        self._fault_block = HostBlock(self.fault.memory, device)
        self.fault_words = self._fault_block.view(0, state.FAULT_WORDS, torch.int64)

    def _allocate(self, device: torch.device, first_sequence: int) -> None:
        words = torch.zeros(state.RING_WORDS, dtype=torch.int64)
        for word in (state.R_PUBLISHED, state.R_FILLED, state.R_RETIRED, state.R_READY):
            words[word.value] = first_sequence
        self.words = words.to(device)
        self.missed_at = torch.zeros(self.rows_max, dtype=torch.int32, device=device)
        self.missed_rows = torch.zeros(self.rows_max, dtype=torch.int64, device=device)
        lists = _LISTS * self.rows_max
        self.list_rows = torch.zeros(lists, dtype=torch.int64, device=device)
        self.list_slots = torch.zeros(lists, dtype=torch.int32, device=device)
        self.stats = torch.zeros(state.STATS_WORDS.value, dtype=torch.int64, device=device)

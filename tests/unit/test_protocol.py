"""The numbers of docs/protocol.md, as the core exports them."""

from __future__ import annotations

import re
from pathlib import Path

from tierd.io._core import protocol

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "tierd/io/_core/protocol.h").read_text()


def test_each_word_has_a_line_of_its_own() -> None:
    names = [
        "DOORBELL", "RETIRED", "WAITER", "DONE_D", "STATUS_D", "BEAT", "PARKED", "DRAINED",
        "DONE_G", "STATUS_G", "TENURE", "LEAVING",
    ]  # fmt: skip
    offsets = [getattr(protocol, f"OFFSET_{name}") for name in names]
    assert sorted(set(offsets)) == offsets
    assert all(offset % protocol.LINE_BYTES == 0 for offset in offsets)
    assert offsets[-1] + protocol.LINE_BYTES <= protocol.CONTROL_BYTES


def test_eight_status_words_fill_one_line() -> None:
    assert protocol.RING_DEPTH * 8 == protocol.LINE_BYTES


def test_constants_agree_with_the_header() -> None:
    for name, attribute in {
        "kChannelMagic": "CHANNEL_MAGIC",
        "kChannelAbi": "CHANNEL_ABI",
        "kRingDepth": "RING_DEPTH",
        "kRingsMax": "RINGS_MAX",
        "kChannelAbiOldest": "CHANNEL_ABI_OLDEST",
        "kRingFlagGpu": "RING_FLAG_GPU",
        "kRingFlagGuarded": "RING_FLAG_GUARDED",
    }.items():
        found = re.search(rf"{name} = (0x[0-9a-f]+|\d+)", HEADER)
        assert found is not None, name
        assert int(found.group(1), 0) == getattr(protocol, attribute), name


def test_descriptor_arrays_are_padded_to_lines() -> None:
    assert protocol.array_bytes(1) == 64
    assert protocol.array_bytes(17) == 128
    assert protocol.descriptor_bytes(16) == 64 + 3 * 64


def test_every_status_of_the_header_is_documented_by_name() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    body = HEADER.split("enum class Status")[1].split("};")[0]
    names = re.findall(r"^\s+(\w+) = \d+", body, re.MULTILINE)
    assert len(names) == 8
    assert [name for name in names if f"`{name}`" not in text] == []

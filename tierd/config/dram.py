"""Images that engines on this node read from its memory."""

from __future__ import annotations

from pydantic import Field

from tierd.config.section import Section


class DramSection(Section):
    """Tables on the dram tier (docs/operating/dram.md)."""

    images: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="MODEL/TABLE, or patterns such as 'v41/*.1.engram': each of them is loaded "
        "into memory, and the GPUs of engines that attach from then on read it there. Empty: none.",
    )

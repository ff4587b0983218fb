"""A device, and where the files of its daemon go."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass
class Node:
    """A device, and where its daemon's files go."""

    directory: Path
    device: Path

    @property
    def engine_socket(self) -> Path:
        return self.directory / "engine.sock"

    @property
    def api_socket(self) -> Path:
        return self.directory / "api.sock"

    @property
    def log(self) -> Path:
        return self.directory / "log"

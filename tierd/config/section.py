"""What every section of the configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of the sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

"""What a check of an installed engine found: for ``tierd hook check``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: what was looked at.
        problem: why it would be refused, and the cure; None if it would not.
        detail: what was found, for people.
    """

    what: str
    problem: str | None = None
    detail: str = ""

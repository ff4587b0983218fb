"""What an examination says: one finding each, with its cause, its evidence, and the one cure."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Severity = Literal["ok", "warning", "problem"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Attributes:
        check: such as ``io_uring``.
        subject: what it is about: a device, or "".
        severity: ok; warning: it works, worse than it could; problem: it does not work.
        finding: one line.
        cause: why it is so; "" when all is well.
        evidence: what was seen.
        cure: the one command that cures it; "" when there is nothing to cure.
    """

    check: str
    subject: str
    severity: Severity
    finding: str
    evidence: str
    cause: str = ""
    cure: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return dataclasses.asdict(self)


def fine(check: str, finding: str, evidence: str, *, subject: str = "") -> Finding:
    """Return a finding that needs no cure."""
    return Finding(check, subject, "ok", finding, evidence)

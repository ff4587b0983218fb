"""The daemon's log: structlog, one JSON object a line, or text for people on a terminal.

What libraries log through the standard library goes the same way. Values whose key says that
they are secret are masked, whoever logs them.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING

import structlog
import structlog.tracebacks

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

_SECRET = re.compile(r"token|secret|password|authorization|cookie", re.IGNORECASE)
MASK = "***"


def setup(level: str, log_format: str) -> None:
    """Configure logging of the process.

    Args:
        level: debug, info, warning or error.
        log_format: json, console, or auto: console on a terminal, JSON elsewhere.
    """
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        mask_secrets,
    ]
    render: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if console
        else [
            # Without local variables: they hold whatever the failing code was handling.
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(default=str),
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask the values of keys such as ``token``, also in nested dicts."""
    return {key: _mask(key, value) for key, value in event.items()}


def _mask(key: str, value: object) -> object:
    if isinstance(value, dict):
        return {inner: _mask(str(inner), item) for inner, item in value.items()}
    return MASK if _SECRET.search(key) else value

"""What a check of an installed engine found: for ``tierd hook check``."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from tierd.errors import HookError
from tierd.hook import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType


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


def entry_points(group: str, plugin: str, engine: str) -> Iterator[Finding]:
    """Look whether an engine can find our plugin, and which others there are.

    Others are no problem by themselves; who replaced what is seen in the sources.

    Args:
        group: the engine's group of entry points.
        plugin: our name in it.
        engine: its name, for people.
    """
    entries = importlib.metadata.entry_points(group=group)
    ours = [entry for entry in entries if entry.name == plugin]
    what = f"entry point {plugin} of {group}"
    if ours:
        yield Finding(what, None, ours[0].value)
    else:
        yield Finding(
            what,
            f"tierd is not installed for this Python, so {engine} cannot find its plugin; "
            f"install tierd into the environment of {engine}",
        )
    for entry in entries:
        if entry.name != plugin:
            yield Finding(f"plugin {entry.name}", None, f"{entry.value}, of somebody else")


def of_values(switches: Iterable[str], counts: Iterable[str]) -> Finding:
    """Look at what the environment says to the hook.

    Args:
        switches: an adapter's own variables that are 1 or 0.
        counts: and those that are numbers.
    """
    what = "values of TIERD_*"
    try:
        wanted = settings.current()
        for name in switches:
            settings.switch(name)
        for name in counts:
            settings.count(name, 1, what="rows" if "ROWS" in name else "ranks")
    except HookError as error:
        return Finding(what, str(error))
    return Finding(what, None, f"socket {wanted.socket}")


def of_module(
    name: str,
    parts: tuple[str, ...],
    problems: Callable[[ModuleType, tuple[str, ...]], Iterable[str]],
) -> Finding:
    """Import a module of an engine and look at parts of it.

    Args:
        name: of the module.
        parts: dotted names in it.
        problems: yields what is wrong with them.
    """
    try:
        module = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever an engine's import may raise
        text = f"{name} cannot be imported: {type(error).__name__}: {error}"
        return Finding(name, text.replace("\n", " "))
    try:
        found = list(problems(module, parts))
    except HookError as error:
        found = [str(error)]
    return Finding(name, "; ".join(found) or None, ", ".join(parts))

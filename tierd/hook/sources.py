"""Whether the parts of an engine that an adapter relies on are as they were when they were read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
from typing import TYPE_CHECKING, Any

from tierd.errors import TierdError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """The releases of an engine that were read.

    Attributes:
        engine: its name, as on its command line.
        package: what pip calls it.
        plugins: the environment variable that lists which plugins it loads.
        sources: release -> dotted name in its module -> digest of its source text.
        prefix: what the names in ``sources`` begin with besides, where modules share names.
    """

    engine: str
    package: str
    plugins: str
    sources: Mapping[str, Mapping[str, str]]
    prefix: str = ""

    def problems(self, found: str, module: ModuleType, names: Iterable[str]) -> Iterator[str]:
        """Yield which classes and functions are missing, replaced by somebody else, or changed.

        A release that was not checked, if it was let in at all, must have each as one of the
        checked releases has it.

        Args:
            found: the release that is installed.
            module: where the names are.
            names: dotted names of classes and functions.
        """
        sources = self.sources
        checked = [sources[found]] if found in sources else list(sources.values())
        for name in names:
            where = f"{module.__name__}.{name}"
            thing: Any = module
            for part in name.split("."):
                thing = getattr(thing, part, None)
            if thing is None:
                yield f"{self.engine} {found} has no {where}; run: tierd hook check {self.engine}"
                continue
            if found in sources and self.prefix + name not in sources[found]:
                yield (
                    f"{where} of {self.engine} {found} was not read, so what it holds is not "
                    f"served; run: pip install {self.package}=={max(sources)}"
                )
                continue
            owner = getattr(thing, "__module__", "")
            if owner != module.__name__:
                yield (
                    f"{where} was replaced by {owner}, another plugin perhaps; two cannot serve "
                    f"one table: set {self.plugins}=tierd, or unset TIERD"
                )
                continue
            try:
                actual = digest(thing)
            except (OSError, TypeError):
                actual = "no source"
            if actual not in {source.get(self.prefix + name) for source in checked}:
                release = found if found in sources else max(sources)
                yield (
                    f"{where} of {self.engine} {found} is not what tierd was checked with (source "
                    f"digest {actual}): patched, or another build; run: pip install "
                    f"--force-reinstall --no-deps {self.package}=={release}"
                )


def digest(thing: Any) -> str:
    """Return the first 12 hex digits of the sha256 of a class's or function's source text.

    They are the same under every Python, which those of a parsed tree would not be.
    """
    return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()[:12]


@contextlib.contextmanager
def or_exit(engine: str, command: str) -> Iterator[None]:
    """End the process with one line instead of letting an engine log an error and go on unserved.

    Args:
        engine: its name, for people.
        command: its name for ``tierd hook check``.
    """
    try:
        yield
    except TierdError as error:
        raise SystemExit(f"tierd: {error}") from None
    except Exception as error:
        raise SystemExit(
            f"tierd: the {engine} hook failed: {type(error).__name__}: {error}; "
            f"run: tierd hook check {command}"
        ) from error

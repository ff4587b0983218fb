"""Where values come from: a file, the environment, the command line; one layer each."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierd.config.explain import find_line
from tierd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PATH = Path("/etc/tierd/tierd.toml")
ENV_PREFIX = "TIERD__"
ENV_PATH = "TIERD_CONFIG"


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One origin of values.

    Attributes:
        origin: for people: a path, ``environment`` or ``command line``.
        values: section -> key -> value.
        text: the file's text, to find line numbers in; empty otherwise.
    """

    origin: str
    values: dict[str, Any]
    text: str = ""

    def has(self, section: str, key: str | None) -> bool:
        """Tell whether this layer gives the section, or the key in it."""
        if section not in self.values:
            return False
        inner = self.values[section]
        return key is None or (isinstance(inner, dict) and key in inner)

    def where(self, section: str, key: str | None) -> str:
        """Return the place of a key, as exactly as it is known."""
        if self.origin == "environment":
            name = ENV_PREFIX + section.upper() + (f"__{key.upper()}" if key else "")
            return f"environment variable {name}"
        line = find_line(self.text, section, key) if self.text else None
        return self.origin if line is None else f"{self.origin}:{line}"


def read_file(path: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, Layer | None]:
    """Read the file that was named, or the default one if it exists."""
    named = path or (Path(environ[ENV_PATH]) if environ.get(ENV_PATH) else None)
    chosen = named or DEFAULT_PATH
    try:
        text = chosen.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except FileNotFoundError:
        if named is None:
            return None, None
        raise ConfigError(
            f"{chosen}: no such configuration file; run: tierd config reference > {chosen}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{chosen}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{chosen}: not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # also numbers and nesting without end
        raise ConfigError(f"{chosen}: not valid TOML: {error}") from None
    return chosen, Layer(str(chosen), values, text)


def nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``section.key`` -> value into section -> key -> value; None values are left out."""
    values: dict[str, Any] = {}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if value is not None:
            values.setdefault(section, {})[key] = value
    return values


def place(layers: list[Layer], section: str, key: str, otherwise: str) -> str:
    """Return where the winning value of a key stands."""
    return next((x.where(section, key) for x in layers if x.has(section, key)), otherwise)

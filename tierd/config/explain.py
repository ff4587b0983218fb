"""Words for what is wrong with a value, and the line where it stands."""

from __future__ import annotations

import re

# What a key's last part says about its unit, and how many of it other spellings mean.
_UNIT_WORDS: dict[str, tuple[str, dict[str, float]]] = {
    "us": ("microseconds", {"us": 1, "ms": 1_000, "s": 1_000_000}),
    "ms": ("milliseconds", {"us": 0.001, "ms": 1, "s": 1_000, "min": 60_000}),
    "s": ("units a second", {"/s": 1}),
}


def wrong_unit(key: str, value: object) -> str | None:
    """Say how a number with a unit ("2s") has to be written; None if it is no such thing."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]+)\s*", str(value))
    if match is None or not isinstance(value, str):
        return None
    plain, known = _UNIT_WORDS.get(key.rpartition("_")[2], ("", {}))
    number = float(match[1]) * known.get(match[2], 0.0)
    if plain and number:
        return f"a plain number is wanted, in {plain}; write {key} = {number:.0f}"
    return "a plain number is wanted, without a unit; run: tierd config reference"


def find_line(text: str, section: str, key: str | None) -> int | None:
    """Return the line of a key, for the plain TOML that people write; None when unsure."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            current = heading[1]
            if current == section and key is None:
                return number
        elif assigned := re.match(r"\s*([\w.-]+)\s*=", line):
            dotted = f"{current}.{assigned[1]}" if current else assigned[1]
            if dotted == (f"{section}.{key}" if key is not None else section):
                return number
    return None

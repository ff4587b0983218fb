"""The shell commands that the pages show, as somebody who follows a page would type them.

A block that is indented by four spaces (or fenced as ``sh``) is one of commands when each of its
lines begins with a program; all else (layouts, Python, TOML) is none. HTML comments before a block
say what a page's reader would know, and are not shown:

    <!-- not run: REASON -->                the next block cannot run here
    <!-- not run COMMAND: REASON -->        likewise, those of its commands that begin so
    <!-- first: COMMAND -->                 done before the next block: what the reader has already
    <!-- with NAME=COMMAND -->              NAME in the next block's commands is what COMMAND prints
    <!-- until killed: COMMAND -->          a command of the next block that goes on until Ctrl-C
    <!-- exits N: COMMAND -->               a command of the next block that is shown to fail
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"docs/cli.md", "docs/config.md", "docs/metrics.md", "docs/rest.md"}
PROGRAMS = {
    *("tierd", ".venv/bin/tierd", "/opt/tierd/bin/tierd", "python", "python3", "make", "pip"),
    *("curl", "cp", "ln", "chown", "chmod", "truncate", "losetup", "mkdir", "install", "openssl"),
    *(
        "systemctl",
        "systemd-sysusers",
        "journalctl",
        "udevadm",
        "docker",
        "podman",
        "ssh",
        "ulimit",
    ),
    *("sysctl", "mount", "umount", "mkfs.ext4", "promtool", "export", "sudo", "(umask", "kill"),
    *("/opt/tierd/bin/pip",),
}
_COMMENT = re.compile(
    r"<!-- (?P<kind>not run|first|with|until killed|exits \d+)(?P<what>.*?) -->", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        text: as the page shows it, without what goes on behind a ``#``; lines may be joined.
        reason: why it cannot be run here; "".
        endless: it goes on until it is killed.
        code: with which it is shown to exit.
    """

    page: str
    line: int
    text: str
    reason: str = ""
    endless: bool = False
    code: int = 0


@dataclasses.dataclass
class Block:
    """Commands that stand together, and what their reader has done before."""

    page: str
    line: int
    commands: list[Command]
    first: list[str]
    values: dict[str, str]


def pages() -> list[Path]:
    """Every page that is written by hand."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path.relative_to(ROOT).as_posix() not in GENERATED]


def blocks(path: Path) -> list[Block]:
    """The blocks of commands of a page, in order."""
    page = path.relative_to(ROOT).as_posix()
    lines = path.read_text().splitlines()
    found, comments, at = [], "", 0
    while at < len(lines):
        line = lines[at]
        if line.lstrip().startswith("<!-- "):
            while "-->" not in lines[at]:
                comments += lines[at] + " "
                at += 1
            comments += lines[at] + "\n"
            at += 1
        elif line.startswith(("    ", "```sh")):
            begin, code, at = _code(lines, at)
            block = _block(page, begin, code, comments)
            if block is not None:
                found.append(block)
            comments = ""
        else:
            if line.strip():
                comments = ""
            at += 1
    return found


def _code(lines: list[str], at: int) -> tuple[int, list[str], int]:
    """Return where a block's code begins (from 1), its lines, and where the text goes on."""
    if lines[at].startswith("```"):
        end = lines.index("```", at + 1)
        return at + 2, lines[at + 1 : end], end + 1
    end = at
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
        end += 1
    return at + 1, [line[4:] for line in lines[at:end]], end


def _block(page: str, line: int, code: list[str], comments: str) -> Block | None:
    """Return the block, None if it is none of commands."""
    typed: list[tuple[int, str]] = []
    for number, text in enumerate(code, line):
        if typed and typed[-1][1].endswith("\\"):
            typed[-1] = (typed[-1][0], typed[-1][1][:-1] + text.strip())
        elif text.strip():
            typed.append((number, text.strip()))
    if not typed or not all(_first_word(text) in PROGRAMS for _, text in typed):
        return None
    block = Block(page, line, [], [], {})
    marks: list[tuple[str, str]] = []
    for found in _COMMENT.finditer(comments):
        kind, what = found["kind"], " ".join(found["what"].split())
        if kind == "first":
            block.first.append(what.removeprefix(": "))
        elif kind == "with":
            name, _, value = what.partition("=")
            block.values[name] = value
        else:
            marks.append((kind, what))
    block.commands = [_command(page, number, _bare(text), marks) for number, text in typed]
    return block


def _command(page: str, line: int, text: str, marks: list[tuple[str, str]]) -> Command:
    reason, endless, code = "", False, 0
    for kind, what in marks:
        prefix, _, rest = what.partition(": ") if kind == "not run" else ("", "", what)
        if kind == "not run" and text.startswith(prefix.removeprefix(":").strip()):
            reason = rest or what.removeprefix(": ")
        elif kind == "until killed" and text.startswith(rest.removeprefix(": ")):
            endless = True
        elif kind.startswith("exits") and text.startswith(rest.removeprefix(": ")):
            code = int(kind.split()[1])
    return Command(page, line, text, reason, endless, code)


def _first_word(text: str) -> str:
    return text.split(maxsplit=1)[0]


def _bare(text: str) -> str:
    """Return a line without its remark, which stands behind two spaces and a #, or one."""
    return re.sub(r"\s+# .*$", "", text)

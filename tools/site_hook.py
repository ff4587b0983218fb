"""Hooks of mkdocs: the README is the first page; files beside docs/ that pages name come along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("etc", "deploy", "systemd")
_LINK = re.compile(r"\]\((?:\.\./)+((?:etc|deploy|systemd)/[^)#]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the first page and the files that pages name."""
    text = (ROOT / "README.md").read_text()
    index = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "index.md", content=index))
    for folder in OUTSIDE:
        for path in sorted((ROOT / folder).iterdir()):
            name = f"files/{folder}/{path.name}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to the files that came along."""
    up = "../" * page.file.src_uri.count("/")
    return _LINK.sub(lambda found: f"]({up}files/{found[1]})", markdown)

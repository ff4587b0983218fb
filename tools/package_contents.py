"""Refuse packages that carry what they should not, or lack what they need: ``DIRECTORY``."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

WHEEL_NEEDS = {
    "tierd/cli/__init__.py",
    "tierd/api/dashboard/index.html",
    "tierd/api/dashboard/main.js",
    "tierd/py.typed",
    "tierd/hook/site/sitecustomize.py",
    "tierd/io/_core/_native/__init__.pyi",
}
SDIST_NEEDS = {
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "etc/tierd.toml",
    "tests/conftest.py",
    "tierd/io/_core/pump.cc",
}
NEVER = {".so", ".pyc"}  # in an sdist
WHEEL_SUFFIXES = {".py", ".pyi", ".so", ".typed", ".js", ".css", ".html", ".svg", ".sql"}


def wheel_faults(path: Path) -> list[str]:
    """Return what is wrong with the wheel at ``path``."""
    listed = zipfile.ZipFile(path).namelist()
    names = [n for n in listed if ".dist-info/" not in n and not n.endswith("/")]
    faults = [f"lacks {name}" for name in WHEEL_NEEDS - set(names)]
    faults += [f"carries {n}" for n in names if PurePosixPath(n).suffix not in WHEEL_SUFFIXES]
    faults += [f"carries {n}" for n in names if n.split("/")[0] not in {"tierd", "tierd.libs"}]
    if sum(name.endswith(".so") for name in names) != 1:
        faults.append("has not one native module")
    if "manylinux" not in path.name:
        faults.append("is for this machine only")
    return faults


def sdist_faults(path: Path) -> list[str]:
    """Return what is wrong with the sdist at ``path``."""
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    faults = [f"lacks {name}" for name in SDIST_NEEDS - names]
    return faults + [f"carries {n}" for n in sorted(names) if PurePosixPath(n).suffix in NEVER]


def main() -> None:
    """Print every fault and fail, or say nothing."""
    directory = Path(sys.argv[1])
    checks = {"*.whl": wheel_faults, "*.tar.gz": sdist_faults}
    faults = []
    for pattern, check in checks.items():
        paths = list(directory.glob(pattern))
        if len(paths) != 1:
            faults.append(f"{directory}: {len(paths)} files of {pattern}")
        faults += [f"{path.name} {fault}" for path in paths for fault in check(path)]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()

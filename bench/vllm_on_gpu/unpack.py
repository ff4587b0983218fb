"""python unpack.py FOLDER SITE: make a site directory of what build.sh has packed. Stands alone."""

from __future__ import annotations

import lzma
import shutil
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def unpack(packed: Path, site: Path) -> None:
    """An archive goes into the site; a library has its place there in its name, + for /."""
    if packed.name.endswith(".tar.xz"):
        with lzma.open(packed) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            archive.extractall(site, filter="fully_trusted")
        return
    target = site / packed.name.removesuffix(".xz").replace("+", "/")
    target.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(packed) as plain, target.open("wb") as file:
        shutil.copyfileobj(plain, file, 1 << 22)


def main() -> None:
    folder, site = map(Path, sys.argv[1:])
    site.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(8) as pool:
        for job in [pool.submit(unpack, path, site) for path in sorted(folder.glob("*.xz"))]:
            job.result()


if __name__ == "__main__":
    main()

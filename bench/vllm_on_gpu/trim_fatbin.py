"""python trim_fatbin.py SOURCE TARGET: zero a library's machine code for GPUs other than Hopper.

A library of vLLM's wheel holds code for every GPU since Turing. Zeroed in place, what is not for
sm_90 compresses to nothing and everything else stays where it was. A container without code for
sm_90 keeps its newest PTX up to that. The layout is that of section .nv_fatbin: containers of a
magic, version, header size and size, each with entries of a kind (1 PTX, 2 machine code), sizes
and the architecture.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

ARCHITECTURE, PTX, CODE = 90, 1, 2
MAGIC = 0xBA55ED50


def sections(library: bytearray) -> list[tuple[int, int]]:
    """(start, end) of the sections named .nv_fatbin of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, table + i * size) for i in range(count)]
    found = []
    for header in headers:
        start = headers[names][4] + header[0]
        if library[start : library.index(0, start)] == b".nv_fatbin":
            found.append((header[4], header[4] + header[5]))
    return found


def entries(library: bytearray, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """(kind, architecture, start, size) of a container's entries."""
    found = []
    while start < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, start)
        _, _, _, _, architecture = struct.unpack_from("<IIHHI", library, start + 16)
        found.append((kind, architecture, start + header, size))
        start += header + size
    assert start == end, (start, end)
    return found


def trim(library: bytearray) -> None:
    for start, end in sections(library):
        at = start
        while at < end:
            if struct.unpack_from("<I", library, at)[0] != MAGIC:
                at += 8
                continue
            _, header, size = struct.unpack_from("<HHQ", library, at + 4)
            held = entries(library, at + header, at + header + size)
            kept = [one for one in held if one[:2] == (CODE, ARCHITECTURE)]
            usable = [one for one in held if one[0] == PTX and one[1] <= ARCHITECTURE]
            if not kept and usable:
                kept = [max(usable, key=lambda one: one[1])]
            for one in held:
                if one not in kept:
                    library[one[2] : one[2] + one[3]] = bytes(one[3])
            at += header + size


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    library = bytearray(source.read_bytes())
    trim(library)
    target.write_bytes(library)


if __name__ == "__main__":
    main()

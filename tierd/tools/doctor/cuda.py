"""``python -m tierd.tools.doctor.cuda``: registers host memory and prints one JSON object.

By ctypes, so that it needs neither torch nor a toolkit.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from typing import Any

SIZES = {"1 MiB": 1 << 20, "1 GiB": 1 << 30, "3 GiB": 3 << 30}
_PORTABLE_MAPPED = 1 | 2


def look() -> dict[str, Any]:
    """Return the driver's version and each size's result (0, or a CUDA error)."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"driver": None, "evidence": str(error), "sizes": {}}
    if (result := cuda.cuInit(0)) != 0:
        return {"driver": None, "evidence": f"cuInit answers {result}", "sizes": {}}
    version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    for result in (
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        cuda.cuCtxSetCurrent(context),
    ):
        if result != 0:
            text = f"no context on GPU 0: error {result}"
            return {"driver": None, "evidence": text, "sizes": {}}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {name: _register(cuda, size) for name, size in SIZES.items() if size < free // 2}
    return {"driver": version.value, "evidence": "", "sizes": sizes}


def _register(cuda: ctypes.CDLL, size: int) -> int:
    area = mmap.mmap(-1, size)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    result = int(cuda.cuMemHostRegister_v2(address, ctypes.c_size_t(size), _PORTABLE_MAPPED))
    if result == 0:
        cuda.cuMemHostUnregister(address)
    return result


if __name__ == "__main__":
    print(json.dumps(look()))

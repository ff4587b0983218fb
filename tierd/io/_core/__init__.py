"""The native core (C++20): pages, rings, pumps and the CPU twin.

The sources lie beside this file; ``_native`` is what they are built into.
"""

from tierd.io._core._native import *  # noqa: F403
from tierd.io._core._native import protocol as protocol

"""What systemd wants to hear of a service with Type=notify: sd_notify(3), in thirty lines.

The packages that wrap it either bring a C library (systemd-python) or have not been looked after
for years (sdnotify); a datagram to a socket is all it is.
"""

from __future__ import annotations

import contextlib
import os
import socket


def listens() -> bool:
    """Tell whether somebody started us as a service that notifies."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(state: str) -> None:
    """Send lines such as ``READY=1``. Never fails: nobody may listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)  # a manager that does not read must not stop the daemon
        sock.connect(address)
        sock.sendall(state.encode())


def watchdog_s() -> float:
    """Return how long systemd waits for a sign of life, seconds; 0 if it does not."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isdecimal() else 0.0

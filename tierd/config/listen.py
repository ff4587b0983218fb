"""Where the daemon listens on TCP, and which of it would let strangers in."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierd.config import ApiSection, MetricsSection


def parse_listen(key: str, text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; IPv6 as ``[::1]:9468``.

    Raises:
        ValueError: it is something else; the text names the key.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise ValueError(f"{key}: {text!r} is not HOST:PORT, such as 127.0.0.1:9468")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach the address. A name other than localhost: no."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listeners(api: ApiSection, metrics: MetricsSection) -> None:
    """Refuse TCP sockets that would let strangers in.

    Raises:
        ValueError: one line that names the keys.
    """
    if metrics.listen:
        parse_listen("metrics.listen", metrics.listen)
    if bool(api.tls_certificate) != bool(api.tls_key):
        raise ValueError("api.tls_certificate and api.tls_key are needed together")
    if not api.listen:
        return
    host, _ = parse_listen("api.listen", api.listen)
    if not api.token_file:
        raise ValueError(
            f"api.listen = {api.listen!r}: a TCP socket needs a token, or any user of the machine "
            "could change everything; set api.token_file; "
            "run: (umask 077; openssl rand -hex 32 > /etc/tierd/token)"
        )
    if not is_loopback(host) and not api.tls_certificate:
        raise ValueError(
            f"api.listen = {api.listen!r} can be reached from other machines, so the token would "
            "cross the network in the clear; set api.tls_certificate and api.tls_key, or listen "
            "on 127.0.0.1"
        )

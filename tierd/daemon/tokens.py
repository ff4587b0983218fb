"""Files that hold a bearer token: this node's own, and one of its peers'."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tierd.errors import ConfigError

TOKEN_BYTES_MIN = 16


def read_token(key: str, name: str, *, cure: str = "") -> bytes:
    """Return the token in a file that only its owner may read.

    Args:
        key: of the configuration, for people.
        name: the file.
        cure: what helps if there is none; empty: a new one is made.

    Raises:
        ConfigError: it cannot be read, others can read it, it is too short or not one word.
    """
    path = Path(name)
    cure = cure or f"run: (umask 077; openssl rand -hex 32 > {path})"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}; {cure}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{key}: {path} has mode {stat.S_IMODE(mode):04o}, so others may read the "
            f"token; run: chmod 600 {path}"
        )
    if len(token) < TOKEN_BYTES_MIN:
        raise ConfigError(
            f"{key}: {path} holds {len(token)} characters, a token has at least "
            f"{TOKEN_BYTES_MIN}; {cure}"
        )
    # It goes into a header, whose errors quote it.
    if any(not 0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(
            f"{key}: {path} holds something else than one token: spaces, several lines or "
            f"characters that are not ASCII; {cure}"
        )
    return token

"""``tierd run -- COMMAND``: run a command with the engine hook switched on.

Nothing of the command is changed but its environment: ``TIERD=1``, where the daemon listens, and a
``sitecustomize`` in front of ``PYTHONPATH`` that every Python the command starts will import. Then
this process becomes the command, so signals and the exit code are its own.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tierd.errors import HookError
from tierd.gpu import client
from tierd.hook import autostart, settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DAEMON_WAIT_S = 5.0
"""A daemon that is just being started is waited for; one that is not there is said so soon."""

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_SITE = _PACKAGE_ROOT / "tierd" / "hook" / "site"


def run(
    command: Sequence[str],
    *,
    socket: str | None = None,
    model: str | None = None,
    wait_s: float = DAEMON_WAIT_S,
) -> NoReturn:
    """Become the command.

    Args:
        command: program and arguments.
        socket: the daemon's engine socket; None takes ``TIERD_SOCKET`` or the default.
        model: serve the tables staged under this name only; None takes ``TIERD_MODEL`` or any.
        wait_s: how long to wait for the daemon, seconds.

    Raises:
        HookError: there is no such program.
        AttachError: no daemon answers.
    """
    program = shutil.which(command[0])
    if program is None:
        raise HookError(f"{command[0]}: no such program; run: tierd run -- python script.py")
    environment = environment_of(os.environ, socket=socket, model=model)
    client.list_images(environment["TIERD_SOCKET"], environment.get("TIERD_MODEL"), wait_s=wait_s)
    os.execve(program, list(command), environment)  # noqa: S606 - its whole work


def environment_of(
    environ: Mapping[str, str], *, socket: str | None = None, model: str | None = None
) -> dict[str, str]:
    """Return the environment of a command that this process is about to become."""
    path = [str(_SITE)]
    # An installed tierd is found by the command's Python, or is not for it. A checkout has to be
    # pointed to; its directory holds nothing else that could be imported by mistake.
    if _PACKAGE_ROOT.name not in {"site-packages", "dist-packages"}:
        path.append(str(_PACKAGE_ROOT))
    path += [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    made = {
        **environ,
        "TIERD": "1",
        "TIERD_SOCKET": str(
            Path(socket or environ.get("TIERD_SOCKET") or settings.DEFAULT_SOCKET).absolute()
        ),
        autostart.RUN_PID: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }
    if model is not None:
        made["TIERD_MODEL"] = model
    return made

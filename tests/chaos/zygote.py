"""Starts daemons and engines by forking, with everything imported: a second apiece is too long.

    python -m tests.chaos.zygote [VERSION]

reads one JSON object a line ({"what": "serve" or "engine", "words": [...], "log": PATH,
"notify": PATH}) and answers with the pid of a process that runs ``tierd serve`` or an engine with
these words.
VERSION makes it a tierd of another version, for upgrades.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

import tierd

if len(sys.argv) > 1:
    tierd.__version__ = sys.argv[1]

from tests.chaos import engine
from tierd.api import server
from tierd.cli import cli, serving
from tierd.daemon import service

PRELOADED = (serving, service, server)
PR_SET_PDEATHSIG = 1


def run(order: dict[str, Any], parent: int) -> None:
    """Be the process that was ordered."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["NOTIFY_SOCKET"] = order.get("notify", "")
    if order["what"] == "engine":
        engine.main(*order["words"])
    else:
        cli.main(order["words"], prog_name="tierd")


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    print("ready", flush=True)
    parent = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(json.loads(line), parent)
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()

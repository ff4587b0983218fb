"""Inside one machine: an exporting process starts, is read, and ends, again and again.

    python -m tests.lab.rdma.cycles 200

The process registers its memory and makes queue pairs as the daemon does; every second one is
killed, the others end by themselves. Prints what the kernel has left of it as one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time

import numpy as np

from tests.lab.rdma.objects import objects
from tests.unit.pump_rig import PAGE, Image
from tierd.io import _core, verbs

QUEUE_PAIRS = 2


def exporter(names: list[tuple[int, int]], data: np.ndarray, answer: int, hold: int) -> None:
    """The child: export, say where, and stay until the parent closes its end."""
    port = verbs.find_port()
    context = verbs.open_context(port)
    export = verbs.register(context, data)
    responder = _core.VerbsResponder(context, QUEUE_PAIRS)
    responder.connect(queue_pairs=names, **verbs.agree(port, port).for_core())
    os.write(answer, json.dumps([responder.names, export.places]).encode())
    os.read(hold, 1)
    os._exit(0)


def cycle(number: int, image: Image) -> bool:
    """One exporting process; whether its pages were right."""
    port = verbs.find_port()
    context = verbs.open_context(port)
    link = _core.VerbsLink(context, QUEUE_PAIRS, 64, 5_000_000_000)
    names = link.names
    answer, said = os.pipe()
    hold, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        exporter(names, image.data.reshape(-1).copy(), said, hold)
    os.close(said)
    os.close(hold)
    theirs, places = json.loads(os.read(answer, 65536))
    link.connect(queue_pairs=[tuple(n) for n in theirs], **verbs.agree(port, port).for_core())
    first, count, address, key = places[0]
    pages = [(first + number * 7 + n) % count for n in range(16)]
    out = np.zeros(16 * PAGE, np.uint8)
    link.probe([(address + page * PAGE, key) for page in pages], out)
    right = np.array_equal(out.reshape(16, PAGE), image.data[pages])
    if number % 2:
        os.kill(child, signal.SIGKILL)
    os.close(go)
    os.close(answer)
    os.waitpid(child, 0)
    return right


def main() -> None:
    count = int(sys.argv[1])
    image = Image.make(64)
    verbs.find_port()
    before = objects()
    right = 0
    for number in range(count):
        right += cycle(number, image)
        if number % 10 == 0:
            print(f"cycle {number}, {time.monotonic():.1f} s", flush=True)
    gc.collect()
    after = objects()
    left = {kind: after.get(kind, 0) - number for kind, number in before.items()}
    leaked = sum(max(0, number) for number in left.values())
    print(json.dumps({"cycles": count, "right": right, "leaked": leaked, "left": left}))


if __name__ == "__main__":
    main()

"""The pump, the guardian, restarts, removals, and kernels that refuse io_uring or memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.halted import halted
from tests.unit.pump_rig import Client, Image, P, Served

IMAGE = Image.make(400)
TRANSPORTS = ["io_uring", "threads"]
DAEMON, GUARDIAN = 0, 1


def spin_until(word: np.ndarray, value: int) -> None:
    while word[0] != value:
        pass


def answer_as_guardian(client: Client, sequence: int) -> None:
    """Say `ok` from arena G (its pages do not matter here)."""
    control = client.channel.control(0)
    status = control[P.OFFSET_STATUS_G : P.OFFSET_STATUS_G + 64].view(np.uint64)
    status[sequence % P.RING_DEPTH] = sequence << 32 | int(P.Status.ok)
    client.word(P.OFFSET_DONE_G)[0] = sequence


@pytest.fixture(params=TRANSPORTS)
def served(request: pytest.FixtureRequest, tmp_path: Path):
    made = Served(tmp_path / "image", IMAGE, transport=request.param, spin_us=0)
    yield made
    made.pump.stop()


def test_a_taken_ring_is_left_alone_and_taken_up_again(served: Served) -> None:
    client, other = served.client(), served.client()
    for round_ in range(3):
        epoch = 2 * round_
        client.read([1, 2])
        done = int(client.word(P.OFFSET_DONE_D)[0])
        client.set_tenure(GUARDIAN, epoch + 1)
        spin_until(client.word(P.OFFSET_DRAINED), epoch + 1)
        sequence = client.publish([3])
        other.read([5])  # the pump goes round, for others
        assert client.word(P.OFFSET_DONE_D)[0] == done
        (ring,) = [r for r in served.pump.stats()["rings"] if r["channel"] == client.number]
        assert (ring["serving"], ring["takeovers"]) == (False, round_ + 1)
        answer_as_guardian(client, sequence)
        assert client.wait(sequence) == P.Status.ok
        client.ring.retire(sequence)
        left = client.publish([4])  # outstanding at the hand-back
        client.set_tenure(DAEMON, epoch + 2)
        client.finish(left, [4])
        assert client.word(P.OFFSET_DONE_D)[0] == left  # stepped over the guardian's


def test_taken_with_reads_in_flight(served: Served) -> None:
    client = served.client(rows_max=200, arena_pages=1600)
    rng = np.random.default_rng(1)
    epoch = interrupted = 0
    for _ in range(8):
        asked = [rng.integers(0, IMAGE.pages, 200) for _ in range(P.RING_DEPTH)]
        sequences = [client.publish(pages) for pages in asked]
        epoch += 1
        client.set_tenure(GUARDIAN, epoch)
        spin_until(client.word(P.OFFSET_DRAINED), epoch)
        (ring,) = served.pump.stats()["rings"]
        assert ring["in_flight"] == 0
        interrupted += client.word(P.OFFSET_DONE_D)[0] < sequences[-1]
        epoch += 1
        client.set_tenure(DAEMON, epoch)
        for sequence, pages in zip(sequences, asked, strict=True):
            client.finish(sequence, pages)
    assert interrupted > 0


def test_a_parked_pump_notices_a_take_over_without_being_rung(served: Served) -> None:
    client = served.client()
    client.set_tenure(GUARDIAN, 1)
    spin_until(client.word(P.OFFSET_DRAINED), 1)
    beat = int(client.word(P.OFFSET_BEAT)[0])
    while client.word(P.OFFSET_BEAT)[0] == beat:  # a hand-back wants to see it move
        pass


def test_a_new_daemon_goes_on_where_the_old_one_stopped(tmp_path: Path) -> None:
    first = Served(tmp_path / "image", IMAGE)
    client = first.client(first_sequence=2**32 - 3)
    client.read([1])
    first.pump.stop()
    waiting = [client.publish([page]) for page in (2, 3, 4, 5)]
    second = Served(tmp_path / "image", IMAGE)
    client.attach(second)
    for sequence, page in zip(waiting, (2, 3, 4, 5), strict=True):
        client.finish(sequence, [page])
    assert second.pump.stats()["requests"] == 4
    second.pump.stop()


def test_a_new_daemon_waits_for_the_guardian(tmp_path: Path) -> None:
    first = Served(tmp_path / "image", IMAGE)
    client = first.client()
    client.read([1])
    first.pump.stop()
    client.set_tenure(GUARDIAN, 1)
    answered = client.publish([2])
    answer_as_guardian(client, answered)
    left = client.publish([3])
    second = Served(tmp_path / "image", IMAGE)
    client.attach(second)
    assert client.word(P.OFFSET_DRAINED)[0] == 1  # its devices are open: nothing can land any more
    assert second.pump.stats()["rings"][0]["serving"] is False
    client.set_tenure(DAEMON, 2)
    client.ring.retire(answered)
    client.finish(left, [3])
    assert second.pump.stats()["requests"] == 1
    second.pump.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["remove", "stop"])
def test_removal_answers_what_is_outstanding(tmp_path: Path, transport: str, how: str) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport, queue_depth=8)
    client, other = served.client(rows_max=200, arena_pages=1600), served.client()
    rng = np.random.default_rng(2)
    asked = [rng.integers(0, IMAGE.pages, 200) for _ in range(P.RING_DEPTH)]
    sequences = [client.publish(pages) for pages in asked]
    if how == "remove":
        served.pump.remove_channel(client.number)
        other.read([1, 2, 3])
    else:
        served.pump.stop()
    assert client.word(P.OFFSET_PARKED)[0] == 0
    statuses = [client.wait(s) for s in sequences]
    assert set(statuses) <= {P.Status.ok, P.Status.cancelled}
    assert statuses == sorted(statuses)  # in order: none is ok behind a cancelled one
    assert statuses[-1] == P.Status.cancelled
    stats = served.pump.stats()
    assert stats["in_flight"] == 0
    assert stats["failed"]["cancelled"] == statuses.count(P.Status.cancelled)
    for sequence, status, pages in zip(sequences, statuses, asked, strict=True):
        if status == P.Status.ok:
            client.finish(sequence, pages)
    served.pump.stop()


def test_a_pump_that_stands_still_does_not_take_its_callers_along(served: Served) -> None:
    client, other = served.client(), served.client()
    with halted("tierd-pump"):
        assert not served.pump.remove_channel(client.number, timeout_ms=1)
        assert not served.pump.remove_channel(client.number, timeout_ms=1)
        assert not served.pump.stop(timeout_ms=1)
    assert served.pump.remove_channel(client.number)
    assert served.pump.remove_channel(other.number)
    with halted("tierd-pump"):
        assert not served.pump.stop(timeout_ms=1)  # with nobody to wait for either
    assert served.pump.stop()


def test_a_client_that_vanishes_harms_nobody(served: Served) -> None:
    keeper = served.client()
    for i in range(10):
        guest = served.client()
        number = guest.number
        guest.publish(list(range(30)))
        del guest  # its memfd is closed and unmapped; the pump's mapping stays
        keeper.read([i])
        served.pump.remove_channel(number)
    assert len(served.pump.stats()["rings"]) == 1


def test_calls_from_many_threads(served: Served) -> None:
    keeper = served.client()
    failures: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for i in range(15):
                client = served.client()
                client.read([i])
                served.pump.stats()
                served.pump.remove_channel(client.number)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        keeper.read([7, 8])
    for thread in threads:
        thread.join()
    assert failures == []


# --- what the kernel refuses ---------------------------------------------------------------------

CHILD = """
import ctypes, json, os, resource, sys
from pathlib import Path
from tests.unit.pump_rig import Image, Served
from tierd.io import _core

def refuse(syscalls, error):
    # A seccomp filter as a container or systemd would set it: these calls answer `error`.
    import struct
    code = [(0x20, 0, 0, 0)]  # load the system call's number
    for i, number in enumerate(syscalls):
        code.append((0x15, len(syscalls) - i, 0, number))
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | error)]
    program = b"".join(struct.pack("HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(program)
    fprog = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(fprog), 0, 0) == 0, ctypes.get_errno()

image = Image.make(50)
path = Path(sys.argv[1])
exec(sys.argv[2])
served = Served(path, image)
client = served.client(arena_pages=4096)
client.read([1, 2, 3])
refused = ""
try:
    _core.Pump(transport="io_uring")
except RuntimeError as error:
    refused = str(error)
print(json.dumps({**served.pump.stats(), "refused": refused}, default=bytes.hex))
served.pump.stop()
"""


def in_a_child(prepare: str) -> dict[str, Any]:
    """Serve a small image in a fresh process after `prepare`; returns the pump's statistics."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # the child may be nobody
        path = Path(directory, "image")
        path.write_bytes(Image.make(50).data.tobytes())
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(path), prepare],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


SETUP, ENTER, REGISTER = 425, 426, 427


@pytest.mark.parametrize(
    ("calls", "error", "words"),
    [
        ([SETUP], "EPERM", ["io_uring_setup refused (EPERM)", "seccomp filter forbids"]),
        ([SETUP], "ENOSYS", ["io_uring_setup refused (ENOSYS)", "seccomp filter hides"]),
        ([SETUP], "ENOMEM", ["io_uring_setup refused (ENOMEM)", "LimitMEMLOCK"]),
        ([ENTER], "EPERM", ["io_uring_enter refused (EPERM)", "seccomp"]),
        ([REGISTER], "EPERM", ["io_uring_register refused (EPERM)", "seccomp"]),
        ([SETUP, ENTER, REGISTER], "EPERM", ["io_uring_setup refused", "seccomp"]),
    ],
)
def test_without_io_uring_threads_serve_and_say_why(
    calls: list[int], error: str, words: list[str]
) -> None:
    stats = in_a_child(f"import errno; refuse({calls}, errno.{error})")
    assert stats["transport"] == "threads"
    for word in words:
        assert word in stats["transport_reason"]
    assert stats["refused"] == stats["transport_reason"]  # asked for by name, it refuses
    assert stats["pages"] == 3


def test_without_memlock_reads_are_plain_and_say_why() -> None:
    prepare = (
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
        "os.getuid() == 0 and (os.setgroups([]), os.setgid(65534), os.setuid(65534))"
    )
    stats = in_a_child(prepare)
    assert stats["transport"] == "io_uring"
    assert "fixed buffers refused (ENOMEM)" in stats["transport_reason"]
    assert "RLIMIT_MEMLOCK is 64 KiB; raise LimitMEMLOCK=" in stats["transport_reason"]
    assert stats["pages"] == 3


ENGINE = """
import gc
import sys
from pathlib import Path

from tests.unit.pump_rig import Image, Served
from tierd.gpu import keeper

keeper.STOP_MS = 50
# Its read comes back after 15 minutes.
served = Served(Path(sys.argv[1]), Image.make(50), transport="threads", play_base_us=900e6)
client = served.client()
client.publish([3])
while not served.pump.stats()["in_flight"]:
    pass
keeper.end_guardian(served.pump)
del served.pump
gc.collect()
"""


def test_an_engine_ends_although_a_read_of_its_guardian_hangs(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", ENGINE, str(tmp_path / "image")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
        timeout=50,
    )

"""What is done to daemons and engines. Each fault ends with a daemon and an engine that work."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.world import World

SLOW_MS = 200


def sigkill(world: World) -> None:
    """The daemon is killed; the next one starts a moment later."""
    world.kill_daemon()
    time.sleep(world.chance.random() * 0.1)
    if world.chance.random() < 0.5:
        world.goes_on_alone()
    world.start_daemon()


def sigterm(world: World) -> None:
    """An orderly stop, some steps without a daemon, and a start."""
    world.stop_daemon()
    world.goes_on_alone()
    world.start_daemon()


def restart(world: World) -> None:
    """An orderly stop, and a start at once."""
    world.stop_daemon()
    world.start_daemon()


def upgrade(world: World) -> None:
    """A restart with another version, and back."""
    for version in ("next", "this"):
        world.stop_daemon()
        world.start_daemon(version=version)
        world.goes_on()


def sigstop(world: World) -> None:
    """The daemon stands still for longer than it may, and goes on."""
    assert world.daemon is not None
    world.daemon.send(signal.SIGSTOP)
    if world.chance.random() < 0.5:
        world.goes_on_alone()
    time.sleep(world.stop_s)
    world.daemon.send(signal.SIGCONT)


def slow_kill(world: World) -> None:
    """Reads take 200 ms, the daemon is killed among them, and its pages are used again."""
    assert world.slow is not None
    world.slow.fail(every={"ms": SLOW_MS, "share": world.chance.choice((30, 100))})
    time.sleep(0.02 + world.chance.random() * 0.1)
    world.kill_daemon()
    world.counts.kills_with_delayed_reads += 1
    # The guardian's reads are quick again: it uses pages over which the dead one's still come in.
    world.slow.fail()
    world.goes_on_alone(8)
    world.start_daemon()


def slow_stop(world: World) -> None:
    """The same with a daemon that stands still and then goes on."""
    assert world.slow is not None
    assert world.daemon is not None
    world.slow.fail(every={"ms": SLOW_MS, "share": world.chance.choice((30, 100))})
    time.sleep(0.02 + world.chance.random() * 0.1)
    world.daemon.send(signal.SIGSTOP)
    world.slow.fail()
    world.goes_on_alone(8)
    world.daemon.send(signal.SIGCONT)


def _failing(world: World, number: int) -> None:
    assert world.slow is not None
    before = world.board.get("failed")
    world.slow.fail(every={"errno": number})
    time.sleep(0.2)
    world.slow.fail()
    world.counts.failed_as_expected += world.board.get("failed") - before
    world.goes_on(1)  # its step may have begun while the device failed
    world.tolerate()


def eio(world: World) -> None:
    """Every read fails for a while: errors, and no wrong row."""
    _failing(world, errno.EIO)


def gone(world: World) -> None:
    """The device goes, the daemon is killed and cannot start; then both come back."""
    assert world.slow is not None
    before = world.board.get("failed")
    world.slow.fail(every={"errno": errno.ENODEV})
    world.kill_daemon()
    time.sleep(0.2)
    world.slow.fail()
    world.counts.failed_as_expected += world.board.get("failed") - before
    world.start_daemon()
    world.goes_on(1)
    world.tolerate()


def memory(world: World) -> None:
    """The daemon may not have another byte for a while: it refuses engines, or dies."""
    daemon = world.daemon
    assert daemon is not None
    with open(f"/proc/{daemon.pid}/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        world.goes_on_alone()
        time.sleep(0.2)
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, infinite)
    if daemon.wait(0):  # the C library ends a process that cannot have a thread's memory
        world.start_daemon()


def engine_killed(world: World) -> None:
    """The engine is killed: the daemon lets go of everything, and another one attaches."""
    _end_engine(world, signal.SIGKILL)


def engine_ended(world: World) -> None:
    """The engine is told to end by a signal that it does not handle."""
    _end_engine(world, signal.SIGTERM)


def _end_engine(world: World, number: int) -> None:
    assert world.engine is not None
    others = 1 if world.tokens is not None else 0
    world.engine.send(number)
    world.until(
        lambda: world.engine is not None and world.engine.wait(0), "the engine does not end"
    )
    world.until(lambda: world.clients() <= others, "a dead engine's client is still there")
    phase = world.board.get("phase")
    world.start_engine()
    world.board.set("phase", phase)


def engine_stopped(world: World) -> None:
    """The engine stands still for a while, its guardian with it; the daemon may be killed then."""
    assert world.engine is not None
    world.engine.send(signal.SIGSTOP)
    killed = world.chance.random() < 0.3
    if killed:
        world.kill_daemon()
    time.sleep(world.stop_s)
    world.engine.send(signal.SIGCONT)
    if killed:
        world.start_daemon()


def both_killed(world: World) -> None:
    """Daemon and engine are killed together."""
    assert world.engine is not None
    world.engine.send(signal.SIGKILL)
    world.kill_daemon()
    world.engine.wait(1)
    world.start_daemon()
    phase = world.board.get("phase")
    world.start_engine()
    world.board.set("phase", phase)


DAEMON_FAULTS: tuple[Callable[[World], None], ...] = (
    sigkill, sigterm, restart, upgrade, sigstop, slow_kill, slow_stop, eio, gone, memory,
)  # fmt: skip
ENGINE_FAULTS: tuple[Callable[[World], None], ...] = (
    engine_killed, engine_ended, engine_stopped, both_killed,
)  # fmt: skip
NEED_SLOW_DEVICE = {slow_kill, slow_stop, eio, gone}
EVERY: dict[str, Callable[[World], None]] = {
    fault.__name__: fault for fault in (*DAEMON_FAULTS, *ENGINE_FAULTS)
}

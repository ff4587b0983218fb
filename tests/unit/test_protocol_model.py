"""Every interleaving of docs/protocol.md: one client, a guardian, two daemons in succession.

The model has a ring two requests deep over two arena pages, so that pages are used again as soon as
the rules allow it. Daemons are killed, stopped and resumed at any step; a dead daemon's reads
still land afterwards. The guardian takes the ring whenever it likes, rightly or not, as it does
when a daemon asks to be relieved; it may be stopped for any time between any two of its steps, and
be replaced by another one.

Checked in every state: a fill sees the pages of its own request. Checked over all states: from each
one the client can still finish. Each mutant breaks one rule and must be caught, so that the check
is known to be able to fail.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH = 2
REQUESTS = 3
TAKEOVERS = 1
DAEMON, GUARDIAN = 0, 1


class UnsafeError(Exception):
    """A fill saw what it must never see."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server's private state."""

    life: str = "run"  # run, stopped, dead
    adopted: int = -1  # epoch under which it serves; -1 none
    submitted: int = 0
    completed: int = 0
    in_flight: frozenset[int] = frozenset()
    pc: str = "idle"  # idle, looked, marked (status stored, done not yet)


@dataclass(frozen=True, slots=True)
class State:
    """Shared memory, the device's queue, and every actor."""

    published: int = 0
    retired: int = 0
    picked: int = -1  # arena that the fill under way reads; -1 none
    done: tuple[int, int] = (0, 0)
    status: tuple[tuple[int, ...], tuple[int, ...]] = ((0,) * DEPTH, (0,) * DEPTH)
    arena: tuple[tuple[int, ...], tuple[int, ...]] = ((0,) * DEPTH, (0,) * DEPTH)
    owner: int = DAEMON
    epoch: int = 0
    drained: int = 0
    device: frozenset[tuple[str, int, int]] = frozenset()  # (server, sequence, arena)
    d: Server = Server(adopted=0)
    generation: int = 0  # which daemon
    g: Server = Server()
    kills: int = 1
    stops: int = 1
    takeovers: int = TAKEOVERS
    swaps: int = 0  # of the guardian


def _put(row: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*row[:index], value, *row[index + 1 :])


def _put2(
    pair: tuple[tuple[int, ...], tuple[int, ...]], which: int, index: int, value: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    changed = _put(pair[which], index, value)
    return (changed, pair[1]) if which == 0 else (pair[0], changed)


class Model:
    """The transition relation, with rules that a mutant can switch off."""

    def __init__(self, mutant: str | None = None) -> None:
        self.mutant = mutant

    # --- client ---------------------------------------------------------------------------------
    def client(self, s: State) -> Iterator[State]:
        room = DEPTH + 1 if self.mutant == "publish beyond the depth" else DEPTH
        if s.published < REQUESTS and s.published + 1 - s.retired <= room:
            yield replace(s, published=s.published + 1)
        wanted = s.retired + 1
        if s.picked == -1 and wanted <= s.published and max(s.done) >= wanted:
            slot = wanted % DEPTH
            if self.mutant == "pick the arena by done alone":
                arena = 0 if s.done[0] >= wanted else 1
            elif s.done[0] >= wanted and s.status[0][slot] == wanted:
                arena = 0
            elif s.done[1] >= wanted and s.status[1][slot] == wanted:
                arena = 1
            else:
                raise UnsafeError(f"request {wanted} is done but no status word names it")
            if self.mutant == "retire before fill":
                yield replace(s, picked=arena, retired=wanted)
            else:
                yield replace(s, picked=arena)
        if s.picked != -1:
            filling = s.retired if self.mutant == "retire before fill" else wanted
            if s.arena[s.picked][filling % DEPTH] != filling:
                raise UnsafeError(f"fill of {filling} saw {s.arena[s.picked][filling % DEPTH]}")
            yield replace(s, picked=-1, retired=filling)

    # --- what both servers do -------------------------------------------------------------------
    def submit(self, s: State, me: Server, name: str, arena: int) -> Iterator[tuple[State, Server]]:
        wanted = me.submitted + 1
        if wanted > s.published:
            return
        overlap = any(q % DEPTH == wanted % DEPTH for q in me.in_flight)
        if overlap and self.mutant != "submit over a read in flight":
            return
        yield (
            replace(s, device=s.device | {(name, wanted, arena)}),
            replace(me, submitted=wanted, in_flight=me.in_flight | {wanted}, pc="idle"),
        )

    def complete(
        self, s: State, me: Server, name: str, which: int, arena: int
    ) -> Iterator[tuple[State, Server]]:
        wanted = me.completed + 1
        if me.pc == "marked":
            done = _put(s.done, which, wanted)
            after = replace(s, done=(done[0], done[1]))
            if self.mutant == "done before status":
                after = replace(after, status=_put2(s.status, which, wanted % DEPTH, wanted))
            yield after, replace(me, completed=wanted, in_flight=me.in_flight - {wanted}, pc="idle")
            return
        landed = (name, wanted, arena) not in s.device
        if wanted in me.in_flight and landed:
            if self.mutant == "done before status":
                done = _put(s.done, which, wanted)
                yield replace(s, done=(done[0], done[1])), replace(me, pc="marked")
            else:
                status = _put2(s.status, which, wanted % DEPTH, wanted)
                yield replace(s, status=status), replace(me, pc="marked")

    # --- daemon ---------------------------------------------------------------------------------
    def daemon(self, s: State) -> Iterator[State]:
        me, name = s.d, f"d{s.generation}"
        if me.life == "run" and s.kills:
            yield replace(s, d=replace(me, life="dead"), kills=s.kills - 1)
        if me.life == "run" and s.stops:
            yield replace(s, d=replace(me, life="stopped"), stops=s.stops - 1)
        if me.life == "stopped":
            yield replace(s, d=replace(me, life="run"))
        if me.life == "dead" and s.generation == 0:
            # The exclusive open is the drain fence: granted once the dead one's reads have landed.
            drained = not any(read[0] == name for read in s.device)
            if drained or self.mutant == "open without the drain fence":
                yield replace(s, d=Server(), generation=1)
        if me.life != "run":
            return
        if me.pc == "idle":
            yield from self.look(s, me, name)
        if me.pc == "looked":
            yield replace(s, d=replace(me, pc="idle"))
            for after, server in self.submit(s, me, name, 0):
                yield replace(after, d=server)
        if me.pc in {"looked", "marked"}:
            for after, server in self.complete(s, me, name, 0, 0):
                yield replace(after, d=server)

    def look(self, s: State, me: Server, name: str) -> Iterator[State]:
        mine = s.owner == DAEMON and me.adopted == s.epoch
        if mine:
            yield replace(s, d=replace(me, pc="looked"))
            return
        waiting = any(read[0] == name for read in s.device)
        if waiting and self.mutant != "drained with reads in flight":
            return
        if s.owner == GUARDIAN:
            if s.drained != s.epoch:
                yield replace(s, drained=s.epoch, d=replace(me, in_flight=frozenset(), adopted=-1))
            return
        start = max(s.done)
        if self.mutant == "resume at done_d":
            start = s.done[0]
        yield replace(
            s, d=Server(adopted=s.epoch, submitted=start, completed=start, in_flight=frozenset())
        )

    # --- guardian -------------------------------------------------------------------------------
    def guardian(self, s: State) -> Iterator[State]:
        me = s.g
        if s.owner == DAEMON:
            if s.takeovers:  # also with nothing outstanding, and from a healthy daemon
                start = max(s.done)
                yield replace(
                    s,
                    owner=GUARDIAN,
                    epoch=s.epoch + 1,
                    takeovers=s.takeovers - 1,
                    g=Server(submitted=start, completed=start),
                )
            return
        if s.swaps and not (me.in_flight and self.mutant != "swap with reads in flight"):
            # Another guardian takes over from the one that has ended, under a new epoch.
            start = max(s.done)
            new = Server(submitted=start, completed=start)
            yield replace(s, epoch=s.epoch + 1, swaps=s.swaps - 1, g=new)
        arena = 0 if self.mutant == "one arena" else 1
        if me.pc == "idle":
            for after, server in self.submit(s, me, "g", arena):
                yield replace(after, g=server)
        for after, server in self.complete(s, me, "g", 1, arena):
            yield replace(after, g=server)
        idle = not me.in_flight and me.pc == "idle"
        if idle and s.d.life == "run" and s.drained == s.epoch:
            yield replace(s, owner=DAEMON, epoch=s.epoch + 1)

    # --- device ---------------------------------------------------------------------------------
    def land(self, s: State) -> Iterator[State]:
        for read in s.device:
            _, sequence, arena = read
            pages = _put2(s.arena, arena, sequence % DEPTH, sequence)
            yield replace(s, device=s.device - {read}, arena=pages)

    def successors(self, s: State) -> Iterator[State]:
        yield from self.client(s)
        yield from self.daemon(s)
        yield from self.guardian(s)
        yield from self.land(s)


def explore(model: Model, start: State | None = None) -> dict[State, list[State]]:
    """Walk every reachable state, depth first (it meets a mutant's violation sooner)."""
    edges: dict[State, list[State]] = {}
    first = start or State()
    queue = deque([first])
    seen = {first}
    while queue:
        state = queue.pop()
        out = list(model.successors(state))
        edges[state] = out
        for after in out:
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return edges


def stuck_states(edges: dict[State, list[State]]) -> int:
    """Count states from which the client can no longer retire its last request."""
    backwards: dict[State, list[State]] = {}
    for state, out in edges.items():
        for after in out:
            backwards.setdefault(after, []).append(state)
    queue = deque(s for s in edges if s.retired == REQUESTS)
    alive = set(queue)
    while queue:
        for before in backwards.get(queue.popleft(), ()):
            if before not in alive:
                alive.add(before)
                queue.append(before)
    # A client whose guardian has used up the model's take-overs may wait for a daemon that is
    # dead for good (the model starts only one successor); that is the model's bound, not a hang.
    return sum(
        1
        for s in edges
        if s not in alive and not (s.takeovers == 0 and s.d.life == "dead" and s.owner == DAEMON)
    )


@pytest.mark.timeout(120)
def test_every_interleaving_is_safe_and_none_is_stuck() -> None:
    edges = explore(Model())
    assert len(edges) > 5_000
    assert stuck_states(edges) == 0


@pytest.mark.parametrize(
    "mutant",
    [
        "publish beyond the depth",
        "pick the arena by done alone",
        "done before status",
        "retire before fill",
        "submit over a read in flight",
        "open without the drain fence",
        "drained with reads in flight",
        "one arena",
    ],
)
def test_each_broken_rule_is_caught(mutant: str) -> None:
    with pytest.raises(UnsafeError):
        explore(Model(mutant))


# With an immortal daemon, since every kind of trouble multiplies the states.
SWAP = State(swaps=1, kills=0)


@pytest.mark.timeout(120)
def test_a_guardian_may_follow_another() -> None:
    edges = explore(Model(), SWAP)
    assert len(edges) > 5_000
    assert stuck_states(edges) == 0


def test_a_guardian_must_not_follow_one_that_reads() -> None:
    with pytest.raises(UnsafeError):
        explore(Model("swap with reads in flight"), SWAP)


if __name__ == "__main__":
    import sys

    REQUESTS, takeovers, swaps = (int(word) for word in sys.argv[1:])
    found = explore(Model(), State(takeovers=takeovers, swaps=swaps))
    print(f"{len(found)} states, none unsafe, {stuck_states(found)} stuck")

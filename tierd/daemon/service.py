"""The daemon: wires stores, pumps, sockets, history and REST together, and takes them apart.

Start: lock the name, open the devices, start the pumps, then listen; whoever connects is served.
Stop (SIGTERM, SIGINT): stop accepting, hand the clients over to their guardians, drop them, stop
the pumps, let go of the devices, remove sockets and locks. Reload (SIGHUP): see reload.py. No
policy lives here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import uvloop

from tierd import __version__
from tierd import log as logging
from tierd.catalog import Catalog
from tierd.daemon import claims, reload, systemd
from tierd.daemon.attach import AttachServer
from tierd.daemon.counters import Counters
from tierd.daemon.exports import Exports
from tierd.daemon.hub import Hub
from tierd.daemon.jobs import Board
from tierd.daemon.plane import DataPlane
from tierd.daemon.recent import Recent
from tierd.daemon.scrub import Scrubber
from tierd.daemon.steering import Steering
from tierd.daemon.tokens import read_token
from tierd.errors import TierdError
from tierd.io import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierd.config import Settings
    from tierd.daemon.attach import AttachedClient
    from tierd.daemon.remotes import Peer

log = structlog.get_logger("tierd.daemon")

WATCH_S = 1.0
TELL_S = 5.0
LEAVE_S = 3.0  # for good-byes to peers
WATCHDOG_LOOKS = 3  # in the time that systemd grants
THREADS_END_S = 1.0  # at the end of all, for threads that are still at it
BEATS = 8  # of the event loop in the time that the watchdog grants it


class Api(Protocol):
    """What the daemon needs of a REST interface (tierd.api has it; imports point down)."""

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket."""

    async def stop(self) -> None:
        """Close connections and stop serving."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Which run of which daemon this is.

    Attributes:
        boot_id: new at every start.
        started: Unix time, seconds.
        started_monotonic: the same on the monotonic clock.
    """

    boot_id: str
    started: float
    started_monotonic: float

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_monotonic


class Daemon:
    """One daemon.

    Attributes:
        plane: stores, images and pumps.
        counters: what the pumps counted a moment ago.
        attach: the engine socket's server, and its clients.
        steering: the controller's eyes and mouth.
        recent: what has just happened, and hours of history.
        catalog: history.
        scrubber: checks every page in the background.
        watchdog: sees whether the threads still turn.
        jobs: long work.
        history: the thread that reads history; its disk may hang, and holds nobody else up then.
        hub: who listens to events.
        exports: what other nodes read here.
        peers: other nodes whose exports are read here.
    """

    plane: DataPlane
    counters: Counters
    exports: Exports
    scrubber: Scrubber
    attach: AttachServer
    steering: Steering
    recent: Recent
    catalog: Catalog
    jobs: Board
    watchdog: Any = None

    def __init__(
        self,
        settings: Settings,
        make_api: Callable[[Daemon], Api],
        read_settings: Callable[[], Settings] | None = None,
    ) -> None:
        """Make a daemon that does nothing yet.

        Args:
            settings: what it is to be.
            make_api: makes the REST interface.
            read_settings: reads the configuration again, for SIGHUP; None: nothing is reloaded.
        """
        self.settings = settings
        self._read_settings = read_settings
        self.identity = Identity(uuid.uuid4().hex, time.time(), time.monotonic())
        self.hub = Hub()
        self.peers: list[Peer] = []
        self.history = ThreadPoolExecutor(1, thread_name_prefix="tierd-history")
        # Of its own: whatever else waits for a disk, it is said whether this daemon lives.
        self._vitals = ThreadPoolExecutor(1, thread_name_prefix="tierd-vitals")
        self._make_api = make_api
        self._failed_seen: dict[tuple[int, int, int, str], int] = {}

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Start, serve until SIGTERM or SIGINT, stop.

        Raises:
            TierdError: the daemon cannot start; nothing is left behind.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)  # what it would read is being read
        threads = ThreadPoolExecutor(thread_name_prefix="tierd-thread")
        loop.set_default_executor(threads)
        async with contextlib.AsyncExitStack() as stack:
            for each in (threads, self.history, self._vitals):
                stack.callback(each.shutdown, wait=False, cancel_futures=True)
            await self._start(stack)
            loop.add_signal_handler(signal.SIGHUP, self.reload)
            watcher = loop.create_task(self._watch())
            stack.push_async_callback(_cancel, watcher)
            recent = loop.create_task(self.recent.run())
            stack.push_async_callback(_cancel, recent)
            tasks = {watcher, recent}
            if self.settings.controller.mode != "off":
                steering = loop.create_task(self.steering.run())
                stack.push_async_callback(_cancel, steering)
                tasks.add(steering)
            systemd.notify(f"READY=1\nSTATUS={self._summary()}")
            stack.push_async_callback(_cancel, loop.create_task(self._tell_systemd()))
            if on_ready is not None:
                on_ready()
            stopped = loop.create_task(stop.wait())
            # These tasks end only by a programming fault, which stops the process.
            await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            systemd.notify("STOPPING=1")
            log.info("stopping", clients=len(self.attach.clients))
            for task in tasks:
                if task.done():
                    stopped.cancel()
                    task.result()
        log.info("stopped", left=self.attach.left, reads_in_flight=self.plane.stuck)

    def reload(self) -> None:
        """Read the configuration again; on a mistake in it, go on with the present one."""
        if self._read_settings is None:
            return
        systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._take(self._read_settings())
        except TierdError as error:
            log.error("the configuration is not taken; the present one stays", error=str(error))
        finally:
            systemd.notify("READY=1")  # or systemd would wait for the end of this for ever

    def _take(self, wanted: Settings) -> None:
        found = reload.compare(self.settings, wanted)
        self.settings = self.attach.settings = found.settings
        logging.setup(found.settings.log.level, found.settings.log.format)
        self.scrubber.configure(found.settings.io)
        log.info("reloaded", changed=found.changed, after_restart=found.waiting)
        details = {"changed": found.changed, "after_restart": found.waiting}
        self.catalog.record("reloaded", self.identity.boot_id, **details)

    async def vitals(self) -> str:
        """Return "" while all threads turn, else what stands still."""
        stuck = "" if self.watchdog is None else str(self.watchdog.stuck)
        if not stuck:
            loop = asyncio.get_running_loop()
            beats = await loop.run_in_executor(self._vitals, self.plane.is_beating)
            stuck = "" if beats else "a pump"
        return stuck

    async def _beat(self) -> None:
        while True:
            self.watchdog.beat()
            await asyncio.sleep(self.settings.daemon.watchdog_ms / 1000 / BEATS)

    async def _tell_systemd(self) -> None:
        """Say how it goes, and that it lives; what stands still is left to systemd's watchdog."""
        watchdog_s = systemd.watchdog_s()
        told = ""
        while systemd.listens():
            stuck = await self.vitals()
            status = f"{stuck} stands still" if stuck else self._summary()
            if watchdog_s and not stuck:
                systemd.notify("WATCHDOG=1")
            if status != told:
                systemd.notify(f"STATUS={status}")
                told = status
            await asyncio.sleep(watchdog_s / WATCHDOG_LOOKS or TELL_S)

    def _summary(self) -> str:
        images, clients = len(self.plane.images), len(self.attach.clients)
        return f"{images} images served, {clients} clients"

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Acquire everything in order; the stack lets go of it in the reverse order."""
        settings, paths = self.settings, self.settings.paths
        _raise_descriptor_limit()
        claims.make_directory(paths.runtime_dir, "daemon.runtime_dir")
        what = f"a daemon named {settings.daemon.name} runs already"
        stack.callback(claims.Claim.take(paths.lock, what).release)
        self.catalog = self._open_catalog()
        self.catalog.listener = self.hub.publish
        stack.callback(self.catalog.close)
        self.plane = await asyncio.to_thread(DataPlane.open, settings)
        stack.push_async_callback(asyncio.to_thread, self.plane.close)
        self.counters = Counters(self.plane.stats)
        self.exports = Exports(settings.exports, self.plane)
        stack.push_async_callback(asyncio.to_thread, self.exports.stop)
        stack.push_async_callback(asyncio.to_thread, self._leave_peers)
        self.scrubber = Scrubber(self.plane, settings.io, paths.state_dir)
        stack.callback(self._take_from_scrub)  # the last findings, once it has stopped
        stack.push_async_callback(asyncio.to_thread, self.scrubber.stop)
        stack.callback(self._start_watchdog().stop)
        # To the end of an orderly stop, which may take longer than the watchdog's patience.
        beat = asyncio.get_running_loop().create_task(self._beat())
        stack.push_async_callback(_cancel, beat)
        self.jobs = Board(self.catalog)
        stack.push_async_callback(asyncio.to_thread, self.jobs.close)

        engine = self._listen(
            paths.engine_socket, socket.SOCK_SEQPACKET, settings.engine.socket_mode
        )
        stack.callback(engine.close)
        rest = self._listen(paths.api_socket, socket.SOCK_STREAM, settings.api.socket_mode)
        stack.callback(rest.close)

        self.attach = AttachServer(
            settings, self.plane, self.catalog, boot_id=self.identity.boot_id
        )
        stack.callback(self._record_stop)
        self.steering = Steering(settings.controller, self.plane, self.attach, self.catalog)
        self.recent = Recent(self.plane, self.attach, self.counters)
        self.attach.start(engine)
        stack.push_async_callback(self._stop_attach)
        api = self._make_api(self)
        await api.start(rest.sock)
        stack.push_async_callback(api.stop)
        stack.callback(self.hub.close)
        self._announce()
        self.scrubber.start()
        self.exports.start()
        self.attach.dram.start()
        stack.push_async_callback(asyncio.to_thread, self.attach.dram.stop)
        self._join_peers()

    def _join_peers(self) -> None:
        remote = self.settings.remote
        if not remote.peers:
            return
        # The daemon of a node without peers needs no TLS and no HTTP client.
        from tierd.daemon.remotes import Caller, Peer  # noqa: PLC0415

        copied = "it holds a copy of the peers' exports.token_file"
        token = read_token("remote.token_file", remote.token_file, cure=copied).decode()
        self.peers = [
            Peer(caller, remote, self.settings.pump, self.plane, self._peer_changed)
            for caller in [Caller(peer, token, remote.ca_file) for peer in remote.peers]
        ]

    def _peer_changed(self, what: str, peer: str, why: str) -> None:
        self.catalog.record(what, peer, **({"reason": why} if why else {}))

    def _leave_peers(self) -> None:
        for peer in self.peers:
            peer.leave()
        ends = time.monotonic() + LEAVE_S
        for peer in self.peers:
            peer.stop(ends - time.monotonic())

    def _start_watchdog(self) -> Any:
        daemon = self.settings.daemon
        self.watchdog = _core.Watchdog(interval_ms=daemon.watchdog_ms, ends=daemon.watchdog_ends)
        for number, pump in enumerate(self.plane.pumps):
            self.watchdog.watch(f"pump {number}", pump)
        return self.watchdog

    async def _stop_attach(self) -> None:
        await self.attach.stop(self.settings.daemon.drain_ms / 1000)

    def _listen(self, path: Path, kind: socket.SocketKind, mode: int) -> claims.Listener:
        group = self.settings.engine.socket_group
        return claims.Listener.open(path, kind, mode=mode, group=group)

    def _open_catalog(self) -> Catalog:
        """Open history; a state directory that cannot be made degrades it, no more."""
        path = self.settings.paths.catalog
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        return Catalog(path, events_max=self.settings.catalog.events_max)

    def _announce(self) -> None:
        plane, paths = self.plane, self.settings.paths
        for store in plane.stores:
            device = store.device
            log.info(
                "device",
                path=device.path,
                uuid=store.uuid,
                direct=device.direct,
                reason=device.direct_reason,
                images=len(store.images),
            )
        for name, why in plane.absent.items():
            log.error("device not there", device=name, error=why)
        for note in plane.notes:
            log.warning("device", note=note)
        for lacking in plane.incomplete:
            log.error("image not served", image=lacking.name, reason=lacking.fault)
            self.catalog.record("incomplete", lacking.name, reason=lacking.fault)
        for name in plane.shadowed:
            log.warning("image not served from here: another device has it as well", image=name)
        pump = plane.pumps[0]
        log.info(
            "serving",
            name=self.settings.daemon.name,
            version=__version__,
            pid=os.getpid(),
            boot_id=self.identity.boot_id,
            images=len(plane.images),
            pumps=len(plane.pumps),
            transport=pump.transport,
            reason=pump.transport_reason,
            engine_socket=str(paths.engine_socket),
            api_socket=str(paths.api_socket),
        )
        devices = [store.device.path for store in plane.stores]
        boot_id = self.identity.boot_id
        self.catalog.record("started", boot_id, version=__version__, devices=devices)

    def _record_stop(self) -> None:
        boot_id = self.identity.boot_id
        self.catalog.record("stopped", boot_id, uptime_s=round(self.identity.uptime_s, 1))

    async def _watch(self) -> None:
        """Once a second, look for requests that failed, and for history that cannot be kept."""
        degraded = ""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look_for_failures()
            self._take_from_scrub()
            if self.catalog.degraded != degraded:
                degraded = self.catalog.degraded
                if degraded:
                    log.warning("history is not being kept", reason=degraded)
                else:
                    log.info("history is being kept again", lost=self.catalog.lost)

    def _take_from_scrub(self) -> None:
        """Record what the scrub has found and finished since the last look."""
        findings, finished = self.scrubber.take()
        for finding in findings:
            details = {"page": finding.page, "fault": finding.fault, "device": finding.device}
            log.error("damage found", image=finding.image, **details)
            self.catalog.record("damaged", finding.image, **details)
        for name in finished:
            self.catalog.record("scrubbed", name, bad_pages=self.scrubber.bad_pages(name))

    async def _look_for_failures(self) -> None:
        """Record requests that the pumps answered with a failure since the last look."""
        stats = await asyncio.to_thread(self.plane.stats)
        clients = {
            (client.attached.pump, client.attached.channel): client
            for client in self.attach.clients.values()
        }
        seen: dict[tuple[int, int, int, str], int] = {}
        for number, pump in enumerate(stats):
            for ring in pump["rings"]:
                client = clients.get((number, ring["channel"]))
                for status, count in ring["failed"].items():
                    key = (number, ring["channel"], ring["ring"], status)
                    seen[key] = count
                    new = count - self._failed_seen.get(key, 0)
                    if client is not None and new and status != "cancelled":
                        self._record_failure(client, ring["ring"], status, new)
        self._failed_seen = seen

    def _record_failure(self, client: AttachedClient, ring: int, status: str, count: int) -> None:
        images = client.attached.images
        image = images[ring % len(images)]  # hint rings follow the images' own, in their order
        log.error(
            "requests failed",
            image=image.info.name,
            device=image.place,
            status=status,
            requests=count,
            pid=client.pid,
            engine=client.engine,
        )
        details = {"status": status, "requests": count, "client": client.client_id}
        self.catalog.record("failed", image.info.name, **details)


def serve(
    settings: Settings,
    make_api: Callable[[Daemon], Api],
    read_settings: Callable[[], Settings] | None = None,
) -> None:
    """Run a daemon in this process until it is told to stop.

    If a device then still holds reads, the process ends at once: nothing can be freed before it.
    So it does when a thread still waits for a disk, and when NIXL was used, whose library crashes
    when the interpreter takes itself apart.
    """
    daemon = Daemon(settings, make_api, read_settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(daemon.run())
        stuck = daemon.plane.stuck or daemon.jobs.stuck or not _threads_end()
        if stuck or _has_nixl():  # here, since the runner, too, waits for threads for ever
            sys.stderr.flush()
            os._exit(0)


def _threads_end() -> bool:
    """Wait briefly for the threads that the interpreter would wait for; False if one is left."""
    deadline = time.monotonic() + THREADS_END_S
    waited_for = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    ]
    for thread in waited_for:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in waited_for)


def _has_nixl() -> bool:
    return any(name.startswith("nixl") for name in sys.modules)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _raise_descriptor_limit() -> None:
    """Use all the descriptors we may: each client costs several."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

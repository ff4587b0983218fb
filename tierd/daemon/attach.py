"""The daemon's side of attach: docs/protocol.md, one session for each connected engine rank.

Fault model: a peer may send anything, stop reading, or vanish at any point; that costs it its own
session and nobody else anything. A session reads its next message only when the last one is
answered, so a peer cannot pile up work. What blocks runs in worker threads. Sessions are never
cancelled: on a stop their sockets are shut for reading, and each ends by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import socket
import time
import uuid
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import structlog
from pydantic import BaseModel, Field, ValidationError

from tierd import __version__
from tierd.daemon import claims, lossy
from tierd.daemon.dram import DramImages
from tierd.daemon.kv import KvLeases
from tierd.daemon.rings import ChannelView
from tierd.daemon.served import by_store, image_map
from tierd.errors import AttachError, TierdError
from tierd.io import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.catalog import Catalog
    from tierd.config import Settings
    from tierd.daemon.plane import Attached, DataPlane
    from tierd.daemon.served import ServedImage
    from tierd.io.pool import Lease

log = structlog.get_logger("tierd.daemon.attach")

# Connections that have not attached: people listing images, engines on their way.
VISITORS_MAX = 64
VISITOR_IDLE_S = 30.0
INLINE_BYTES_MAX = 48 * 1024
WORKERS_MAX = 16
DRAIN_LOOK_S = 0.005
# A device that does not answer may hold a client's reads for long, so workers wait in turns.
DETACH_MS = 50
DETACH_LOOK_S = 0.2
HANG_LOOKS = 10  # before the log says so
GIVE_UP_S = 2.0  # for sessions to see that they shall: several looks
REFUSALS_MAX = 16
LEASES_MAX = 16  # of the KV pool that one connection holds; engines need one
ACCEPT_AGAIN_S = 1.0
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


class ImageRef(BaseModel):
    """One image that a client wants."""

    image_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    generation: int = Field(ge=0, lt=1 << 32)


class CacheOf(BaseModel):
    """A row cache of the client, as it says: what the controller reckons with."""

    sets: int = Field(ge=1, le=1 << 27)
    row_bytes: int = Field(ge=1, le=4096)
    ways: dict[Annotated[int, Field(ge=0, lt=64)], Annotated[int, Field(ge=0, le=32)]]


class AttachRequest(BaseModel):
    """The attach message; unknown keys are those of newer engines and are ignored."""

    abi: int
    engine: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[ -~]+$")]
    rank: int = Field(ge=0, lt=4096)
    world: int = Field(ge=1, le=4096)
    expected_ranks: int = Field(ge=1, le=4096)
    images: list[ImageRef] = Field(min_length=1, max_length=64)
    caches: list[CacheOf] = Field(default_factory=list, max_length=64)


@dataclasses.dataclass(frozen=True, slots=True)
class AttachedClient:
    """What the daemon knows of an attached client."""

    client_id: str
    pid: int
    engine: str
    rank: int
    world: int
    expected_ranks: int
    since: float
    view: ChannelView
    attached: Attached
    file: tuple[int, int]
    caches: tuple[CacheOf, ...] = ()

    @property
    def let_go(self) -> bool:
        """Whether nobody would notice if this daemon were gone."""
        rings = range(len(self.view.rings))
        if self.view.guarded:
            images = self.attached.images
            # Nobody else can serve what lies at peers alone.
            guarded = [ring for ring in rings if images[ring % len(images)].local]
            return all(map(self.view.handed_over, guarded))
        return not any(map(self.view.outstanding, rings))


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An engine that this daemon cannot serve, since one of the two is too old."""

    pid: int
    at: float
    reason: str


class AttachServer:
    """Serves the engine socket.

    Attributes:
        clients: attached clients by id.
        kv: leases of the host KV pool.
        departed: image name -> ring counters of the clients that have gone, added up.
        faults: sessions that ended by a fault of ours; each is in the log with its traceback.
        refusals: engines of versions that are not served, newest last.
        left: clients that were not let go of when the daemon stopped: their reads were still in
            flight, or their pump stood still.
    """

    def __init__(
        self, settings: Settings, plane: DataPlane, catalog: Catalog, *, boot_id: str
    ) -> None:
        self.settings = settings
        self.plane = plane
        self.catalog = catalog
        self.boot_id = boot_id
        self.lossy = lossy.find(settings.lossy, plane.images.values())
        self.clients: dict[str, AttachedClient] = {}
        self.dram = DramImages(settings.dram, plane)
        self.kv = KvLeases(settings.kv.pool_bytes)
        self.departed: dict[str, Counter[str]] = {}
        self.faults = 0
        self.left = 0
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS_MAX)
        self.channels: set[tuple[int, int]] = set()  # memory files that are served
        self.give_up = False
        self.workers = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="tierd-attach")
        self.attaching = 0
        self._sessions: dict[asyncio.Task[None], socket.socket] = {}
        self._listener: claims.Listener | None = None

    def lossy_tables(self) -> list[lossy.LossyTable]:
        """Return which tables are served with rows left out now."""
        return list(lossy.in_force(self.lossy, list(self.plane.images.values())).values())

    def start(self, listener: claims.Listener) -> None:
        """Accept from now on; needs a running loop."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.sock.fileno(), self._accept)

    async def stop(self, drain_s: float) -> None:
        """Stop accepting, hand every client over to its guardian, and drop them all.

        Clients without a guardian get answers to what is under way. After ``drain_s`` seconds
        the rest is left as it is: guardians find it, and the kernel frees it.
        """
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener.sock.fileno())
            self._listener.close()
        deadline = loop.time() + drain_s
        await self._hand_over(deadline)
        for sock in self._sessions.values():
            sock.shutdown(socket.SHUT_RD)
        if self._sessions:
            left_s = max(deadline - loop.time(), DETACH_LOOK_S)
            _, pending = await asyncio.wait(list(self._sessions), timeout=left_s)
            self.give_up = True
            if pending:
                _, hanging = await asyncio.wait(pending, timeout=GIVE_UP_S)
                self.left += len(hanging)  # what they wait for in a thread does not come back
        self.workers.shutdown(wait=False)
        self.kv.close()

    async def _hand_over(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        if self.clients:
            leaving = loop.run_in_executor(self.workers, self.plane.leave)
            await asyncio.wait([leaving], timeout=max(deadline - loop.time(), DETACH_LOOK_S))
        # Shared memory wakes no event, so this looks again and again.
        while not all(client.let_go for client in self.clients.values()):
            if loop.time() >= deadline:
                late = [client.pid for client in self.clients.values() if not client.let_go]
                log.warning("clients are left although they have not let go", pids=late)
                return
            await asyncio.sleep(DRAIN_LOOK_S)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.sock.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors or memory, or the peer has gone again
            log.warning("accept failed", error=error.strerror)
            if error.errno in _SHORT:
                # Who waits would have this called again at once, for nothing.
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.sock.fileno())
                loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
            return
        sock.setblocking(False)
        if len(self._sessions) >= VISITORS_MAX + self.settings.channel.clients_max:
            _refuse(sock, AttachError("too many connections; close some and try again"))
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(_Session(self, sock).run())
        self._sessions[task] = sock
        task.add_done_callback(self._ended)

    def _accept_again(self) -> None:
        if self._listener is not None and self._listener.sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.sock.fileno(), self._accept)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sessions.pop(task).close()
        if (error := task.exception()) is not None:
            self.faults += 1
            log.error("session failed", exc_info=error)


class _Session:
    """One connection, from accept to close."""

    def __init__(self, server: AttachServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._pid = claims.peer_pid(sock)
        self._client: AttachedClient | None = None
        self._leases: list[Lease] = []
        self._done = False

    async def run(self) -> None:
        """Answer messages until the peer goes, errs or detaches."""
        try:
            while not self._done:
                await self._answer_next()
        except TimeoutError:
            log.info("idle connection closed", pid=self._pid)
        except OSError:
            pass  # the peer has gone, or does not read what it asked for
        except AttachError as error:
            log.warning("connection refused", pid=self._pid, error=str(error))
            _refuse(self._sock, error)
        finally:
            await self._drop("the connection closed")
            for lease in self._leases:
                await self._server.kv.release(lease)

    async def _answer_next(self) -> None:
        limit = None if self._client or self._leases else VISITOR_IDLE_S
        async with asyncio.timeout(limit):
            await _readable(self._sock)
        try:
            message, fds = wire.receive(self._sock, fds_max=1)
        except BlockingIOError:
            return
        answer_fds: list[int] = []
        try:
            answer, answer_fds = await self._handle(message, fds)
            wire.send(self._sock, answer, answer_fds)
        except TierdError as error:
            log.warning("request refused", pid=self._pid, op=_op(message), error=str(error))
            _refuse(self._sock, error)
        finally:
            wire.close_all(fds)
            wire.close_all(answer_fds)

    async def _handle(
        self, message: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the answer and its descriptors, which the caller closes after sending."""
        match message.get("op"):
            case "hello":
                return self._hello(message), []
            case "images":
                return self._images(message)
            case "attach":
                return await self._attach(message, fds)
            case "kv_lease":
                if len(self._leases) >= LEASES_MAX:
                    raise AttachError(
                        f"a connection holds at most {LEASES_MAX} leases; use another"
                    )
                lease, answer, memory = self._server.kv.grant(message, self._pid)
                self._leases.append(lease)
                return answer, memory
            case "detach":
                await self._drop("detached")
                self._done = True
                return {"ok": True}, []
            case _:
                raise AttachError(
                    f"unknown op {_op(message)}; there are: hello images attach detach kv_lease"
                )

    def _hello(self, message: dict[str, Any]) -> dict[str, Any]:
        self._check_abi(message.get("abi"))
        return {
            "ok": True,
            "abi": message["abi"],
            "boot_id": self._server.boot_id,
            "pid": os.getpid(),
            "version": __version__,
        }

    def _images(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        model = message.get("model")
        if model is not None and not isinstance(model, str):
            raise AttachError("images: model must be a name or null")
        infos = [image.info for image in self._server.plane.images.values()]
        listed = [info.to_json() for info in infos if model is None or info.model == model]
        text = json.dumps(listed).encode()
        if len(text) <= INLINE_BYTES_MAX:
            return {"ok": True, "images": listed}, []
        return {"ok": True, "images_bytes": len(text)}, [_memory_file("tierd-images", text)]

    async def _attach(
        self, message: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        server = self._server
        request = _parse(message)
        self._check_abi(request.abi)
        if self._client is not None:
            raise AttachError("this connection has attached already; use another one")
        if len(fds) != 1:
            raise AttachError("attach needs one descriptor, the channel's memfd")
        _check_ranks(request, server.settings.engine.expected_ranks)
        _check_caches(request)
        wanted = [
            server.plane.find(int(ref.image_id, 16), ref.generation) for ref in request.images
        ]
        if len(server.clients) + server.attaching >= server.settings.channel.clients_max:
            most = server.settings.channel.clients_max
            raise AttachError(f"{most} clients are attached, as many as channel.clients_max allows")
        file = _identity(fds[0])
        if file in server.channels:
            # Two pumps must never serve one ring. Its last session may still wait for reads.
            raise AttachError("the channel is served by a session that is not over; try again")
        server.attaching += 1
        server.channels.add(file)
        try:
            self._client = await self._serve_channel(request, wanted, fds[0], file)
        except BaseException:
            server.channels.discard(file)
            raise
        finally:
            server.attaching -= 1
        try:
            # In a thread: leases wait for commits, which take as long as a device does.
            return await asyncio.get_running_loop().run_in_executor(
                server.workers, self._answer_attach, self._client, wanted
            )
        except BaseException:
            await self._drop("attach failed")
            raise

    def _check_abi(self, abi: object) -> None:
        if abi in range(wire.ABI_OLDEST, wire.ABI + 1):
            return
        reason = (
            f"the engine speaks attach ABI {abi!r:.20}, the daemon {wire.ABI_OLDEST} to "
            f"{wire.ABI}; install the same tierd on both sides"
        )
        self._server.refusals.append(Refusal(self._pid, time.time(), reason))
        raise AttachError(reason)

    async def _serve_channel(
        self,
        request: AttachRequest,
        wanted: Sequence[ServedImage],
        channel_fd: int,
        file: tuple[int, int],
    ) -> AttachedClient:
        server = self._server
        view = ChannelView(channel_fd, server.settings.channel)
        try:
            if len(view.rings) != len(wanted):
                text = f"channel with {len(view.rings)} rings for {len(wanted)} images"
                raise AttachError(text + "; image i is ring i")
            loop = asyncio.get_running_loop()
            attached = await loop.run_in_executor(
                server.workers, server.plane.attach, channel_fd, wanted, bool(view.hints)
            )
        except BaseException:
            view.close()
            raise
        client = AttachedClient(
            client_id=uuid.uuid4().hex,
            pid=self._pid,
            engine=request.engine,
            rank=request.rank,
            world=request.world,
            expected_ranks=request.expected_ranks,
            since=time.time(),
            view=view,
            attached=attached,
            caches=tuple(request.caches),
            file=file,
        )
        server.clients[client.client_id] = client
        names = [image.info.name for image in wanted]
        log.info("attached", client=client.client_id, **_who(client), images=names)
        server.catalog.record("attached", client.client_id, **_who(client), images=names)
        return client

    def _answer_attach(
        self, client: AttachedClient, wanted: Sequence[ServedImage]
    ) -> tuple[dict[str, Any], list[int]]:
        server = self._server
        text = json.dumps(image_map(wanted)).encode()
        stores = by_store(wanted)
        answer: dict[str, Any] = {
            "ok": True,
            "client": client.client_id,
            "devices": [{"uuid": store.uuid, "path": store.device.path} for store, _ in stores],
            "map_bytes": len(text),
            "lossy": lossy.answer(server.lossy, wanted),
        }
        fds: list[int] = []
        try:
            fds.append(os.dup(server.plane.pumps[client.attached.pump].wake_fd))
            fds.append(_memory_file("tierd-map", text))
            # Each carries leases: while this client lives, its images' extents are not reused.
            fds.extend(store.reader_fd(images) for store, images in stores)
            if client.view.on_gpu:
                answer["dram"] = self._take_dram(wanted, fds)
        except BaseException:
            wire.close_all(fds)
            raise
        return answer, fds

    def _take_dram(self, wanted: Sequence[ServedImage], fds: list[int]) -> list[dict[str, int]]:
        """Append the memory files of those images that have one; return which, in that order."""
        found = []
        for index, image in enumerate(wanted):
            taken = self._server.dram.take(image)
            if taken is not None:
                fds.append(taken[0])
                found.append({"image": index, "bytes": taken[1]})
        return found

    async def _drop(self, why: str) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        server = self._server
        stats = [client.view.stats(ring) for ring in range(len(client.view.rings))]
        totals = {key: sum(ring[key] for ring in stats) for key in ("lookups", "misses", "failed")}
        if not await self._let_go(client):
            server.left += 1
            return
        for image, ring in zip(client.attached.images, stats, strict=True):
            server.departed.setdefault(image.info.name, Counter()).update(ring)
        del server.clients[client.client_id]
        server.channels.discard(client.file)
        client.view.close()
        log.info("detached", client=client.client_id, **_who(client), why=why, **totals)
        server.catalog.record("detached", client.client_id, **_who(client), why=why, **totals)

    async def _let_go(self, client: AttachedClient) -> bool:
        """Detach once the device has answered; False if the daemon stops before that."""
        server, loop = self._server, asyncio.get_running_loop()
        looks = 0
        while not await loop.run_in_executor(
            server.workers, server.plane.detach, client.attached, DETACH_MS
        ):
            looks += 1
            if looks == HANG_LOOKS:
                log.warning("a client has gone and its reads hang", **_who(client))
            if server.give_up:
                return False
            await asyncio.sleep(DETACH_LOOK_S)
        return True


def _identity(channel_fd: int) -> tuple[int, int]:
    """Return what tells one memory file from another, whatever descriptor leads to it."""
    info = os.fstat(channel_fd)
    return info.st_dev, info.st_ino


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def _refuse(sock: socket.socket, error: TierdError) -> None:
    try:
        message = {"ok": False, "error": type(error).__name__, "message": str(error)}
        wire.send(sock, message)
    except OSError:
        pass  # it has gone, or does not read


def _parse(message: dict[str, Any]) -> AttachRequest:
    try:
        request = AttachRequest.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise AttachError(f"attach: {place}: {first['msg'].lower()}") from None
    return request


def _check_ranks(request: AttachRequest, expected: int) -> None:
    if request.rank >= request.world:
        raise AttachError(f"rank {request.rank} of {request.world}: ranks count from 0")
    if expected and request.world != expected:
        raise AttachError(
            f"the engine has {request.world} ranks; "
            f"engine.expected_ranks of the daemon is {expected}"
        )


def _check_caches(request: AttachRequest) -> None:
    rings = Counter(ring for cache in request.caches for ring in cache.ways)
    if twice := [ring for ring, count in rings.items() if count > 1]:
        raise AttachError(f"attach: ring {twice[0]} is in two caches; each ring is in one")


def _memory_file(name: str, data: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _op(message: dict[str, Any]) -> str:
    """Return the op for a log line, whatever the peer wrote there."""
    return f"{message.get('op')!r:.40}"


def _who(client: AttachedClient) -> dict[str, Any]:
    return {"pid": client.pid, "engine": client.engine, "rank": client.rank, "world": client.world}

"""tierd's native core: pages, rings, pumps and the CPU twin."""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray

from tierd.io._core._native import protocol as protocol


def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], crc: int = 0) -> int:
    """CRC32C (Castagnoli) of a contiguous uint8 array, continuing `crc`."""

def crc32c_portable(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], crc: int = 0) -> int:
    """The table-driven CRC32C that crc32c() falls back to."""

def crc32c_engine() -> str:
    """'hardware' or 'portable'."""

def row_stride(row_bytes: int) -> int:
    """Bytes between rows in a page."""

def rows_per_page(row_bytes: int) -> int:
    """Rows that fit a page; ValueError if none does."""

def tag_key(image_id: int, generation: int) -> tuple:
    """The two u32 that key the row tags of one image generation."""

def row_tag(row: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], number: int, image_id: int, generation: int) -> int:
    """Tag of one padded row."""

def pack_pages(rows: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], row_bytes: int, first_page: int, image_id: int, generation: int, pages: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    Pack whole rows (uint8, back to back) into pages, starting at `first_page` of the image.
    Only the last page of the image may be partial: every call but the last must bring a
    multiple of rows_per_page rows.
    """

def check_pages(pages: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], row_bytes: int, rows: int, first_page: int, image_id: int, generation: int, check_crc: bool, check_tags: bool, faults: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
    """
    Check consecutive pages of an image of `rows` rows; writes one PageFault per page into
    `faults` (uint8) and returns how many are not ok.
    """

class PageFault(enum.IntEnum):
    ok = 0

    magic = 1

    version = 2

    image = 3

    generation = 4

    number = 5

    rows = 6

    crc = 7

    tag = 8

PAGE_BYTES: int = 4096

PAGE_MAGIC: int = 1346654804

PAGE_VERSION: int = 1

TRAILER_BYTES: int = 32

ROW_BYTES_MAX: int = 4060

class RemoteLink:
    """
    A connection to a peer. Up until its first failure, then down for ever.
    """

    @property
    def transport(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def failure(self) -> str:
        """'' or why it is down."""

    @property
    def trouble(self) -> str:
        """'' or what is amiss although it is up."""

class QueueLink(RemoteLink):
    """
    A link whose pages an outside transfer engine fetches into
    `memory`; a page's address is its number in the engine's list, times
    4,096.
    """

    def __init__(self, depth: int, timeout_ns: int) -> None: ...

    @property
    def memory(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """uint8 [depth * 4096]: slot s is its page s."""

    @property
    def event_fd(self) -> int:
        """Readable when there is something to take, or the link has failed."""

    def open(self) -> None:
        """The engine is ready."""

    def post(self, pages: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Before it joins a pump: want pages; `out` lives until they came."""

    def poll(self) -> int:
        """Before it joins a pump: how many more have come whole."""

    def take(self, most: int) -> tuple:
        """(slots, page numbers), int32 [n] each."""

    def finish(self, slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], whole: bool) -> None:
        """These slots hold their pages, or will never."""

VERBS: bool = True

class VerbsError(RuntimeError):
    pass

def verbs_devices() -> list:
    """
    RDMA devices with their ports; VerbsError where the machine has no RDMA at all.
    """

class VerbsContext:
    """An RDMA device, opened, with a protection domain."""

    def __init__(self, device: str, port: int) -> None: ...

    @property
    def name(self) -> str: ...

class VerbsLink(RemoteLink):
    """Queue pairs to one peer, for a pump."""

    def __init__(self, context: VerbsContext, queue_pairs: int, depth: int, timeout_ns: int) -> None: ...

    @property
    def names(self) -> list[tuple[int, int]]:
        """(number, first packet) of each queue pair, for the peer."""

    def connect(self, *, gid_index: int, gid: bytes, lid: int, mtu: int, read_depth: int, queue_pairs: Sequence[tuple[int, int]]) -> None: ...

    def probe(self, pages: Sequence[tuple[int, int]], out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """
        Before it joins a pump: read (address, key) pages into `out`; returns ns.
        """

class VerbsResponder:
    """The passive side of a link."""

    def __init__(self, context: VerbsContext, queue_pairs: int) -> None: ...

    @property
    def names(self) -> list[tuple[int, int]]: ...

    def connect(self, *, gid_index: int, gid: bytes, lid: int, mtu: int, read_depth: int, queue_pairs: Sequence[tuple[int, int]]) -> None: ...

    def close(self) -> None: ...

class VerbsExport:
    """Memory that peers may read, registered in pieces."""

    def __init__(self, context: VerbsContext, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], piece_bytes: int = 68719476736) -> None: ...

    @property
    def places(self) -> list:
        """(first page, pages, address, key) of each piece."""

    def close(self) -> None: ...

class Pump:
    """
    One native thread that serves the rings of many channels.

    Every method may be called from any thread, before and after start().
    ValueError names what the caller got wrong; RuntimeError what the system
    refused (transport='io_uring' where there is none; 'auto' falls back to
    threads and says why in transport_reason) or a pump that is stopped.
    crc_sample checks the CRC of one page in so many, 0: of none; always that of a
    page that is read once more or comes from a peer.
    play_base_us, play_page_us: for measurements, play a device whose burst of n
    pages takes base + n * page, each device its own or play_queues of them;
    transport='memory' copies from mapped files.
    guardian=True makes the engine's side of docs/protocol.md, 'Two servers': it
    takes a ring whose daemon stands still for suspect_ms while a request waits,
    and gives it back; end_rank ends the process when a GPU ring's request fails.
    remote=True allows tables in other nodes' memory; a read of one that lies
    nowhere else waits remote_hold_ms for its peer.
    """

    def __init__(self, *, transport: str = 'auto', queue_depth: int = 128, read_threads: int = 16, spin_us: int = 50, park_us: int = 50, crc_sample: int = 16, checks: bool = True, cpu: int = -1, seed: int = 0, play_base_us: float = 0.0, play_page_us: float = 0.0, play_queues: int = 0, guardian: bool = False, suspect_ms: int = 20, end_rank: bool = False, remote: bool = False, remote_hold_ms: int = 5000) -> None: ...

    @property
    def transport(self) -> str:
        """'io_uring', 'threads', 'memory' or 'simulated'."""

    @property
    def transport_reason(self) -> str:
        """'' or why not io_uring, fixed buffers or fixed files."""

    @property
    def wake_fd(self) -> int:
        """An eventfd, owned by the pump."""

    def add_device(self, fd: int) -> int:
        """
        Duplicate a descriptor that is open for reading; returns the device's number.
        """

    def remove_device(self, device: int) -> None:
        """ValueError while a table has an extent on it."""

    def add_remote(self) -> int:
        """
        A device that is one image in a peer's memory; away until link_remote().
        """

    def link_remote(self, link: RemoteLink, devices: Mapping[int, Sequence[tuple[int, int, int, int]]]) -> bool:
        """
        Read {device: [(first page, pages, address, key), ...]} through a link from now on;
        False if it failed meanwhile. Its own methods are the pump's from here on.
        """

    def drop_link(self, link: RemoteLink, why: str) -> None:
        """End a link, as if its peer had gone."""

    def add_table(self, *, image_id: int, generation: int, row_bytes: int, rows: int, window_ns: int, extents: Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], copies: Sequence[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]] = []) -> int:
        """
        Serve an image whose pages lie where `extents` (uint64 [n, 4]: first_page, pages,
        device, device_page; sorted, no holes) says; returns the table's number. `copies` are
        extents of the same pages on other devices: a page that fails twice is read there.
        """

    def remove_table(self, table: int) -> None:
        """ValueError while a ring uses it."""

    def add_channel(self, fd: int) -> int:
        """
        Map a client's sealed memfd; returns the channel's number. ValueError names what is
        wrong with it.
        """

    def add_ring(self, channel: int, ring: int, table: int) -> None:
        """
        Serve one ring of a channel from a table, going on behind its last answered request.
        """

    def remove_channel(self, channel: int, timeout_ms: int = -1) -> bool:
        """
        Wait until its reads are reaped, then answer what is outstanding with `cancelled`,
        unless a guardian will answer it. False if reads are left after `timeout_ms` (-1:
        never); call again then. It takes nothing new meanwhile.
        """

    def start(self) -> None: ...

    def stop(self, timeout_ms: int = -1) -> bool:
        """
        As remove_channel for all, then end. Idempotent. False if reads are left: then the
        thread goes on, and the process has to end without letting go of the pump.
        """

    @property
    def beats(self) -> int:
        """The loop counter; never waits, not even for a loop that stands still."""

    def leave(self) -> None:
        """Ask the guardians of all rings to take over."""

    def alarm(self) -> None:
        """A guardian's: take every ring from the daemon now."""

    def turn(self) -> None:
        """
        One round of a simulated pump's loop (transport='simulated': no thread, simulated
        devices, everything by `seed`).
        """

    def abandon(self) -> None:
        """
        Leave a simulated pump as a killed process would: nothing more is answered.
        """

    def stats(self, timeout_ms: int = -1) -> dict:
        """
        TimeoutError if the loop stands still for `timeout_ms` (-1: wait for ever).
        Plain counters: requests, pages (of requests answered ok), failed {status: requests},
        jumps (nonsense doorbells), takeovers, staged (pages found where a
        hint left them), read_ns (of all requests,
        from seeing the doorbell to answering), reads, retries, next_tier (reads
        of a copy, after the retry), passed_over (pages whose first tier was known to
        be away), crc_checked, in_flight,
        in_flight_max, parks, wakes, beats, held_back (looks at a request whose pages were
        still being read into), cpu_user_ns and cpu_system_ns of the pump's
        thread, latency_us (reads from submission to reaping; entry i counts those below
        2^i us; of each device too), rings (each with read_times: 40 uint64 as bytes, requests
        by the time that read_ns adds up; entry 0 below 8 us, each bound sqrt(2) times the
        last), devices, transport, transport_reason.
        """

class Channel:
    """
    A client's shared memory: a sealed memfd with one or more rings.

    Each ring is (rows_max, arena_pages, table, flags). ValueError for sizes
    that the protocol forbids, OSError if the memory is refused.
    """

    def __init__(self, *, rank: int, world: int, client_id: bytes, rings: Sequence[tuple[int, int, int, int]]) -> None: ...

    @property
    def fd(self) -> int:
        """The memfd, owned by the channel."""

    @property
    def bytes(self) -> int: ...

    @property
    def ring_count(self) -> int: ...

    def control(self, ring: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """A writable view (uint8) of the ring's RingControl."""

    def buffer(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """A writable view (uint8) of the whole channel."""

class RingClient:
    """
    Raw requests on one ring, no cache: for benches, probes and tests.

    One thread at a time, or one that publishes and one that waits and
    retires. `first_sequence` starts an untouched ring near 2^32.
    """

    def __init__(self, channel: Channel, ring: int, wake_fd: int, *, spin_us: int = 50, first_sequence: int = 0) -> None: ...

    def publish(self, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], priority: int = 0, *, timeout_ns: int = 10000000000) -> int:
        """
        Publish one request (uint32 arrays of one length); returns its sequence. Waits for
        room; TimeoutError if no other thread retires within `timeout_ns`.
        """

    def wait(self, sequence: int, timeout_ns: int) -> int:
        """Wait for the answer; returns its Status. TimeoutError."""

    def drive(self, pump: Pump) -> None:
        """From now on waits turn this simulated pump instead of sleeping."""

    def rewake(self, wake_fd: int) -> None:
        """From now on publishing wakes the pump with this eventfd (duplicated)."""

    def pages(self, sequence: int) -> NDArray[numpy.uint8]:
        """
        A copy [count, 4096] of the pages of an answered request that is not retired.
        """

    def retire(self, sequence: int) -> None:
        """Give the pages of the oldest outstanding request back."""

    def replay(self, pages: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], batch: int, depth: int) -> float:
        """
        Read every page of the list, `batch` a request, `depth` requests outstanding, and
        check that each succeeds; returns seconds.
        """

    def stats(self) -> dict:
        """The counters of RingStats that a raw client keeps, by name."""

def decode_rows(rows: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu', writable=False)], dim: int, row_format: str, *, canonical_zero: bool = False, portable: bool = False) -> NDArray:
    """
    Rows as stored (uint8 [..., row_bytes]) to bf16 bits (uint16 [..., dim]), exactly as
    the engine's kernel does; raw rows are copied (uint8). `canonical_zero` turns -0 into
    +0; `portable` keeps to the baseline instruction set.
    """

class RowCache:
    """
    A pool of row slots, 32 ways in each of `sets` sets, shared by tables
    of one row size. `first_stamp` lets tests start near a stamp's end.
    """

    def __init__(self, *, sets: int, row_bytes: int, first_stamp: int = 0) -> None: ...

    @property
    def sets(self) -> int:
        """Sets in use."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def kicks(self) -> int:
        """Kicks of all tables, plus first_stamp."""

    def resize(self, sets: int) -> None:
        """
        Sets in use from now on, at most those made. Fewer sets clear the rest's words.
        """

    def held(self, table: int) -> int:
        """Slots that hold (or await) rows of a table."""

class TwinTable:
    """
    One table on the CPU twin: kick looks rows up and asks for the missing
    ones, gather waits for them and decodes. A call waits for one in
    progress. Ids are int64 or int32, any shape, strided or not.
    """

    def __init__(self, cache: RowCache, channel: Channel, ring: int, wake_fd: int, *, table: int, image_id: int, generation: int, rows: int, dim: int, row_format: str, quota: int, timeout_ns: int = 10000000000, spin_us: int = 50, canonical_zero: bool = False) -> None: ...

    def kick(self, ids: Annotated[NDArray, dict(device='cpu', writable=False)]) -> None:
        """
        Look up and claim; publish requests for what is missing. IndexError names an id
        outside the table (nothing has changed then).
        """

    def gather(self, ids: Annotated[NDArray, dict(device='cpu', writable=False)], out: Annotated[NDArray, dict(device='cpu')]) -> None:
        """
        Write the rows of `ids` into `out` [*ids.shape, dim], contiguous: bf16 bits
        (uint16, int16 or bfloat16), or bytes for raw rows. Ids other than the last kicked
        ones are looked up and demanded now. RuntimeError if a request fails; `out` is
        undefined then.
        """

    def drive(self, pump: Pump) -> None:
        """From now on waits turn this simulated pump instead of sleeping."""

    def rewake(self, wake_fd: int) -> None:
        """From now on kicks wake the pump with this eventfd (duplicated)."""

    def set_quota(self, ways: int) -> None:
        """Ways per set that the table may hold; nothing is flushed."""

    def set_timeout(self, timeout_ns: int) -> None:
        """
        The most that one kick or gather waits for the servers, from the next call on.
        """

    def stats(self) -> dict:
        """The ring's counters (RingStats) by name."""

class SimZone(enum.IntEnum):
    roots = 0

    tables = 1

    data = 2

class SimLoss(enum.IntEnum):
    """What becomes of unflushed writes at a power loss."""

    random = 0

    none = 1

    all = 2

    first = 3

    last = 4

    torn = 5

class SimFault(enum.IntEnum):
    short_read = 0

    read_error = 1

    dead_page = 2

    slow_read = 3

    misdirected_read = 4

    stale_read = 5

    flipped_read = 6

    rotten_page = 7

    write_error = 8

    lost_write = 9

    torn_write = 10

    misdirected_write = 11

    flush_error = 12

class SimRandom:
    """The simulator's generator (splitmix64)."""

    def __init__(self, seed: int) -> None: ...

    def next(self) -> int: ...

    def below(self, limit: int) -> int:
        """0 .. limit - 1"""

class SimPower:
    """The power of a simulated machine, shared by its devices."""

    def __init__(self) -> None: ...

    def cut_after(self, operations: int) -> None:
        """Cut it right before that write or flush, counted from now."""

    def cut_after_flushes(self, flushes: int) -> None:
        """Cut it right before that flush, counted from now."""

    def cut_never(self) -> None: ...

    def restore(self) -> None: ...

    @property
    def cut(self) -> bool: ...

    @property
    def operations(self) -> int:
        """Writes and flushes so far."""

class SimSnapshot:
    pass

class SimDevice:
    """
    A disk in memory with a volatile cache and seeded faults.

    read, write, flush and discard return bytes or a negative errno;
    -ESHUTDOWN once the power was cut.
    """

    def __init__(self, bytes: int, *, tables_start: int, data_start: int, seed: int, power: SimPower) -> None: ...

    @property
    def bytes(self) -> int: ...

    @property
    def fd(self) -> int:
        """A memfd of the same size, owned by the device."""

    def set_fault(self, fault: SimFault, zone: SimZone, millionths: int, limit: int) -> None:
        """How often among a zone's operations, and how many times at most."""

    def clear_faults(self) -> None: ...

    def read(self, offset: int, target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int: ...

    def write(self, offset: int, source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def flush(self) -> int: ...

    def discard(self, offset: int, size: int) -> int: ...

    def settle(self, loss: SimLoss) -> None:
        """After a power cut: decide what became of the unflushed writes."""

    @property
    def unflushed(self) -> int: ...

    def peek(self, offset: int, target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Read without faults."""

    def poke(self, offset: int, source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Change bytes at rest."""

    def damaged(self, page: int) -> bool:
        """
        Whether a device page is known to differ from what was written, or is dead.
        """

    def rot(self, page: int) -> None:
        """Flip one bit of a device page at rest."""

    def condemn(self, page: int) -> None:
        """Count a device page as damaged from now on, until it is written."""

    def dead(self, page: int) -> bool:
        """Whether reads of the device page fail for ever."""

    def faulty_reads(self, page: int) -> int:
        """
        Times that a read of the device page gave anything but its right bytes.
        """

    def flipped_reads(self, page: int) -> int:
        """Of those, times that a bit of it was flipped on the way."""

    def counts(self) -> dict:
        """Faults reached: name -> (roots, tables, data)."""

    def scars(self, zone: SimZone) -> int:
        """Faults that left a mark in the zone."""

    def snapshot(self) -> SimSnapshot: ...

    def restore(self, snapshot: SimSnapshot) -> None: ...

class Watchdog:
    """
    A native thread that sees whether pumps and the event loop still turn.

    What stands still for `interval_ms` is stuck; with `ends` the process is
    aborted after another interval.
    """

    def __init__(self, *, interval_ms: int, ends: bool) -> None: ...

    def watch(self, name: str, pump: Pump) -> None:
        """Watch a running pump's loop."""

    def beat(self) -> None:
        """Tell that the event loop turns."""

    @property
    def stuck(self) -> str:
        """'' or the names of what stands still."""

    def stop(self) -> None:
        """Idempotent."""

def probe_reads(fd: int, *, pages: int, depth: int, seconds: float, seed: int) -> dict:
    """
    Read random pages of [0, pages) with `depth` reads in flight for `seconds`, by the same
    readers as a pump. Returns reads, errors, first_error (errno; 0 for a short read),
    seconds, p50_us, p99_us, transport and reason (why not io_uring).
    """

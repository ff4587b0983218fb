"""What the REST interface answers with. Units are in the names."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What every answer is."""

    # Each answer's serializer is built when it is first sent: all at once cost a tenth of the
    # daemon's start.
    model_config = ConfigDict(defer_build=True)


class Device(Answer):
    """A device whose images are served."""

    path: str
    uuid: str
    size_bytes: int
    free_bytes: int
    block_bytes: int
    direct: bool  # whether reads bypass the page cache
    direct_reason: str  # why not, "" when they do
    images: int
    note: str  # what was odd when it was opened; mostly ""


class Devices(Answer):
    """GET /v1/devices."""

    devices: list[Device]


class AbsentDevice(Answer):
    """A configured device that could not be opened."""

    device: str
    reason: str


class IncompleteImage(Answer):
    """An image that is not served."""

    name: str
    reason: str  # which device it lacks, or which format it has


class Pump(Answer):
    """A native thread that serves rings; counters since the daemon's start."""

    transport: str
    transport_reason: str  # why not io_uring, or not all of it; "" when there is nothing to say
    requests: int  # answered
    pages: int  # of requests answered ok
    failed: dict[str, int]  # requests, by status
    reads: int
    retries: int
    next_tier: int  # pages read from a copy of the image, after the retry
    passed_over: int  # pages whose first tier, a peer, was known to be away
    crc_checked: int
    in_flight: int
    in_flight_max: int
    parks: int
    wakes: int
    beats: int  # loops
    held_back: int  # looks at a request whose pages were still being read into
    jumps: int  # doorbells that were nonsense
    takeovers: int  # times a guardian took a ring
    cpu_user_ns: int
    cpu_system_ns: int


class LossyTable(Answer):
    """A table of which rows that no trace saw are skipped."""

    image: str
    seen_set: str
    seen_share: float  # of its rows


class History(Answer):
    """Whether events are being kept."""

    degraded: str  # why not; "" while they are
    lost: int


class Refusal(Answer):
    """An engine that is too old or too new for this daemon; its guardian serves it meanwhile."""

    pid: int
    at: str
    reason: str


class Scrub(Answer):
    """The check of every page in the background."""

    state: str  # off, running, resting (between passes) or failed
    image: str  # under the walker; "" between images
    next_page: int  # of it
    images_done: int  # in this pass
    passes: int
    finished_at: float  # end of the last pass, Unix time; 0 if there was none
    bad_pages: int  # known now, of all images
    damaged: dict[str, list[str]]  # image -> what is wrong with it
    save_error: str  # why progress cannot be kept; "" while it can
    fault: str  # why it gave up; "" while it has not


class Peer(Answer):
    """A node whose exports are read here."""

    name: str
    up: bool
    reason: str  # why it is not up, or what is amiss although it is; ""
    transport: str
    connects: int
    images: list[str]  # read from it now


class DramImage(Answer):
    """An image in this node's memory, or on its way there."""

    image: str
    state: str  # loading, ready or failed
    reason: str  # why it failed; ""
    pages: int
    loaded_pages: int
    size_bytes: int
    memory: str  # huge pages, or why not; "" before there is any


class Status(Answer):
    """GET /v1/status."""

    name: str
    version: str
    pid: int
    boot_id: str  # new at every start of the daemon
    started_at: str
    uptime_s: float
    devices: list[Device]
    pumps: list[Pump]
    images: int
    absent_devices: list[AbsentDevice]
    incomplete_images: list[IncompleteImage]
    shadowed_images: list[str]  # on a second device too; the first one serves them
    clients: int
    rings: int
    totals: Totals
    history: History
    scrub: Scrub
    session_faults: int
    dram: list[DramImage]  # images that GPUs of this node read from its memory
    exports: int  # images that other nodes may read, or soon will
    exports_fault: str  # why nothing can be exported; ""
    peers: list[Peer]
    lossy: list[LossyTable]  # tables whose never-seen rows are served as zero
    refusals: list[Refusal]  # engines of versions that are not served, newest last
    doctor: Verdict


class Totals(Answer):
    """Sums over the clients attached now, since each attached."""

    lookups: int
    hits: int
    misses: int
    steps: int
    late_steps: int
    stall_ns: int
    failed: int
    hit_ratio: float | None


class Image(Answer):
    """A staged table."""

    volatile: ClassVar[set[str]] = {"clients"}  # no edit, so no part of the ETag

    name: str
    model: str
    table: str
    image_id: str
    generation: int
    kind: str
    layer: int
    group: str
    rows: int
    dim: int
    row_bytes: int
    row_format: str
    pages: int
    size_bytes: int
    fingerprint: str
    digest: str
    digest_kind: str
    tensors: list[str]
    staged_at: str
    device: str  # the home device
    device_uuid: str
    devices: list[str]  # all that hold a share of it, the home first
    copies: list[list[str]]  # devices of the same image's copies, its next tiers
    extents: int
    page_version: int  # format of its pages
    fault: str  # why it cannot be served; "" here, since it is
    clients: int


class Images(Answer):
    """GET /v1/images."""

    images: list[Image]


class Ring(Answer):
    """One table's requests of one client; counters since it attached."""

    image: str
    rows_max: int
    arena_pages: int
    server: str  # daemon, or guardian while the engine serves itself
    outstanding: int
    ways: int | None  # of each set of the client's row cache, of 32; null: it does not say
    hit_ratio: float | None  # null before the first lookup
    lookups: int
    hits: int
    misses: int
    bypasses: int
    demands: int
    steps: int
    late_steps: int
    stall_ns: int
    tag_errors: int
    ring_full: int
    failed: int
    published: int


class Client(Answer):
    """An attached engine rank."""

    client: str
    pid: int
    engine: str
    rank: int
    world: int
    expected_ranks: int
    attached_at: str
    pump: int
    channel_bytes: int
    rings: list[Ring]


class Engine(Answer):
    """The attached ranks of one engine, by its name; ``missing_ranks`` as far as known."""

    engine: str
    attached_ranks: int
    expected_ranks: int
    missing_ranks: list[int]


class Clients(Answer):
    """GET /v1/clients."""

    clients: list[Client]
    engines: list[Engine]


class KvCounters(Answer):
    """What owners of KV leases have counted; entries are blocks of one KV head and layer."""

    steps: int
    bytes: int  # fetched into HBM
    bytes_written: int  # written back to the pool
    admitted: int  # entries
    evicted: int
    wanted: int  # entries that predictions selected
    hit: int  # of them, resident already
    agreed: int  # entries of the exact sets that had been predicted
    judged: int  # entries of the exact sets that were compared
    wrong_owner: int  # entries that carried another owner's header, and were not taken
    stall_ns: int
    requests: int
    sparse_requests: int
    waits: int  # steps that a request sat out because a pool was full
    preemptions: int
    pages_used: int
    bytes_per_step: float | None
    resident_ratio: float | None
    agreement_ratio: float | None


class KvLease(Answer):
    """A part of the host pool that one engine rank has."""

    lease: int
    owner: str
    offset: int
    bytes: int
    counters: KvCounters


class Kv(Answer):
    """GET /v1/kv."""

    pool_bytes: int
    free_bytes: int
    totals: KvCounters  # since the daemon's start, leases that are gone included
    leases: list[KvLease]


class Event(Answer):
    """Something that happened."""

    id: int
    time: str
    kind: str
    subject: str
    details: dict[str, Any]


class Events(Answer):
    """GET /v1/events, newest first."""

    events: list[Event]


class Health(Answer):
    """GET /healthz."""

    status: str
    pumps: int


class Ready(Answer):
    """GET /readyz."""

    status: str
    images: int


class Verdict(Answer):
    """What the examination of the machine found, in one word."""

    verdict: Literal["ok", "warning", "problem", "unknown"]  # unknown: not examined (yet)
    problems: int
    warnings: int


class Finding(Answer):
    """One thing that was examined."""

    check: str  # such as io_uring, memlock
    subject: str  # what it is about: a device, or ""
    severity: Literal["ok", "warning", "problem"]
    finding: str  # one line
    cause: str  # why it is so, "" when all is well
    evidence: str  # what was seen
    cure: str  # the one command that cures it, ""


class Doctor(Answer):
    """GET /v1/doctor."""

    verdict: Literal["ok", "warning", "problem", "unknown"]
    examined_at: str | None
    findings: list[Finding]


class Table(Answer):
    """A table as it is served: where it comes from, and how its reads do.

    Counters are sums over all clients since the daemon's start, those that have gone included.
    """

    name: str  # model/table
    image_id: str
    generation: int
    layer: int
    group: str
    rows: int
    row_bytes: int
    tier: Literal["disk", "remote"]
    devices: list[str]
    window_us: float  # what the pumps order reads by
    window_source: Literal["assumed", "placement"]
    clients: int
    lookups: int
    hits: int
    hit_ratio: float | None  # null before the first lookup
    misses: int
    steps: int
    late_steps: int
    late_ratio: float | None
    stall_ns: int
    failed: int
    tag_errors: int


class Tables(Answer):
    """GET /v1/tables."""

    tables: list[Table]


class Tier(Answer):
    """One place that a table's rows are read from."""

    tier: Literal["dram", "disk", "remote"]
    devices: list[str]  # of a remote tier: the peer
    why: str  # it stands where it stands; for a remote one that is away: why it is
    linked: bool | None = None  # whether a remote one can be read now
    read_us: float | None = None  # of `read_pages` drawn pages, when it was linked
    read_pages: int = 0
    transport: str = ""
    mtu: int = 0
    gid: str = ""


class Export(Answer):
    """An image that other nodes may read."""

    name: str
    image_id: str
    generation: int
    fingerprint: str
    pages: int
    size_bytes: int
    state: str  # loading, ready or failed
    reason: str  # why it failed; ""
    loaded_pages: int
    memory: str  # huge pages, or why not


class ExportSession(Answer):
    """A peer that may read."""

    peer: str
    since: str
    links: int


class Exports(Answer):
    """GET /v1/exports."""

    fault: str  # why nothing can be exported; ""
    transport: str  # verbs or nixl; "" before it is open
    ways: list[str]  # how peers reach it, best first
    exports: list[Export]
    sessions: list[ExportSession]


class PeerAnswer(Answer):
    """What a peer needs to read: docs/operating/remote.md."""

    session: str
    lease_s: float
    revision: int
    version: int
    # Of verbs:
    port: dict[str, Any] | None = None
    gid: dict[str, Any] | None = None
    peer_gid: dict[str, Any] | None = None
    mtu: int = 0
    read_depth: int = 0
    links: list[list[tuple[int, int]]] = []
    # Of NIXL: its agent's metadata, base64.
    agent: str = ""
    images: list[dict[str, Any]]


class PeerRenewed(Answer):
    """A session goes on."""

    lease_s: float
    revision: int


class PeerClosed(Answer):
    """A session is over."""

    closed: bool


class Placement(Answer):
    """Where a table is read from, in order, and by when."""

    image: str
    tiers: list[Tier]  # a page that fails in one is read from the next
    window_us: float | None  # what the operator said; null: the controller's, or a guess by layer


class Placements(Answer):
    """GET /v1/placements."""

    # Tiers come, go and load by themselves; an edit is of windows.
    volatile: ClassVar[Any] = {"placements": {"__all__": {"tiers"}}}

    placements: list[Placement]


class DryRun(Answer):
    """What a change would do; nothing was done."""

    dry_run: Literal[True] = True
    changes: list[str]  # one line each; empty: nothing would change


class Progress(Answer):
    """How far a job is."""

    done_bytes: int
    total_bytes: int | None  # null until it is known
    bytes_per_s: float | None
    left_s: float | None  # at the rate so far
    doing: str


class Job(Answer):
    """Long work of the daemon."""

    job: str
    kind: str
    subject: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    caller: str  # who asked for it
    request: dict[str, Any]
    created_at: str
    started_at: str | None
    finished_at: str | None
    progress: Progress
    result: dict[str, Any] | None
    error: str  # one line; "" unless it failed or was cancelled


class Jobs(Answer):
    """GET /v1/jobs, newest first."""

    jobs: list[Job]


Status.model_rebuild()

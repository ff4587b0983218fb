"""What the REST interface answers with. Units are in the names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Device(BaseModel):
    """A device whose images are served."""

    path: str
    uuid: str
    size_bytes: int
    free_bytes: int
    direct: bool  # whether reads bypass the page cache
    direct_reason: str  # why not, "" when they do
    images: int


class AbsentDevice(BaseModel):
    """A configured device that could not be opened."""

    device: str
    reason: str


class IncompleteImage(BaseModel):
    """An image that is not served."""

    name: str
    reason: str  # which device it lacks, or which format it has


class Pump(BaseModel):
    """A native thread that serves rings; counters since the daemon's start."""

    transport: str
    transport_reason: str  # why not io_uring, or not all of it; "" when there is nothing to say
    requests: int  # answered
    pages: int  # of requests answered ok
    failed: dict[str, int]  # requests, by status
    reads: int
    retries: int
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


class History(BaseModel):
    """Whether events are being kept."""

    degraded: str  # why not; "" while they are
    lost: int


class Refusal(BaseModel):
    """An engine that is too old or too new for this daemon; its guardian serves it meanwhile."""

    pid: int
    at: str
    reason: str


class Status(BaseModel):
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
    session_faults: int
    refusals: list[Refusal]  # engines of versions that are not served, newest last


class Totals(BaseModel):
    """Sums over the clients attached now, since each attached."""

    lookups: int
    hits: int
    misses: int
    steps: int
    late_steps: int
    stall_ns: int
    failed: int
    hit_ratio: float | None


class Image(BaseModel):
    """A staged table."""

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
    extents: int
    page_version: int  # format of its pages
    fault: str  # why it cannot be served; "" here, since it is
    clients: int


class Images(BaseModel):
    """GET /v1/images."""

    images: list[Image]


class Ring(BaseModel):
    """One table's requests of one client; counters since it attached."""

    image: str
    rows_max: int
    arena_pages: int
    server: str  # daemon, or guardian while the engine serves itself
    outstanding: int
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


class Client(BaseModel):
    """An attached engine rank."""

    client: str
    pid: int
    engine: str
    rank: int
    world: int
    attached_at: str
    pump: int
    channel_bytes: int
    rings: list[Ring]


class Clients(BaseModel):
    """GET /v1/clients."""

    clients: list[Client]


class Event(BaseModel):
    """Something that happened."""

    id: int
    time: str
    kind: str
    subject: str
    details: dict[str, Any]


class Events(BaseModel):
    """GET /v1/events, newest first."""

    events: list[Event]


class Health(BaseModel):
    """GET /healthz."""

    status: str
    pumps: int


Status.model_rebuild()

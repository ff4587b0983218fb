"""Constants of docs/protocol.md."""

import enum


CHANNEL_MAGIC: int = 1313358676

CHANNEL_ABI: int = 2

CHANNEL_ABI_OLDEST: int = 1

LINE_BYTES: int = 64

RING_DEPTH: int = 8

RINGS_MAX: int = 64

ROWS_MAX_LIMIT: int = 1048576

ARENA_PAGES_LIMIT: int = 2097152

RING_FLAG_GPU: int = 1

RING_FLAG_GUARDED: int = 2

RING_FLAG_HINT: int = 4

SAMPLE_HEADER_BYTES: int = 64

SAMPLE_CAPACITY: int = 4096

SAMPLE_THRESHOLD: int = 67108864

SAMPLE_PREFILL: int = 17179869184

SAMPLE_STAMP_SHIFT: int = 40

HEADER_BYTES: int = 8192

CONTROL_BYTES: int = 1024

STATS_BYTES: int = 128

RING_ENTRY_BYTES: int = 64

OFFSET_RINGS: int = 64

OFFSET_DOORBELL: int = 0

OFFSET_RETIRED: int = 64

OFFSET_WAITER: int = 128

OFFSET_DONE_D: int = 192

OFFSET_STATUS_D: int = 256

OFFSET_BEAT: int = 320

OFFSET_PARKED: int = 384

OFFSET_DRAINED: int = 448

OFFSET_DONE_G: int = 512

OFFSET_STATUS_G: int = 576

OFFSET_TENURE: int = 640

OFFSET_LEAVING: int = 704

OFFSET_QUOTA: int = 768

def descriptor_bytes(rows_max: int) -> int: ...

def sample_hash(row: int) -> int: ...

def array_bytes(rows_max: int) -> int: ...

class Status(enum.IntEnum):
    none = 0

    ok = 1

    read_error = 2

    short_read = 3

    wrong_page = 4

    bad_crc = 5

    bad_request = 6

    cancelled = 7

class Owner(enum.IntEnum):
    daemon = 0

    guardian = 1

class Priority(enum.IntEnum):
    decode = 0

    prefill = 1

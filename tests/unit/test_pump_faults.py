"""The pump and what goes wrong: pages, requests, channels, calls. Only the one at fault suffers."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.pump_rig import PAGE, ROW_BYTES, Client, Image, P, RawChannel, Served
from tierd.io import _core

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = Image.make(200)
TRANSPORTS = ["io_uring", "threads"]
TRAILER = PAGE - 32


def broken(edit: str) -> Image:
    """An image whose page 7 is wrong in one way."""
    data = IMAGE.data.copy()
    page = data[7]
    other = Image.make(10, image_id=IMAGE.image_id + (edit == "image"), generation=9)
    match edit:
        case "image" | "generation":
            page[:] = other.data[7]
        case "number":
            page[:] = data[8]
        case "magic":
            page[TRAILER] ^= 1
        case "version":
            page[TRAILER + 4] ^= 2
        case "rows":
            page[TRAILER + 6] ^= 1
        case "row":
            page[100] ^= 0x10
        case "tag":
            page[ROW_BYTES * 15] ^= 0x80
        case "crc":
            page[PAGE - 1] ^= 1
    return Image(IMAGE.image_id, IMAGE.generation, data)


WRONG = ["image", "generation", "number", "magic", "version", "rows"]
FLIPPED = ["row", "tag", "crc"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("edit", WRONG + FLIPPED)
def test_a_wrong_page_fails_its_request_alone(tmp_path: Path, transport: str, edit: str) -> None:
    image = broken(edit)
    served = Served(tmp_path / "image", image, transport=transport, crc_sample=1)
    client = served.client()
    status = "bad_crc" if edit in FLIPPED else "wrong_page"
    before = client.publish([1, 2])
    bad = client.publish([3, 7, 4, 5])
    after = client.publish([8])
    client.finish(before, [1, 2])
    assert client.wait(bad) == P.Status[status]
    client.ring.retire(bad)
    client.finish(after, [8])
    client.read([6])
    stats = served.pump.stats()
    assert stats["retries"] == 1
    assert {k: v for k, v in stats["failed"].items() if v} == {status: 1}
    assert stats["devices"][0]["errors"] == 2
    served.pump.stop()


def with_copy(tmp_path: Path, image: Image, copy: Image, **options: Any) -> tuple[Served, int]:
    """A pump with a table whose next tier is a copy of the image in another file."""
    served = Served(tmp_path / "image", image, start=False, crc_sample=1, **options)
    (tmp_path / "copy").write_bytes(bytes(8 * PAGE) + copy.data.tobytes())
    fd = os.open(tmp_path / "copy", os.O_RDONLY)
    device = served.pump.add_device(fd)
    os.close(fd)
    table = served.add_table(1_000_000, copies=[[[0, 150, device, 8], [150, 50, device, 158]]])
    served.pump.start()
    return served, table


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("edit", [*WRONG, *FLIPPED, "cut off"])
def test_a_page_that_fails_twice_is_read_from_the_next_tier(
    tmp_path: Path, transport: str, edit: str
) -> None:
    served, table = with_copy(tmp_path, broken(edit), IMAGE, transport=transport)
    if edit == "cut off":
        os.truncate(served.path, 7 * PAGE)
    client = served.client(table=table)
    client.image = IMAGE
    client.read([3, 7, 4, 5] if edit != "cut off" else [3, 7, 6])
    stats = served.pump.stats()
    assert (stats["retries"], stats["next_tier"]) == (1, 1)
    assert not any(stats["failed"].values())
    with pytest.raises(ValueError, match="still holds extents"):
        served.pump.remove_device(1)
    served.pump.stop()


def test_a_page_that_is_bad_in_every_tier_fails_with_a_reason(tmp_path: Path) -> None:
    served, table = with_copy(tmp_path, broken("row"), broken("generation"))
    client = served.client(table=table)
    assert client.fails([1, 7]) == P.Status.wrong_page  # what the last tier said
    client.read([1, 6])
    stats = served.pump.stats()
    assert (stats["retries"], stats["next_tier"]) == (1, 1)
    assert [device["errors"] for device in stats["devices"]] == [2, 1]
    served.pump.stop()


def test_copies_are_checked_as_extents_are(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", IMAGE)
    for copies, text in (
        ([[[0, 10, 0, 0]]], "they end at page 10"),
        ([[[1, 199, 0, 0]]], "expected page 0"),
        ([[[0, 200, 5, 0]]], "no device 5"),
        ([[[0, 200, 0, 0]]] * 8, "at most 7 copies"),
    ):
        with pytest.raises(ValueError, match=text):
            served.add_table(1, copies=copies)
    served.pump.stop()


def test_the_crc_is_sampled_by_a_counter(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", broken("row"), crc_sample=4)
    client = served.client()
    client.read([1, 2])
    assert client.fails([7, 7]) == P.Status.bad_crc  # the fourth page in all
    assert served.pump.stats()["crc_checked"] == 2  # the sample and its retry
    client.read([7, 1, 2])  # the next to be sampled is the fourth from here
    served.pump.stop()


@pytest.mark.parametrize("options", [{"crc_sample": 0}, {"checks": False}])
def test_unsampled_bits_are_left_to_the_consumer(tmp_path: Path, options: dict[str, Any]) -> None:
    served = Served(tmp_path / "image", broken("row"), **options)
    client = served.client()
    for _ in range(40):
        client.read([7])
    assert served.pump.stats()["crc_checked"] == 0
    served.pump.stop()


def test_without_checks_a_foreign_page_passes(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", broken("generation"), checks=False)
    served.client().read([7])
    served.pump.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("left", [0, 512, 4095])
def test_a_cut_off_file_is_a_short_read(tmp_path: Path, transport: str, left: int) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport)
    client = served.client()
    client.read([150])
    os.truncate(served.path, 150 * PAGE + left)
    assert client.fails([1, 150]) == P.Status.short_read
    assert client.fails([160]) == P.Status.short_read
    client.read([149])
    assert served.pump.stats()["retries"] == 2
    served.pump.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_errno_is_a_read_error(tmp_path: Path, transport: str) -> None:
    pump = _core.Pump(transport=transport, read_threads=2)
    directory = os.open(tmp_path, os.O_RDONLY)  # reading one is EISDIR
    device = pump.add_device(directory)
    os.close(directory)
    table = pump.add_table(
        image_id=1,
        generation=1,
        row_bytes=ROW_BYTES,
        rows=1500,
        window_ns=0,
        extents=np.array([[0, 100, device, 0]], np.uint64),
    )
    pump.start()
    channel = _core.Channel(rank=0, world=1, client_id=b"x" * 16, rings=[(8, 8, 0, 0)])
    pump.add_ring(pump.add_channel(channel.fd), 0, table)
    client = _core.RingClient(channel, 0, pump.wake_fd)
    zeros = np.zeros(8, np.uint32)
    assert client.wait(client.publish(zeros, zeros, zeros), 20 * 10**9) == P.Status.read_error
    pump.stop()


# --- requests ------------------------------------------------------------------------------------

ROWS_MAX = 8
DESCRIPTOR = P.descriptor_bytes(ROWS_MAX)


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A pump, a good client and a ring whose memory a test may fill with anything."""
    path = tmp_path_factory.mktemp("pump") / "image"
    served = Served(path, IMAGE, transport=request.param, spin_us=0)
    good = served.client()
    bad = served.client(rows_max=ROWS_MAX, arena_pages=16)
    yield served, good, bad
    served.pump.stop()


def descriptors_of(client: Client) -> np.ndarray:
    at = P.HEADER_BYTES + P.CONTROL_BYTES
    whole = client.channel.buffer()
    return whole[at : at + P.RING_DEPTH * DESCRIPTOR]


WORDS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 8, 9, 15, 16, 199, 200, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 1]),
)
FIELDS = st.sampled_from([0, 4, 8, 12, 64, 68, 92])  # sequence, count, first_page, priority, pages
CONTROL = [
    P.OFFSET_DOORBELL,
    P.OFFSET_RETIRED,
    P.OFFSET_WAITER,
    P.OFFSET_DONE_D,
    P.OFFSET_STATUS_D,
    P.OFFSET_PARKED,
    P.OFFSET_DRAINED,
    P.OFFSET_DONE_G,
    P.OFFSET_TENURE,
    P.OFFSET_TENURE + 4,
]
EDITS = st.one_of(
    st.tuples(st.just("field"), st.integers(0, P.RING_DEPTH - 1), FIELDS, WORDS),
    st.tuples(st.just("control"), st.sampled_from(CONTROL), WORDS),
    st.tuples(st.just("noise"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("request"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("bell"), st.integers(-3, 12)),
)


def apply(client: Client, edit: tuple[Any, ...]) -> None:
    memory = descriptors_of(client)
    bell = client.word(P.OFFSET_DOORBELL)
    match edit:
        case ("field", slot, offset, value):
            at = slot * DESCRIPTOR + offset
            memory[at : at + 4].view(np.uint32)[0] = value
        case ("control", offset, value):
            client.word(offset)[0] = value
        case ("noise", seed):
            memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)
        case ("request", seed):  # nearly right, so that most of it is believed
            rng = np.random.default_rng(seed)
            sequence = (int(bell[0]) + 1) % 2**32
            at = sequence % P.RING_DEPTH * DESCRIPTOR
            words = memory[at : at + DESCRIPTOR].view(np.uint32)
            words[:4] = [sequence, rng.integers(0, 10), rng.integers(0, 18), rng.integers(0, 3)]
            words[16:24] = rng.integers(0, 210, 8)
            bell[0] = sequence
        case ("bell", step):
            bell[0] = (int(bell[0]) + step) % 2**32


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=st.lists(EDITS, min_size=1, max_size=12), page=st.integers(0, IMAGE.pages - 1))
def test_no_request_however_mad_harms_another(pair: Any, edits: list[Any], page: int) -> None:
    served, good, bad = pair
    for edit in edits:
        apply(bad, edit)
    good.read([page, 0, IMAGE.pages - 1])
    stats = served.pump.stats()
    assert stats["in_flight_max"] <= 128
    assert [r["failed"]["bad_request"] for r in stats["rings"] if r["channel"] == good.number] == [
        0
    ]


def test_a_mad_ring_can_come_to_its_senses(pair: Any) -> None:
    _, good, bad = pair
    apply(bad, ("noise", 1))
    bad.set_tenure(0, 77)
    for doorbell in (5000, 12, 2**31 + 5, 0):
        bad.word(P.OFFSET_DOORBELL)[0] = doorbell
        while bad.word(P.OFFSET_DONE_D)[0] != doorbell:
            good.read([3])


def test_a_client_that_never_rests_holds_nobody_back(pair: Any) -> None:
    """A doorbell that jumps all the time is news at every look; others' reads still go out."""
    _, good, bad = pair
    bad.set_tenure(0, 78)
    stop = threading.Event()

    def flood() -> None:
        bell = bad.word(P.OFFSET_DOORBELL)
        while not stop.is_set():
            bell += 1000

    thread = threading.Thread(target=flood)
    thread.start()
    for page in range(20):
        good.read([page, page + 1])
    stop.set()
    thread.join()


def test_bad_requests_are_answered_so(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", IMAGE)
    client = served.client()
    assert client.fails([IMAGE.pages]) == P.Status.bad_request
    assert client.fails([0, 2**32 - 1]) == P.Status.bad_request
    client.read([IMAGE.pages - 1])
    assert served.pump.stats()["failed"]["bad_request"] == 2
    served.pump.stop()


# --- channels and calls --------------------------------------------------------------------------


@pytest.fixture
def pump():
    made = _core.Pump(transport="threads", read_threads=1)
    yield made
    made.stop()


SIZE = 64 * PAGE


def good_entry(raw: RawChannel) -> dict[str, int]:
    control = P.HEADER_BYTES
    stats = control + P.CONTROL_BYTES + P.RING_DEPTH * P.descriptor_bytes(4)
    fields = {
        "control": control,
        "descriptors": control + P.CONTROL_BYTES,
        "stats": stats,
        "arena_d": 16 * PAGE,
        "arena_g": 32 * PAGE,
        "rows_max": 4,
        "arena_pages": 8,
    }
    raw.header(SIZE, 1)
    raw.entry(0, **fields)
    return fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": 5}, "magic"),
        ({"abi": 3}, "ABI 3"),
        ({"total": SIZE + 1}, f"{SIZE + 1} bytes"),
        ({"total": 100}, "100 bytes"),
        ({"rings": 0}, "0 rings"),
        ({"rings": 65}, "65 rings"),
    ],
)
def test_a_bad_header_is_refused(pump: Any, change: dict[str, int], message: str) -> None:
    raw = RawChannel(SIZE)
    good_entry(raw)
    raw.header(**{"total": SIZE, "rings": 1, **change})
    with pytest.raises(ValueError, match=message):
        pump.add_channel(raw.fd)
    raw.close()


def test_what_is_no_channel_is_refused(pump: Any, tmp_path: Path) -> None:
    raw = RawChannel(SIZE, seal=False)
    good_entry(raw)
    with pytest.raises(ValueError, match="not sealed against shrinking"):
        pump.add_channel(raw.fd)
    short = RawChannel(PAGE)
    with pytest.raises(ValueError, match="shorter than a header"):
        pump.add_channel(short.fd)
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file, pytest.raises(ValueError, match="not a memfd"):
        pump.add_channel(file.fileno())
    with pytest.raises(ValueError, match="not open"):
        pump.add_channel(10_000)
    sealed = os.memfd_create("s", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, SIZE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    with pytest.raises(ValueError, match="cannot map it for writing"):
        pump.add_channel(sealed)
    os.close(sealed)
    raw.close()
    short.close()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows_max", 0, "rows_max"),
        ("rows_max", 2**32 - 1, "rows_max"),
        ("arena_pages", 3, "arena_pages"),
        ("arena_pages", 49, "arena D"),
        ("arena_d", 16 * PAGE + 64, "arena D"),
        ("arena_d", 2**64 - PAGE, "arena D"),
        ("arena_g", SIZE - 7 * PAGE, "arena G"),
        ("control", 0, "control"),
        ("control", SIZE - 512, "control"),
        ("descriptors", SIZE - 64, "descriptors"),
        ("stats", P.HEADER_BYTES + 1, "stats"),
        ("table", 64, "table"),
    ],
)
def test_a_bad_ring_is_refused(pump: Any, field: str, value: int, message: str) -> None:
    raw = RawChannel(SIZE)
    fields = good_entry(raw)
    raw.entry(0, **{**fields, field: value})
    table = with_table(pump)
    channel = pump.add_channel(raw.fd)
    with pytest.raises(ValueError, match=message):
        pump.add_ring(channel, 0, table)
    pump.remove_channel(channel)
    pump.remove_table(table)  # nothing kept it
    raw.close()


def with_table(pump: Any) -> int:
    null = os.open("/dev/zero", os.O_RDONLY)
    device = pump.add_device(null)
    os.close(null)
    return int(pump.add_table(**table_spec(device)))


def table_spec(device: int, **change: Any) -> dict[str, Any]:
    extents = change.pop("extents", [[0, 10, device, 0]])
    return {
        "image_id": 1,
        "generation": 1,
        "row_bytes": ROW_BYTES,
        "rows": 150,
        "window_ns": 0,
        "extents": np.array(extents, np.uint64).reshape(-1, 4),
        **change,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows"),
        ({"rows": 151}, "end at page 10, the image has 11"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"row_bytes": 5000}, "row_bytes"),
        ({"rows": 2**40}, "2\\^32 pages"),
        ({"extents": []}, "none given"),
        ({"extents": [[1, 10, 0, 0]]}, "expected page 0, got 1"),
        ({"extents": [[0, 5, 0, 0], [6, 5, 0, 9]]}, "expected page 5, got 6"),
        ({"extents": [[0, 0, 0, 0], [0, 10, 0, 9]]}, "out of range"),
        ({"extents": [[0, 2**60, 0, 0]]}, "out of range"),
        ({"extents": [[0, 10, 0, 2**60]]}, "out of range"),
        ({"extents": [[0, 10, 1, 0]]}, "no device 1"),
        ({"extents": [[0, 10, 2**40, 0]]}, "no device"),
    ],
)
def test_a_bad_table_is_refused(pump: Any, change: dict[str, Any], message: str) -> None:
    with_table(pump)
    with pytest.raises(ValueError, match=message):
        pump.add_table(**table_spec(0, **change))


def test_removal_is_refused_while_something_depends_on_it(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", IMAGE)
    client = served.client()
    with pytest.raises(ValueError, match="still served to 1 rings"):
        served.pump.remove_table(served.table)
    with pytest.raises(ValueError, match="still holds extents"):
        served.pump.remove_device(served.device)
    with pytest.raises(ValueError, match="served already"):
        served.pump.add_ring(client.number, 0, served.table)
    with pytest.raises(ValueError, match="has no ring 1"):
        served.pump.add_ring(client.number, 1, served.table)
    with pytest.raises(ValueError, match="no table 9"):
        served.pump.add_ring(client.number, 0, 9)
    client.read([1])
    served.pump.remove_channel(client.number)
    for call in (served.pump.remove_channel, served.pump.remove_table, served.pump.remove_device):
        with pytest.raises(ValueError, match="there is no"):
            call(99)
    with pytest.raises(ValueError, match="there is no channel"):
        served.pump.remove_channel(client.number)
    served.pump.remove_table(served.table)
    served.pump.remove_device(served.device)
    (device,) = served.pump.stats()["devices"]
    assert (device["device"], device["reads"], device["errors"]) == (0, 1, 0)
    served.pump.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "magic"}, "magic"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"queue_depth": 5000}, "between 1 and 4096, got 5000"),
        ({"read_threads": 0}, "read_threads"),
        ({"read_threads": 1000}, "read_threads"),
        ({"park_us": 0}, "park_us"),
        ({"cpu": 4000}, "cpu 4000"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Pump(**options)


def test_devices_must_be_readable(pump: Any, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file, pytest.raises(ValueError, match="for reading"):
        pump.add_device(file.fileno())
    with pytest.raises(ValueError, match="not open"):
        pump.add_device(10_000)


def test_a_stopped_pump_says_so(tmp_path: Path) -> None:
    served = Served(tmp_path / "image", IMAGE)
    client = served.client()
    with pytest.raises(RuntimeError, match="runs already"):
        served.pump.start()
    client.read([1])
    served.pump.stop()
    served.pump.stop()
    for call in (served.pump.start, served.client, lambda: served.add_table(1)):
        with pytest.raises(RuntimeError, match="stopped"):
            call()
    assert served.pump.stats()["pages"] == 1
    served.pump.remove_table(served.table)
    with pytest.raises(ValueError, match="no device"):  # the descriptors went with the stop
        served.pump.remove_device(served.device)

"""The pump serves: the right pages, in order, within its bounds, parked or spinning."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.unit.pump_rig import (
    PAGE,
    ROW_BYTES,
    ROWS_PER_PAGE,
    SECOND,
    Client,
    Image,
    P,
    RawChannel,
    Served,
)
from tierd.io import _core

IMAGE = Image.make(700)
TRANSPORTS = ["io_uring", "threads"]


@pytest.fixture(params=TRANSPORTS)
def served(request: pytest.FixtureRequest, tmp_path: Path):
    made = Served(tmp_path / "image", IMAGE, transport=request.param)
    yield made
    made.pump.stop()


def test_transport_is_what_was_asked_for(served: Served) -> None:
    stats = served.pump.stats()
    assert stats["transport"] == served.pump.transport
    assert stats["transport_reason"] == served.pump.transport_reason == ""


@pytest.mark.parametrize("spin_us", [0, 50])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("direct", [True, False])
def test_pages_arrive(tmp_path: Path, transport: str, spin_us: int, direct: bool) -> None:
    path = tmp_path / "image"
    if not direct:
        path = Path(f"/dev/shm/tierd-test-{os.getpid()}")  # tmpfs may not know O_DIRECT
    try:
        served = Served(path, IMAGE, transport=transport, spin_us=spin_us, crc_sample=1)
        client = served.client()
        rng = np.random.default_rng(1)
        for _ in range(30):
            client.read(rng.integers(0, IMAGE.pages, rng.integers(1, 33)))
        stats = served.pump.stats()
        assert stats["requests"] == 30
        assert stats["pages"] == stats["reads"] == stats["crc_checked"] == sum(stats["latency_us"])
        assert sum(stats["failed"].values()) == stats["retries"] == stats["in_flight"] == 0
        served.pump.stop()
    finally:
        path.unlink()


def test_first_and_last_page_and_repeats(served: Served) -> None:
    served.client().read([0, IMAGE.pages - 1, 5, 5, 5])


def test_several_requests_out_at_once(served: Served) -> None:
    client = served.client(rows_max=64, arena_pages=500)
    rng = np.random.default_rng(2)
    out: list[tuple[int, np.ndarray]] = []
    for _ in range(60):
        if len(out) == P.RING_DEPTH or (out and rng.random() < 0.3):
            client.finish(*out.pop(0))
        else:
            pages = rng.integers(0, IMAGE.pages, rng.integers(1, 55))
            out.append((client.publish(pages, int(rng.integers(0, 2))), pages))
    for sequence, pages in out:
        client.finish(sequence, pages)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reads_in_flight_are_bounded(tmp_path: Path, transport: str) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport, queue_depth=5)
    clients = [served.client(rows_max=50, arena_pages=400) for _ in range(3)]
    rng = np.random.default_rng(3)
    for _ in range(4):
        asked = [rng.integers(0, IMAGE.pages, 50) for _ in clients]
        sequences = [c.publish(pages) for c, pages in zip(clients, asked, strict=True)]
        for client, sequence, pages in zip(clients, sequences, asked, strict=True):
            client.finish(sequence, pages)
    assert served.pump.stats()["in_flight_max"] == 5
    served.pump.stop()


def test_sequences_pass_the_wrap(served: Served) -> None:
    client = served.client(first_sequence=2**32 - 5)
    for i in range(20):
        client.read([i, i + 1])
    assert client.word(P.OFFSET_DONE_D)[0] == 15


def test_many_channels_tables_and_devices(tmp_path: Path) -> None:
    images = [Image.make(300, image_id=10 + i, generation=3 + i) for i in range(2)]
    files = [tmp_path / f"device{i}" for i in range(3)]
    rng = np.random.default_rng(4)
    # Each image is cut into runs of odd lengths that go round the devices.
    contents: list[list[np.ndarray]] = [[] for _ in files]
    extents: list[list[list[int]]] = []
    for image in images:
        rows, at = [], 0
        while at < image.pages:
            n = int(min(rng.integers(1, 40), image.pages - at))
            device = len(rows) % len(files)
            rows.append([at, n, device, sum(len(c) for c in contents[device])])
            contents[device].append(image.data[at : at + n])
            at += n
        extents.append(rows)
    pump = _core.Pump(read_threads=3, spin_us=0, crc_sample=1)
    for path, parts in zip(files, contents, strict=True):
        path.write_bytes(b"".join(p.tobytes() for p in parts))
        with path.open("rb") as file:
            pump.add_device(file.fileno())
    tables = [
        pump.add_table(
            image_id=image.image_id,
            generation=image.generation,
            row_bytes=ROW_BYTES,
            rows=image.pages * ROWS_PER_PAGE,
            window_ns=0,
            extents=np.array(rows, np.uint64),
        )
        for image, rows in zip(images, extents, strict=True)
    ]
    pump.start()

    def use(seed: int) -> None:
        rng = np.random.default_rng(seed)
        rings = [(16, 64, 0, 0), (16, 64, 1, 0)]
        channel = _core.Channel(rank=0, world=1, client_id=b"x" * 16, rings=rings)
        number = pump.add_channel(channel.fd)
        clients = []
        for ring in (1, 0):  # in any order
            pump.add_ring(number, ring, tables[ring])
            clients.append((_core.RingClient(channel, ring, pump.wake_fd), images[ring]))
        for _ in range(25):
            for client, image in clients:
                pages = rng.integers(0, image.pages, 12).astype(np.uint32)
                sequence = client.publish(pages, pages, pages)
                assert client.wait(sequence, 20 * SECOND) == P.Status.ok
                assert np.array_equal(client.pages(sequence), image.data[pages])
                client.retire(sequence)
        pump.remove_channel(number)

    failures: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            use(seed)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stats = pump.stats()
    assert stats["pages"] == 4 * 25 * 2 * 12
    assert stats["rings"] == []
    assert sum(d["reads"] for d in stats["devices"]) == stats["reads"]
    assert all(d["reads"] and not d["errors"] for d in stats["devices"])
    pump.stop()


# --- deadline order ------------------------------------------------------------------------------


def overlapping_rings(rings: int) -> RawChannel:
    """A channel whose rings share one arena page: what is read last stays there."""
    arena = P.HEADER_BYTES + rings * 4096
    raw = RawChannel(arena + PAGE)
    raw.header(arena + PAGE, rings)
    for ring in range(rings):
        control = P.HEADER_BYTES + ring * 4096
        raw.entry(
            ring,
            control=control,
            descriptors=control + P.CONTROL_BYTES,
            stats=control + P.CONTROL_BYTES + P.RING_DEPTH * P.descriptor_bytes(1),
            arena_d=arena,
            arena_g=arena,
            rows_max=1,
            arena_pages=1,
        )
    return raw


def publish_raw(raw: RawChannel, ring: int, page: int, priority: int) -> None:
    control = P.HEADER_BYTES + ring * 4096
    descriptor = control + P.CONTROL_BYTES + P.descriptor_bytes(1)
    for i, word in enumerate([1, 1, 0, priority]):
        raw.u32(descriptor + 4 * i, word)
    raw.u32(descriptor + 64, page)
    raw.u32(control + P.OFFSET_DOORBELL, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("windows", "priorities", "last"),
    [
        ([8_000_000, 1_000_000], [0, 0], 0),  # layer 14 after layer 1
        ([1_000_000, 8_000_000], [0, 0], 1),
        ([0, 10_000_000_000], [1, 0], 0),  # prefill last, however short its window
        ([5_000_000, 5_000_000], [0, 0], 1),  # equals in the order of their rings
        ([2**64 - 1, 2**63], [0, 1], 1),
        ([3, 9, 6], [0, 0, 0], 1),
    ],
)
def test_reads_go_out_by_deadline(
    tmp_path: Path, transport: str, windows: list[int], priorities: list[int], last: int
) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport, queue_depth=1, start=False)
    raw = overlapping_rings(len(windows))
    channel = served.pump.add_channel(raw.fd)
    for ring, (window, priority) in enumerate(zip(windows, priorities, strict=True)):
        served.pump.add_ring(channel, ring, served.add_table(window))
        publish_raw(raw, ring, 100 + ring, priority)
    served.pump.start()  # finds all of them at its first look
    while served.pump.stats()["requests"] != len(windows):
        pass
    page = raw.memory[-PAGE:]
    assert page == IMAGE.data[100 + last].tobytes()
    served.pump.stop()
    raw.close()


# --- parking -------------------------------------------------------------------------------------


def wait_until_parked(client: Client) -> None:
    while client.word(P.OFFSET_PARKED)[0] != 1:
        pass


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_parked_pump_is_woken(tmp_path: Path, transport: str) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport, spin_us=0)
    client = served.client()
    for i in range(20):
        wait_until_parked(client)
        client.read([i])
    stats = served.pump.stats()
    assert stats["wakes"] >= 10  # some are rung while the pump is awake for another reason
    assert stats["parks"] >= 20
    served.pump.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_wake_up_is_survived(tmp_path: Path, transport: str) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport, spin_us=0)
    client = served.client(wake=False)
    for i in range(3):
        wait_until_parked(client)
        client.read([i])
    served.pump.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gpu_ring_rings_nobody(tmp_path: Path, transport: str) -> None:
    served = Served(tmp_path / "image", IMAGE, transport=transport, spin_us=0, park_us=50)
    client = served.client(wake=False, flags=P.RING_FLAG_GPU)
    before = served.pump.stats()
    for i in range(20):
        client.read([i])
    # Asking rings, and may be answered before its ring is counted: both may lie in between.
    assert served.pump.stats()["wakes"] - before["wakes"] <= 2
    # It looks up every 50 us; at the pace of an idle pump without a GPU this would take minutes.
    beat = int(client.word(P.OFFSET_BEAT)[0])
    while client.word(P.OFFSET_BEAT)[0] - beat < 2000:
        pass
    served.pump.stop()


def test_beat_moves_while_idle_clients_are_attached(served: Served) -> None:
    client = served.client()
    beat = int(client.word(P.OFFSET_BEAT)[0])
    while client.word(P.OFFSET_BEAT)[0] == beat:
        pass


def test_a_client_with_its_own_eventfd_flags_does_no_harm(tmp_path: Path) -> None:
    """A client holds the pump's eventfd; making it blocking must not make the pump block."""
    for transport in TRANSPORTS:
        served = Served(tmp_path / "image", IMAGE, transport=transport, spin_us=0)
        client = served.client()
        os.set_blocking(served.pump.wake_fd, True)
        for i in range(5):
            wait_until_parked(client)
            client.read([i])
            os.write(served.pump.wake_fd, (1).to_bytes(8, "little"))
        served.pump.stop()


# --- statistics and threads ----------------------------------------------------------------------


def pump_threads() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(t.name) for t in tasks if (t / "comm").read_text().strip() == "tierd-pump"]


def test_cpu_pins_the_thread(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    served = Served(tmp_path / "image", IMAGE, cpu=cpu)
    served.pump.stats()  # the thread has started
    (thread,) = pump_threads()
    assert os.sched_getaffinity(thread) == {cpu}
    served.pump.stop()
    assert pump_threads() == []


def test_cpu_time_is_the_pump_threads(served: Served) -> None:
    client = served.client()
    while served.pump.stats()["cpu_user_ns"] + served.pump.stats()["cpu_system_ns"] == 0:
        client.read([1, 2, 3])
    served.pump.stop()
    assert served.pump.stats()["cpu_user_ns"] + served.pump.stats()["cpu_system_ns"] > 0


def test_statistics_name_rings_and_devices(served: Served) -> None:
    client = served.client()
    client.read([1, 2, 3])
    stats = served.pump.stats()
    (ring,) = stats["rings"]
    assert {k: ring[k] for k in ("channel", "ring", "table", "serving", "in_flight")} == {
        "channel": client.number,
        "ring": 0,
        "table": served.table,
        "serving": True,
        "in_flight": 0,
    }
    assert (ring["requests"], ring["pages"]) == (1, 3)
    (device,) = stats["devices"]
    assert sum(device.pop("latency_us")) == 3
    assert device == {"device": served.device, "reads": 3, "errors": 0, "in_flight": 0}
    # One request, in the bucket that its own time says; bounds are 8 us * sqrt(2)^i.
    times = np.frombuffer(ring["read_times"], np.uint64)
    bounds_ns = 8000 * 2 ** (np.arange(len(times) - 1) / 2)
    assert times.sum() == 1
    assert times[np.searchsorted(bounds_ns, ring["read_ns"], side="right")] == 1
    served.pump.remove_channel(client.number)
    assert served.pump.stats()["pages"] == 3  # kept beyond the ring


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def counts() -> tuple[int, int, str]:
        maps = Path("/proc/self/maps").read_text().count("tierd-channel")
        status = Path("/proc/self/status").read_text().splitlines()
        pinned = next(line for line in status if line.startswith("VmPin"))
        return len(os.listdir("/proc/self/fd")), maps, pinned

    def cycle(transport: str, clean: bool) -> None:
        served = Served(tmp_path / "image", IMAGE, transport=transport)
        client = served.client()
        client.read([1])
        if clean:
            served.pump.remove_channel(client.number)
            served.pump.remove_table(served.table)
            served.pump.remove_device(served.device)
            served.pump.stop()

    cycle("io_uring", True)
    before = counts()
    for i in range(12):
        cycle(TRANSPORTS[i % 2], i % 3 != 0)
    assert counts() == before
    assert pump_threads() == []

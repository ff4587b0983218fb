"""GPU tables through attach: a real daemon, the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests import checkpoints
from tests.daemons import Daemon, Node, make_node, running
from tests.unit import gpu_rig  # noqa: F401 - the interpreter, before any kernel is defined
from tierd.api import rest_client
from tierd.errors import AttachError, HookError, RowError
from tierd.gpu import device_tables
from tierd.gpu.audit import RowJudge
from tierd.gpu.client import Client, list_images
from tierd.gpu.device_audit import DeviceAudit
from tierd.gpu.link import Link
from tierd.gpu.tables import TableOptions
from tierd.io import _core
from tierd.io.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tierd.gpu.tables import Table

ON_CPU = TableOptions(device="cpu")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    directory = tmp_path_factory.mktemp("gpu")
    models = {
        "v41": checkpoints.engram(directory / "v41", rows=1000),
        "gemma": checkpoints.per_layer(directory / "gemma", layers=2, vocab=256),
    }
    return make_node(directory, models, size=64 << 20)


@pytest.fixture(scope="module")
def daemon(node: Node) -> Iterator[Daemon]:
    with running(node) as started:
        yield started
        assert started.stop() == 0


def attach(node: Node, options: TableOptions = ON_CPU, **more: Any) -> Client:
    images = list_images(node.engine_socket, None)
    given = {"engine": "test", "cache_rows": 128, "rows_max": 8, "wait_s": 0.0, **more}
    return Client.attach(node.engine_socket, images, options=options, **given)


def expected(node: Node, table: Table, ids: np.ndarray, **options: bool) -> np.ndarray:
    info = table.info
    rows = np.ascontiguousarray(node.checkpoints[info.model].tables[info.table.name][ids])
    return _core.decode_rows(rows, info.table.dim, info.table.row_format.value, **options)


def gathered(table: Table, ids: torch.Tensor) -> np.ndarray:
    out = torch.full((*ids.shape, table.info.table.dim), -23131, dtype=torch.int16)
    table.gather(ids, out)
    return out.numpy().view(np.uint16)


@pytest.mark.usefixtures("daemon")
def test_every_kind_of_call_gives_the_checkpoint_s_rows(node: Node) -> None:
    rng = np.random.default_rng(3)
    with attach(node) as client:
        for name in ("v41/layers.1.engram", "gemma/layers.1.per_layer"):
            table = client.table(name)
            ids = rng.integers(0, table.info.table.rows, (3, 2))
            tensor = torch.from_numpy(ids)
            table.kick(tensor)
            np.testing.assert_array_equal(gathered(table, tensor), expected(node, table, ids))
            # A strided view, as engines pass them; more than a request holds; none at all.
            view = torch.from_numpy(np.repeat(ids[:, None], 3, axis=1))[:, 1]
            np.testing.assert_array_equal(gathered(table, view), expected(node, table, ids))
            many = rng.integers(0, table.info.table.rows, 11)
            got = gathered(table, torch.from_numpy(many))
            np.testing.assert_array_equal(got, expected(node, table, many))
            assert gathered(table, torch.zeros(0, dtype=torch.int32)).shape == (0, got.shape[1])
            table.warm(torch.arange(4))
            before = table.stats()["misses"]
            gathered(table, torch.arange(4))
            assert table.stats()["misses"] == before


@pytest.mark.usefixtures("daemon")
def test_quotas_move_together(node: Node) -> None:
    with attach(node) as client:
        names = [image.name for image in client.attached if image.model == "v41"]
        first, second = (client.table(name) for name in names)
        assert (first.quota, second.quota) == (16, 16)
        client.set_quotas({names[1]: 24, names[0]: 8})
        assert (first.quota, second.quota) == (8, 24)
        with pytest.raises(HookError, match="the other tables hold 24 of 32"):
            client.set_quotas({names[0]: 9})
        with pytest.raises(AttachError, match="table nobody is not attached"):
            client.set_quotas({"nobody": 9})


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("device", ["cpu", None])
def test_zero_has_one_sign_if_asked_for(node: Node, device: str | None) -> None:
    options = TableOptions(device=device, canonical_zero=True)
    with attach(node, options) as client:
        table = client.table("layers.1.engram")
        ids = np.arange(8)
        want = expected(node, table, ids, canonical_zero=True)
        assert (want != expected(node, table, ids)).any()
        np.testing.assert_array_equal(gathered(table, torch.from_numpy(ids)), want)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("device", ["cpu", None])
def test_what_was_hinted_is_not_read_again(node: Node, daemon: Daemon, device: str | None) -> None:
    options = TableOptions(device=device, hint_pages=64)
    with attach(node, options) as client:
        table = client.table("layers.1.engram")
        assert client.hint("layers.1.engram", np.arange(-5, 90)) == 6
        hints = client._hints[table.info.name]
        assert hints._client.wait(1, 10**10) == _core.protocol.Status.ok
        ids = np.array([3, 88, 47, 40])
        before = rest_client.get(node.api_socket, "/v1/status")["pumps"][0]
        np.testing.assert_array_equal(
            gathered(table, torch.from_numpy(ids)), expected(node, table, ids)
        )
        after = rest_client.get(node.api_socket, "/v1/status")["pumps"][0]
        assert (after["pages"] - before["pages"], after["reads"] - before["reads"]) == (4, 0)
        for _ in range(30):  # the oldest hints make room, whatever is still being read
            given = client.hint("layers.1.engram", np.arange(0, 1000, 15))
            assert given + hints.skipped > 0


@pytest.mark.usefixtures("daemon")
def test_a_rank_reads_the_rows_that_it_owns(node: Node) -> None:
    options = TableOptions(device="cpu", row_ranges={"layers.1.engram": (10, 13)})
    with attach(node, options) as client:
        table = client.table("layers.1.engram")
        ids = np.arange(8, 15)
        want = expected(node, table, ids)
        want[(ids < 10) | (ids >= 13)] = 0
        np.testing.assert_array_equal(gathered(table, torch.from_numpy(ids)), want)
        assert table.stats()["misses"] == 3


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("device", ["cpu", None])
def test_the_audit_reads_past_the_path(node: Node, device: str | None) -> None:
    options = TableOptions(device=device, audit_every=2)
    with attach(node, options) as client:
        table: Any = client.table("layers.1.engram")
        ids = torch.arange(6)
        for _ in range(4):
            good = gathered(table, ids)
        audit = table._audit
        assert (audit.judge.compared if device is None else audit.compared) == 12
        wrong = torch.from_numpy(good.view(np.int16).copy())
        wrong[5, 9] ^= 1
        audit.observe(ids, wrong)  # not its turn
        with pytest.raises(RowError, match=r"1 of 6 rows that differ from the image, row 5 "):
            audit.observe(ids, wrong)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("listed", [True, False])
def test_a_table_of_peers_alone_is_not_audited(
    node: Node,
    device: str | None,
    listed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the daemon can read what lies at peers: here the image map is made to say that."""
    attach_link = Link.attach

    def attach_without_devices(self: Link, *args: Any) -> None:
        attach_link(self, *args)
        for entry in self.map["images"]:
            entry["devices"] = []
        self.map["images"] = self.map["images"] if listed else []

    monkeypatch.setattr(Link, "attach", attach_without_devices)
    with attach(node, TableOptions(device=device, audit_every=1)) as client:
        table = client.table("layers.1.engram")
        assert "v41/layers.1.engram is not audited: it lies at peers" in caplog.text
        ids = torch.arange(6)
        np.testing.assert_array_equal(gathered(table, ids), expected(node, table, ids.numpy()))


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.zeros(4, dtype=torch.int16), "must be int32 or int64"),
        (torch.zeros(2, 3, 4, dtype=torch.int64)[:, :2, :2], "do not collapse to two dimensions"),
    ],
)
def test_bad_ids_are_refused_before_any_launch(node: Node, ids: torch.Tensor, text: str) -> None:
    with attach(node) as client:
        table = client.table("layers.1.engram")
        with pytest.raises(HookError, match=text):
            table.kick(ids)
        with pytest.raises(HookError, match="the output must be contiguous"):
            table.gather(torch.arange(4), torch.zeros(4, 255, dtype=torch.bfloat16))
        assert table.stats()["lookups"] == 0


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("row", [-1, 1000])
def test_a_number_outside_the_table_is_named(node: Node, row: int) -> None:
    with attach(node) as client:
        table = client.table("layers.1.engram")
        with pytest.raises(RowError, match=f"row {row} is outside the table"):
            gathered(table, torch.tensor([3, row]))


@pytest.mark.usefixtures("daemon")
def test_a_closed_client_serves_nothing(node: Node) -> None:
    client = attach(node)
    table = client.table("layers.1.engram")
    client.close()
    with pytest.raises(RowError, match="has been closed"):
        table.kick(torch.arange(3))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (TableOptions(device="cuda:0"), HookError, "no CUDA GPU is visible"),
        (TableOptions(row_ranges={"layers.1.engram": (0, 5)}), AttachError, "need a device"),
        (TableOptions("cpu", {"layers.2.engram": (0, 5)}), AttachError, "not attached; there are"),
        (TableOptions("cpu", {"layers.1.engram": (5, 1001)}), AttachError, "no range of its 1000"),
        (TableOptions(sample_rate=1.5), AttachError, "a sample rate is 0 to 1"),
        (TableOptions(audit_every=-1), AttachError, "audit_every"),
    ],
)
@pytest.mark.usefixtures("daemon")
def test_options_that_cannot_be_served(
    node: Node, options: TableOptions, error: type[Exception], text: str
) -> None:
    if options.device == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(error, match=text):
        attach(node, options)


def test_an_image_in_memory_needs_no_ring(node: Node) -> None:
    """The daemon names images that it keeps in memory in its answer; here they are made up."""
    image = next(i for i in node_images(node) if i.table.name == "layers.14.engram")
    rows = np.ascontiguousarray(node.checkpoints["v41"].tables["layers.14.engram"])
    per_page = image.rows_per_page
    padded = np.zeros((image.pages * per_page, image.table.row_bytes), np.uint8)
    padded[: len(rows)] = rows
    pages = np.zeros(image.pages * 4096, np.uint8)
    _core.pack_pages(
        padded.reshape(-1), image.table.row_bytes, 0, image.image_id, image.generation, pages
    )
    fd = os.memfd_create("image")
    os.write(fd, pages.tobytes())
    flag = int(_core.protocol.RING_FLAG_GPU)
    channel = _core.Channel(rank=0, world=1, client_id=bytes(16), rings=[(8, 16, 0, flag)])

    def make(size: int) -> device_tables.DeviceTable:
        made = device_tables.make_tables(
            (image,), channel, torch.device("cpu"), options=ON_CPU, cache_rows=64,
            dram={0: (fd, size)}, audits={},
        )  # fmt: skip
        return made[0]

    table = make(len(pages))
    ids = np.array([0, 999, 17, 17])
    table.kick(torch.from_numpy(ids))
    np.testing.assert_array_equal(
        gathered(table, torch.from_numpy(ids)), expected(node, table, ids)
    )
    assert (table.tier, table.quota) == ("dram", 0)
    with pytest.raises(HookError, match="has no cache"):
        table.set_quota(4)
    with pytest.raises(AttachError, match=r"has 4096 of \d+ bytes"):
        make(4096)
    os.close(fd)


def node_images(node: Node) -> Any:
    with Store.open(node.device, write=False) as store:
        return [stored.info for stored in store.images]


def test_an_oracle_that_cannot_read_is_a_fault(tmp_path: Path, node: Node) -> None:
    del tmp_path
    image = next(i for i in node_images(node) if i.table.name == "layers.1.engram")

    def read(rows: np.ndarray) -> np.ndarray:
        raise RowError(f"page of row {rows[0]} cannot be read")

    judge = RowJudge(image, read, owned=(0, 1000), canonical_zero=False)
    audit = DeviceAudit(judge, 1, torch.device("cpu"), lambda: None)
    with pytest.raises(RowError, match="page of row 7 cannot be read"):
        audit.observe(torch.tensor([7]), torch.zeros(1, 256, dtype=torch.bfloat16))


def test_an_audit_is_closed_behind_the_comparison_that_runs(node: Node) -> None:
    """The watcher compares in its own thread; what it reads must not be closed under it."""
    image = next(i for i in node_images(node) if i.table.name == "layers.1.engram")
    reading, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def read(rows: np.ndarray) -> np.ndarray:
        reading.set()
        assert go_on.wait(20)
        done.append("read")
        return np.zeros((len(rows), image.table.row_bytes), np.uint8)

    judge = RowJudge(image, read, owned=(0, 1000), canonical_zero=False)
    audit = DeviceAudit(judge, 1, torch.device("cpu"), lambda: done.append("closed"))
    good = torch.zeros(1, 256, dtype=torch.bfloat16)
    with ThreadPoolExecutor(2) as pool:
        observed = pool.submit(audit.observe, torch.tensor([7]), good)
        assert reading.wait(20)
        closed = pool.submit(audit.close)
        while not audit._closed:
            threading.Event().wait(0.001)
        go_on.set()
        observed.result(20)
        closed.result(20)
    assert done == ["read", "closed"]
    audit.observe(torch.tensor([7]), good)  # as by a graph that was captured before
    assert done == ["read", "closed"]

"""A daemon on several devices: names that change, devices that are missing, deletion."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tests.daemons import Node, refused_start, running, tierd
from tierd.errors import AttachError, ImageIncompleteError
from tierd.gpu.client import Client, list_images
from tierd.io import _core
from tierd.io.checkpoint import Checkpoint
from tierd.io.layout import UNIT_PAGES
from tierd.io.staging import stage
from tierd.io.store import Store
from tierd.io.store_set import StoreSet
from tierd.io.tables import find_tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIB = 1 << 20
ROWS = 15 * (2 * UNIT_PAGES + 40)
WIDE, NARROW = "wide/layers.1.engram", "narrow/layers.2.engram"


class Disks:
    """Three devices: ``wide`` over all of them, ``narrow`` on the first."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / f"disk{i}" for i in range(3)]
        self.made = {
            WIDE: checkpoints.engram(directory / "w", layers=(1,), rows=ROWS),
            NARROW: checkpoints.engram(directory / "n", layers=(2,), rows=300),
        }
        for path in self.paths:
            Store.format(path, size=12 * MIB).close()
        self._stage(WIDE, self.paths)
        self._stage(NARROW, self.paths[:1])
        (directory / "run").mkdir()
        self.node = Node(directory / "run", self.paths[0], {})

    def _stage(self, name: str, paths: Sequence[Path]) -> None:
        with StoreSet.open(paths) as stores, Checkpoint.open(self.made[name].path) as source:
            stage(stores, source, find_tables(source), model=name.partition("/")[0])

    def serve(self, *more: Path):
        words = [word for path in more for word in ("--device", path)]
        return running(self.node, *words)

    def check(self, *names: str) -> None:
        """Every row of these images, through a client; no other image is there."""
        images = list_images(self.node.engine_socket)
        assert sorted(image.name for image in images) == sorted(names)
        with Client.attach(
            self.node.engine_socket, images, engine="test", cache_rows=4096, rows_max=4096
        ) as client:
            for name in names:
                (rows,) = self.made[name].tables.values()
                ids = np.arange(len(rows))
                out = np.zeros((ids.size, 256), np.uint16)
                client.table(name).gather(ids, out)
                expected = _core.decode_rows(np.ascontiguousarray(rows), 256, "e4m3_e8m0")
                assert np.array_equal(out, expected)

    def status(self) -> dict:
        return json.loads(tierd("status", "--json", "--api-socket", self.node.api_socket).stdout)


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    monkeypatch.setattr("tierd.io.device.LOCK_RETRY_S", 0.0)
    return Disks(tmp_path)


def test_every_row_and_devices_that_change_places(disks: Disks) -> None:
    one, two, three = disks.paths
    with disks.serve(two, three) as daemon:
        disks.check(WIDE, NARROW)
        listed = json.loads(
            tierd("devices", "list", "--json", "--api-socket", disks.node.api_socket).stdout
        )["devices"]
        assert [entry["path"] for entry in listed] == list(map(str, disks.paths))
        assert {entry["state"] for entry in listed} == {"served"}
        assert daemon.stop() == 0
    spare = one.with_name("spare")
    one.rename(spare)
    three.rename(one)
    spare.rename(three)
    with disks.serve(two, three) as daemon:  # the names are the same, the devices are not
        disks.check(WIDE, NARROW)
        assert disks.status()["incomplete_images"] == []
        assert daemon.stop() == 0


def test_what_lacks_a_device_is_named_and_the_rest_is_served(disks: Disks) -> None:
    with Store.open(disks.paths[2], write=False) as store:
        lost = store.uuid
    gone = disks.paths[2].with_name("gone")
    disks.paths[2].rename(gone)
    with disks.serve(*disks.paths[1:]) as daemon:
        disks.check(NARROW)
        state = disks.status()
        assert [entry["device"] for entry in state["absent_devices"]] == [str(disks.paths[2])]
        (lacking,) = state["incomplete_images"]
        assert lacking["name"] == WIDE
        assert f"device {lost} ({disks.paths[2]}) is not there" in lacking["reason"]
        shown = tierd("status", "--api-socket", disks.node.api_socket).stdout
        assert f"not served: {WIDE}: device {lost}" in shown
        with StoreSet.open(disks.paths[:2], write=False) as stores:
            info = stores.image(WIDE).info
        with pytest.raises((AttachError, ImageIncompleteError), match=lost):
            Client.attach(
                disks.node.engine_socket, [info], engine="t", cache_rows=64, rows_max=64, wait_s=0.0
            )
        assert daemon.stop() == 0
    gone.rename(disks.paths[2])
    with disks.serve(*disks.paths[1:]):
        disks.check(WIDE, NARROW)


def test_a_start_without_any_device_is_refused(disks: Disks) -> None:
    missing = str(disks.paths[0].with_name("none"))
    text = refused_start(disks.node, **{"devices.paths": [missing, missing + "2"]})
    assert f"{missing}: cannot open: No such file" in text


def test_what_is_served_is_neither_deleted_nor_written(disks: Disks) -> None:
    with disks.serve(*disks.paths[1:]) as daemon:
        words = [word for path in disks.paths for word in ("--device", path)]
        refused = tierd("images", "delete", WIDE, *words, exit_code=1)
        assert f"process {daemon.pid} " in refused.output
        assert "run: systemctl stop tierd" in refused.output
        # The pump's own descriptors hold leases: also who has opened it already may not.
        with Store.open(disks.paths[1], write=False) as store:
            (part,) = store.parts
            assert store.is_leased(part.extents)
        assert daemon.stop() == 0
    deleted = json.loads(tierd("images", "delete", WIDE, *words, "--json").stdout)
    assert (deleted["name"], deleted["parts_kept_on"]) == (WIDE, [])
    assert deleted["devices"] == list(map(str, disks.paths))
    left = json.loads(tierd("images", "list", *words, "--json").stdout)["images"]
    assert [image["name"] for image in left] == [NARROW]


def test_a_wipe_that_was_cut_off_is_finished_by_the_daemon(disks: Disks) -> None:
    with StoreSet.open(disks.paths) as stores:
        places = [
            (share.path, extent.device_page * 4096, extent.pages * 4096)
            for share in stores.image(WIDE).shares
            for extent in share.extents
        ]
        stores.image(WIDE).home.delete_image(WIDE, wipe=True)
    with disks.serve(*disks.paths[1:]) as daemon:
        disks.check(NARROW)
        notes = [event["note"] for event in daemon.events() if "note" in event]
        assert len([note for note in notes if f"the wipe of {WIDE} was cut off" in note]) == 3
        words = ["--wipe", "--api-socket", disks.node.api_socket]
        assert "deleted, wiped" in tierd("images", "delete", WIDE, *words).stdout
        assert "there is no image" in tierd("images", "delete", WIDE, *words, exit_code=1).output
        disks.check(NARROW)
        assert daemon.stop() == 0
    for path, start, size in places:
        with open(path, "rb") as file:
            file.seek(start)
            assert not any(file.read(size))


def test_an_engine_that_outlives_the_daemon_keeps_its_image(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # reads of the killed daemon are waited for
    words = [word for path in disks.paths for word in ("--device", path)]
    with disks.serve(*disks.paths[1:]) as daemon:
        images = list_images(disks.node.engine_socket)
        client = Client.attach(
            disks.node.engine_socket, images, engine="test", cache_rows=64, rows_max=64
        )
        daemon.process.kill()
        daemon.process.wait()
    with client:
        refused = tierd("images", "delete", WIDE, *words, "--wipe", exit_code=1)
        assert "attached by an engine, so it cannot be deleted" in refused.output
    tierd("images", "delete", WIDE, *words, "--wipe")
    assert os.path.exists(disks.paths[0])


def test_a_bad_page_is_read_from_the_copy(disks: Disks, tmp_path: Path) -> None:
    copies = [tmp_path / "copy0", tmp_path / "copy1"]
    for path in copies:
        Store.format(path, size=12 * MIB).close()
    words = [word for path in disks.paths for word in ("--device", path)]
    targets = [word for path in copies for word in ("--to", path)]
    made = json.loads(tierd("images", "copy", WIDE, *words, *targets, "--json").stdout)
    assert made["devices"] == list(map(str, copies))
    with StoreSet.open(disks.paths, write=False) as stores:
        shares = stores.image(WIDE).shares
        places = [(share.path, share.extents[0].device_page * 4096 + 99) for share in shares]
    for path, place in places:  # a bit of the first page of every share
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
    with running(
        disks.node,
        *(word for path in [*disks.paths[1:], *copies] for word in ("--device", path)),
        environ={"TIERD__IO__CRC_SAMPLE": "1"},
    ) as daemon:
        disks.check(WIDE, NARROW)  # whoever serves, daemon or guardian
        assert disks.status()["shadowed_images"] == []
        images = tierd("images", "--json", "--api-socket", disks.node.api_socket).stdout
        (wide,) = [e for e in json.loads(images)["images"] if e["name"] == WIDE]
        assert wide["copies"] == [list(map(str, copies))]
        assert daemon.stop() == 0

"""``tierd devices`` and ``tierd images``: what they print of whole and of broken devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import checkpoints
from tests.daemons import tierd
from tierd.errors import DeviceForeignError
from tierd.io import find_devices, superblock
from tierd.io.layout import ROOT_OFFSETS
from tierd.io.store import Store
from tierd.io.store_set import StoreSet

MIB = 1 << 20
NAME = "m/layers.1.engram"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], Path]:
    """Two devices with one image over both, and its checkpoint."""
    folder = tmp_path_factory.mktemp("devices")
    made = checkpoints.engram(folder / "c", layers=(1,), rows=15 * 600)
    paths = [folder / "one", folder / "two"]
    for path in paths:
        tierd("devices", "format", path, "--size", "8MiB")
    words = ["--device", paths[0], "--device", paths[1]]
    tierd("stage", made.path, *words, "--model", "m")
    return [path.read_bytes() for path in paths], made.path


@pytest.fixture
def disks(staged, tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, data in zip(paths, staged[0], strict=True):
        path.write_bytes(data)
    return paths


def inspect(path: Path) -> dict:
    return json.loads(tierd("devices", "inspect", path, "--json").stdout)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_inspect_a_whole_device(disks: list[Path]) -> None:
    found = inspect(disks[0])
    assert found["state"] == "ok"
    (image,) = found["images"]
    assert (image["name"], len(image["devices"])) == (NAME, 2)
    assert found["free_runs"] == [{"offset": 4 * MIB, "bytes": 4 * MIB}]
    assert found["free_bytes"] == found["largest_free_bytes"] == 4 * MIB
    assert [root["fault"] for root in found["roots"]] == ["", ""]
    other = inspect(disks[1])
    assert [part["name"] for part in other["parts"]] == [NAME]
    assert other["parts"][0]["home"] == found["uuid"]
    shown = tierd("devices", "inspect", disks[1]).stdout
    assert f"part {NAME}" in shown
    assert f"home {found['uuid']}" in shown
    assert "free: 4.0 MiB in 1 runs" in shown


def test_inspect_when_both_roots_are_damaged(disks: list[Path]) -> None:
    before = inspect(disks[0])
    for offset in ROOT_OFFSETS:
        overwrite(disks[0], offset + 200, b"x")
    found = inspect(disks[0])
    assert found["state"] == "damaged"
    assert "neither root can be used" in found["problem"]
    assert [root["fault"] for root in found["roots"]] == ["its checksum is wrong"] * 2
    assert {root["uuid"] for root in found["roots"]} == {before["uuid"]}
    assert found["salvaged"]["images_named"] == [NAME]
    (held,) = found["salvaged"]["pages_of"]
    assert held["image_id"] == before["images"][0]["image_id"]
    shown = tierd("devices", "inspect", disks[0]).stdout
    assert f"a table which cannot be believed names: {NAME}" in shown


@pytest.mark.parametrize(
    ("how", "state", "problem"),
    [
        ("one root", "degraded", "its checksum is wrong"),
        ("newer", "newer", "written in format 3, this tierd knows up to 2"),
        ("shrunk", "shrunk", "it shrank, or was copied in part"),
        ("ext4", "foreign", "it holds an ext2/3/4 file system"),
        ("empty", "empty", "it was never formatted"),
    ],
)
def test_states(disks: list[Path], how: str, state: str, problem: str) -> None:
    path = disks[0]
    data = bytearray(path.read_bytes())
    if how == "one root":
        data[ROOT_OFFSETS[0] + 100] ^= 1
    if how == "newer":
        for offset in ROOT_OFFSETS:
            data[offset + 8] = 3
            body = bytes(data[offset : offset + 4092])
            data[offset + 4092 : offset + 4096] = superblock.crc(body).to_bytes(4, "little")
    if how == "shrunk":
        data = data[: 6 * MIB]
    if how in {"ext4", "empty"}:
        data = bytearray(len(data))
    if how == "ext4":
        data[0x438:0x43A] = b"\x53\xef"
    path.write_bytes(data)
    found = inspect(path)
    assert found["state"] == state
    assert problem in found["problem"]
    (line,) = json.loads(tierd("devices", "list", "--json", "--device", path).stdout)["devices"]
    assert line["state"] == state
    assert state in tierd("devices", "list", "--device", path).stdout


def test_list_names_what_is_missing(disks: list[Path], tmp_path: Path) -> None:
    none = tmp_path / "none"
    words = ["--device", disks[0], "--device", none]
    listed = json.loads(tierd("devices", "list", "--json", *words).stdout)["devices"]
    assert [line["state"] for line in listed] == ["ok", "missing"]
    assert str(none) in listed[1]["problem"]


def test_a_device_that_is_held_says_by_whom(disks: list[Path]) -> None:
    with Store.open(disks[0]) as store:
        assert "holds it" in inspect(disks[0])["holder"]
        fd = store.reader_fd(store.images)
        assert inspect(disks[0])["leased"] == [[2 * MIB, 4 * MIB]]
        with open(fd, "rb"):
            pass
    assert inspect(disks[0])["holder"] == ""


def test_images_show_and_delete(disks: list[Path], tmp_path: Path) -> None:
    words = ["--device", disks[0], "--device", disks[1]]
    shown = json.loads(tierd("images", "show", NAME, *words, "--json").stdout)
    assert [share["device"] for share in shown["shares"]] == list(map(str, disks))
    assert sum(pages for share in shown["shares"] for _, pages, _ in share["extents"]) == 600
    assert f"device {disks[1]}" in tierd("images", "show", NAME, *words).stdout
    alone = tierd("images", "list", "--device", disks[0], "--json").stdout
    (lacking,) = json.loads(alone)["images"]
    assert "/two) is not there" in lacking["fault"]
    refused = tierd("images", "delete", NAME, "--device", disks[0], "--wipe", exit_code=1)
    assert "cannot be wiped" in refused.output
    gone = tierd("images", "delete", NAME, "--device", disks[0]).stdout
    assert "/two is not there; it gives its part up" in gone
    left = tierd("images", *words, "--json")
    assert json.loads(left.stdout) == {"images": []}
    refused = tierd("images", "delete", NAME, *words, exit_code=1)
    assert "no image 'm/layers.1.engram'" in refused.output


def test_a_wipe_that_was_cut_off_is_told_and_finished(disks: list[Path]) -> None:
    words = ["--device", disks[0], "--device", disks[1]]
    with StoreSet.open(disks) as stores:  # killed right after the commit that deletes the image
        stores.image(NAME).home.delete_image(NAME, wipe=True)
    listed = tierd("images", "list", *words).output
    assert f"note: {disks[0]}: the wipe of {NAME} was cut off, and 2097152 bytes may" in listed
    assert f"run: tierd images delete {NAME} --wipe" in listed
    assert f"wipe {NAME}, " in (shown := tierd("devices", "inspect", disks[0]).stdout)
    assert "not finished: 2.0 MiB at" in shown
    assert inspect(disks[0])["wipes"][0]["name"] == NAME
    alone = tierd("images", "delete", NAME, "--wipe", "--device", disks[0], exit_code=1)
    assert "cannot be finished: device" in alone.output
    assert (
        f"{NAME}: deleted, wiped, 4.0 MiB"
        in tierd("images", "delete", NAME, "--wipe", *words).stdout
    )
    for path in disks:
        assert not any(path.read_bytes()[2 * MIB :])
        assert inspect(path)["wipes"] == []
    assert "note" not in tierd("images", "list", *words).output


@pytest.mark.parametrize("number", [0, 1])
def test_a_partition_table_over_a_root_is_not_written_over(disks: list[Path], number: int) -> None:
    """It spares the other root; what is written by way of that may fall into a file system."""
    overwrite(disks[number], 510, b"\x55\xaa")
    before = disks[number].read_bytes()
    with pytest.raises(DeviceForeignError, match="an MBR partition table was written over a part"):
        Store.open(disks[number])
    found = inspect(disks[number])
    assert found["state"] == "foreign"
    assert "an MBR partition table was written over" in found["problem"]
    refused = tierd("format", disks[number], exit_code=1).output
    assert "holds an MBR partition table, written over a tierd store" in refused
    assert disks[number].read_bytes() == before


def test_a_file_system_over_both_roots_is_not_called_damage(disks: list[Path]) -> None:
    overwrite(disks[0], 0, b"XFSB" + bytes(4092))
    overwrite(disks[0], ROOT_OFFSETS[1], bytes(4096))
    with pytest.raises(DeviceForeignError, match="an XFS file system was written over") as caught:
        Store.open(disks[0], write=False)
    assert "--force" not in str(caught.value)
    found = inspect(disks[0])
    assert (found["state"], found["salvaged"]["images_named"]) == ("foreign", [NAME])


def test_what_rotten_tables_still_name_and_whose_pages_there_are(disks: list[Path]) -> None:
    for place in (1 << 20, (1 << 20) + (512 << 10)):
        overwrite(disks[0], place + 30, b"\xff\xfe")
    found = inspect(disks[0])
    assert (found["state"], found["salvaged"]["images_named"]) == ("damaged", [NAME])
    overwrite(disks[0], 0, bytes(2 * MIB))  # as somebody clears a disk for another use
    found = inspect(disks[0])
    assert (found["state"], found["problem"]) == ("empty", "it was never formatted, or cleared")
    assert found["salvaged"]["pages_of"][0]["units"] == 1


def test_what_is_too_small_to_look_at_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"text")
    with pytest.raises(DeviceForeignError, match="it holds 4 bytes of something"):
        Store.open(tmp_path / "small")


def test_where_nothing_is_in_dev_no_file_is_made_or_advised() -> None:
    for words in (("format", "/dev/nosuch"), ("format", "/dev/nosuch", "--size", "4MiB")):
        assert "there is no such device; run: lsblk" in tierd(*words, exit_code=1).output
    told = tierd("devices", "inspect", "/dev/nosuch", exit_code=1).output
    assert told.endswith("run: lsblk\n")
    assert not Path("/dev/nosuch").exists()


def test_format_takes_a_uuid_for_a_device_and_not_for_a_files_name(tmp_path: Path) -> None:
    name = "UUID=11111111-1111-1111-1111-111111111111"
    refused = tierd("format", name, "--size", "8MiB", exit_code=1).output
    assert "no block device here is device 1111" in refused
    assert not Path(name).exists()


def test_one_device_named_twice(disks: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(disks[0])
    words = ["images", "delete", NAME, "--device", disks[0], "--device", other]
    text = tierd(*words, exit_code=1).output
    assert f"{disks[0]} and {other} are one device, named twice" in text


def test_list_says_what_is_not_served_and_verify_that_it_did_nothing(
    disks: list[Path], tmp_path: Path
) -> None:
    listed = tierd("images", "list", "--device", disks[0]).stdout
    assert f"not served: {NAME}: device " in " ".join(listed.split())
    none = tmp_path / "none"
    tierd("format", none, "--size", "8MiB")
    both = ["--device", disks[0], "--device", disks[1]]
    spare = tmp_path / "spare"
    tierd("format", spare, "--size", "8MiB")
    tierd("images", "copy", NAME, *both, "--to", spare)
    listed = tierd("images", "list", *both, "--device", spare).stdout
    assert f"copy of {NAME}: {spare}" in " ".join(listed.split())
    assert tierd("verify", "--full", "--device", none).stdout.startswith("no images, so nothing")


@pytest.mark.parametrize("wipe", [False, True])
def test_parts_whose_home_is_gone_for_good(disks: list[Path], wipe: bool) -> None:
    home = inspect(disks[0])["uuid"]
    told = tierd("images", "show", NAME, "--device", disks[1], exit_code=1).output
    assert f"holds a part of {NAME}, whose home, device {home}, is not named" in told
    words = ["images", "delete", NAME, "--parts", *(["--wipe"] if wipe else [])]
    both = ["--device", disks[0], "--device", disks[1]]
    assert "no part of" in tierd(*words, *both, exit_code=1).output
    assert "parts given up, 2.0 MiB" in tierd(*words, "--device", disks[1]).stdout
    found = inspect(disks[1])
    assert (found["parts"], found["wipes"]) == ([], [])
    assert found["free_bytes"] == found["size_bytes"] - 2 * MIB
    told = tierd("images", "show", NAME, *both).stdout
    assert "has lost its part" in told


def test_devices_of_the_configuration(disks: list[Path], tmp_path: Path) -> None:
    config = tmp_path / "tierd.toml"
    config.write_text(f'[daemon]\nruntime_dir = "{tmp_path}"\n')
    refused = tierd("images", "show", NAME, "--config", config, exit_code=1)
    assert "devices.paths is empty" in refused.output
    paths = ", ".join(f'"{path}"' for path in disks)
    with config.open("a") as file:
        file.write(f"[devices]\npaths = [{paths}]\n")
    assert NAME in tierd("images", "show", NAME, "--config", config).stdout
    listed = tierd("devices", "list", "--config", config).stdout
    assert all(str(path) in listed for path in disks)


def test_a_uuid_that_no_device_has(tmp_path: Path) -> None:
    name = "UUID=01234567-89ab-cdef-0123-456789abcdef"
    refused = tierd("images", "list", "--device", name, exit_code=1)
    assert "no block device here is device 01234567-89ab-cdef-0123-456789abcdef" in refused.output
    assert "run: tierd devices list" in refused.output
    refused = tierd("images", "list", "--device", "UUID=7", exit_code=1)
    assert "UUID=7 is not a device" in refused.output


def test_uuid_of_what_bears_none(disks: list[Path], tmp_path: Path) -> None:
    assert find_devices.uuid_of(str(disks[0])) == inspect(disks[0])["uuid"]
    (tmp_path / "zero").write_bytes(bytes(8 * MIB))
    assert find_devices.uuid_of(str(tmp_path / "zero")) is None
    assert find_devices.uuid_of(str(tmp_path / "none")) is None


def test_a_verification_of_nothing_says_so(tmp_path: Path) -> None:
    device = tmp_path / "device.img"
    tierd("format", device, "--size", "8MiB")
    assert "no images, so nothing was checked" in tierd("verify", "--device", device).stdout

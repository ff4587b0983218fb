"""tierd under a real systemd: the shipped unit, as an operator meets it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import checkpoints
from tests.lab.systemd_lab import Lab
from tierd.io import _core
from tierd.io._core import _native

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "/opt/tierd/src"
# Whoever runs the tests may have Python below /root, which the unit hides; so it is bound in.
PYTHON = f"/opt/tierd/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = "/opt/tierd/packages"
ENVIRON = f"PYTHONPATH={SOURCE}:{PACKAGES} LD_LIBRARY_PATH=/opt/tierd/python/lib"
ROWS = 300

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root"),
]

WRAPPER = f"""#!/bin/sh
export {ENVIRON}
exec {PYTHON} -P -m tierd.cli "$@"
"""
# An engine: gathers rows over and over, and says after each that they were right.
ENGINE = f"""
import sys, time
import numpy as np
from tierd.gpu.client import Client, list_images
images = list_images("/run/tierd/engine.sock")
client = Client.attach("/run/tierd/engine.sock", images, engine="lab", cache_rows=64, rows_max=64)
expected = np.load("/opt/tierd/expected.npy")
table = client.table("layers.1.engram")
rng = np.random.default_rng(1)
out = np.zeros((32, 256), np.uint16)
while True:
    ids = rng.integers(0, {ROWS}, 32)
    table.kick(ids)
    table.gather(ids, out)
    assert np.array_equal(out, expected[ids]), "wrong rows"
    print("right", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def loop_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = Path("/var/tmp") / f"tierd-lab-{os.getpid()}.img"
    with file.open("wb") as made:
        os.posix_fallocate(made.fileno(), 0, 32 << 20)
    attach = ["losetup", "--direct-io=on", "--show", "-f", str(file)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    yield device
    subprocess.run(["losetup", "-d", device], check=True)
    file.unlink()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, loop_device: str) -> Iterator[Lab]:
    """A machine on which the operator's page was followed up to ``systemctl start``."""
    directory = tmp_path_factory.mktemp("lab")
    tiny = checkpoints.engram(directory / "model", rows=ROWS)
    rows = np.ascontiguousarray(tiny.tables["layers.1.engram"])
    for folder in (directory, *directory.parents[:2]):
        folder.chmod(0o755)
    binds = [f"{sys.base_prefix}:/opt/tierd/python", f"{directory}/model:/opt/tierd/model"]
    binds += [f"{sysconfig.get_path('purelib')}:{PACKAGES}"]
    with Lab(binds=[*binds, loop_device]) as made:
        # A copy, with the native core where an editable install does not have it.
        source = made.root / SOURCE.removeprefix("/")
        for part in ("tierd", "systemd"):
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("*.so"))
        shutil.copy(_native.__file__, source / "tierd/io/_core")
        tierd = made.root / "usr/local/bin/tierd"
        tierd.write_text(WRAPPER)
        tierd.chmod(0o755)
        (made.root / "opt/tierd/engine.py").write_text(ENGINE)
        np.save(made.root / "opt/tierd/expected.npy", _core.decode_rows(rows, 256, "e4m3_e8m0"))
        made.run(
            f"set -e; cd {SOURCE}; mkdir -p /etc/sysusers.d /etc/tmpfiles.d\n"
            "cp systemd/tierd.sysusers.conf /etc/sysusers.d/tierd.conf\n"
            "cp systemd/tierd.tmpfiles.conf /etc/tmpfiles.d/tierd.conf\n"
            "cp systemd/tierd.service /etc/systemd/system/tierd.service\n"
            "systemd-sysusers; systemd-tmpfiles --create --prefix=/etc/tierd\n"
            f"tierd init --yes --device {loop_device} --checkpoint /opt/tierd/model\n"
            f"chown tierd {loop_device}; systemctl daemon-reload"
        )
        yield made


@pytest.fixture(autouse=True)
def told(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    """After a failed test, show what the unit said."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(
            lab.run(
                "journalctl -o cat -n 40 -u tierd -u engine; tail -n 12 /tmp/engine.out",
                check=False,
            )
        )


def status(lab: Lab) -> dict[str, object]:
    return json.loads(lab.run("tierd status --json"))


def prop(lab: Lab, name: str) -> str:
    return lab.run(f"systemctl show -P {name} tierd").strip()


@contextlib.contextmanager
def engine(lab: Lab) -> Iterator[None]:
    """An engine as another service, in group tierd."""
    lab.run(
        "rm -f /tmp/engine.out; systemd-run -q --unit=engine -p User=nobody -p Group=tierd "
        f"-p StandardOutput=file:/tmp/engine.out env {ENVIRON} {PYTHON} -P /opt/tierd/engine.py"
    )
    try:
        lab.until("test $(grep -c right /tmp/engine.out) -ge 3")
        yield
        assert lab.run("systemctl is-active engine").strip() == "active"
    finally:
        lab.run("systemctl stop engine; systemctl reset-failed engine", check=False)


def more_rows(lab: Lab) -> None:
    """The engine gets right rows from now on, too."""
    lab.run("cp /tmp/engine.out /tmp/engine.before")
    enough = "$(grep -c right /tmp/engine.out) -ge $(( $(grep -c right /tmp/engine.before) + 3 ))"
    lab.until(f"test {enough}")


def test_start_stage_and_rows(lab: Lab, loop_device: str) -> None:
    lab.run("systemctl start tierd")
    assert prop(lab, "StatusText") == "0 images served, 0 clients"
    lab.run("tierd stage /opt/tierd/model")
    lab.until("systemctl show -P StatusText tierd | grep '^2 images'")
    state = status(lab)
    assert state["pid"] == int(prop(lab, "MainPID"))
    assert state["pumps"][0]["transport"] == "io_uring", state["pumps"]  # type: ignore[index]
    assert lab.run("stat -c '%U %G %a' /run/tierd/engine.sock").split() == ["tierd", "tierd", "660"]
    with engine(lab):
        lab.until("systemctl show -P StatusText tierd | grep ' 1 clients'")


def test_others_may_read_or_not_even_that(lab: Lab) -> None:
    ask = "tierd status --json >/dev/null"
    lab.run(f"setpriv --reuid=nobody --regid=tierd --clear-groups {ask}")
    refused = lab.run(f"setpriv --reuid=nobody --regid=nogroup --clear-groups {ask}", check=False)
    assert "permission denied" in refused
    delete = "tierd images delete model/layers.1.engram"
    for groups, words in (("--clear-groups", "may read but not change"),):
        told = lab.run(f"setpriv --reuid=nobody --regid=tierd {groups} {delete}", check=False)
        assert words in told


def test_reload_changes_what_it_can(lab: Lab) -> None:
    pid = prop(lab, "MainPID")
    lab.run("sed -i 's/^#level = .*/level = \"debug\"/' /etc/tierd/tierd.toml")
    lab.run("systemctl reload tierd")
    lab.until("journalctl -u tierd -o cat | grep reloaded | grep log.level")
    lab.run(
        "sed -i 's/^level = .*/level = \"loud\"/' /etc/tierd/tierd.toml; systemctl reload tierd"
    )
    lab.until("journalctl -u tierd -o cat | grep 'not taken' | grep log.level")
    lab.run(
        "sed -i 's/^level = .*/level = \"info\"/' /etc/tierd/tierd.toml; systemctl reload tierd"
    )
    assert prop(lab, "MainPID") == pid
    assert prop(lab, "ActiveState") == "active"


def test_an_engine_outlives_a_restart(lab: Lab) -> None:
    with engine(lab):
        before = status(lab)["boot_id"]
        lab.run("systemctl restart tierd")
        assert status(lab)["boot_id"] != before
        more_rows(lab)
        lab.until("systemctl show -P StatusText tierd | grep ' 1 clients'")


def test_a_killed_daemon_comes_back_and_the_engine_notices_nothing(lab: Lab) -> None:
    with engine(lab):
        restarts = int(prop(lab, "NRestarts"))
        lab.run("systemctl kill -s KILL tierd")
        lab.until(f"test $(systemctl show -P NRestarts tierd) -gt {restarts}")
        lab.until("tierd status --json")
        more_rows(lab)


def test_a_daemon_that_stands_still_is_restarted(lab: Lab) -> None:
    lab.run("mkdir -p /run/systemd/system/tierd.service.d")
    lab.run("printf '[Service]\\nWatchdogSec=2\\n' > /run/systemd/system/tierd.service.d/w.conf")
    lab.run("systemctl daemon-reload; systemctl restart tierd")
    pid = prop(lab, "MainPID")
    lab.run(f"kill -STOP {pid}")
    lab.until("journalctl -u tierd -o cat | grep -i 'watchdog timeout'")
    lab.until(f"now=$(systemctl show -P MainPID tierd); test $now -gt 0 -a $now != {pid}")
    lab.until("tierd status --json")
    lab.run("rm /run/systemd/system/tierd.service.d/w.conf; systemctl daemon-reload")


def test_a_start_that_fails_says_why(lab: Lab, loop_device: str) -> None:
    lab.run("systemctl stop tierd")
    assert not Path(lab.root / "run/tierd/engine.sock").exists()
    lab.run(
        "cp /etc/tierd/tierd.toml /etc/tierd/good; echo 'nonsense = 1' >> /etc/tierd/tierd.toml"
    )
    assert "failed" in lab.run("systemctl start tierd 2>&1", check=False).lower()
    assert "unknown key" in lab.run("journalctl -u tierd -o cat -n 20")
    lab.run("mv /etc/tierd/good /etc/tierd/tierd.toml; systemctl reset-failed tierd")
    lab.run(f"chown root {loop_device}; systemctl start tierd", check=False)
    lab.until("journalctl -u tierd -o cat -n 20 | grep 'may not open'")
    lab.run(f"systemctl stop tierd; chown tierd {loop_device}")
    lab.run("systemctl start tierd")
    assert status(lab)["images"] == 2


def test_io_uring_refused_by_the_unit_is_told_apart(lab: Lab) -> None:
    folder = "/run/systemd/system/tierd.service.d"
    for setting, words in (
        ("SystemCallFilter=~io_uring_setup", "a seccomp filter"),
        ("LimitMEMLOCK=64K", "64 KiB"),
    ):
        lab.run(f"mkdir -p {folder}; printf '[Service]\\n{setting}\\n' > {folder}/x.conf")
        lab.run("systemctl daemon-reload; systemctl restart tierd")
        ask = "curl -s --unix-socket /run/tierd/api.sock http://tierd/v1/doctor"
        lab.until(f"{ask} | grep -q '{words}'")
        with engine(lab):
            more_rows(lab)
    lab.run(f"rm {folder}/x.conf; systemctl daemon-reload; systemctl restart tierd")


def test_the_unit_is_hardened(lab: Lab) -> None:
    told = lab.run("systemd-analyze security tierd --no-pager")
    score = float(told.rpartition("exposure level for tierd.service:")[2].split()[0])
    assert score <= 4.0, told
    assert lab.run("systemd-analyze verify /etc/systemd/system/tierd.service 2>&1").strip() == ""

"""The simulator itself: the same seed is the same run, a few seeds hold, planted bugs do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim import crash, flips, mutants
from tests.sim.native_mutants import NATIVE_MUTANTS, ROOT, SUPPORT
from tests.sim.runner import main, run_seed


def test_seeds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "25", "--jobs", "1"]) == 0
    assert "25 seeds" in capsys.readouterr().out


def test_a_seed_is_one_run() -> None:
    """Event for event, in this process and in one with another hash seed."""
    seed = 7
    first, again = run_seed(seed), run_seed(seed)
    assert first.events == again.events
    assert len(first.events) > 10
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--seed", str(seed)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    assert f"events {first.digest}" in other.stdout


@pytest.mark.parametrize(
    "name", ["no flush before the root", "leases ignored", "home written before its members"]
)
def test_planted_bugs_are_found(name: str) -> None:
    found = mutants.run_one(name, 100)
    assert found["seeds"], "the simulator did not notice"


def test_native_mutants_can_be_planted() -> None:
    """The text that each replaces is in the sources, once."""
    for mutant in NATIVE_MUTANTS:
        assert _source(mutant.file).count(mutant.text) == 1, mutant.name
    for file, text, _ in SUPPORT:
        assert _source(file).count(text) == 1, file


def _source(name: str) -> str:
    return (ROOT / "tierd/io/_core" / name).read_text()


@pytest.mark.parametrize(
    ("name", "stops_min", "runs_each"),
    [
        ("delete", 8, 4 + 4 + 8),
        ("change a placement", 4, 4 + 4 + 8),
        ("delete on two devices", 16, 4 + 2 + 4),
    ],
)
def test_crash_at_every_write(name: str, stops_min: int, runs_each: int) -> None:
    operation = next(item for item in crash.operations() if item.name == name)
    tally = crash.crash_everywhere(operation)
    assert tally.stops >= stops_min
    assert tally.runs == tally.stops * runs_each


def test_no_flipped_bit_goes_unnoticed() -> None:
    """One byte in seven here; the bench flips every bit of every byte."""
    places = flips.undetected([5], step=7)
    assert {name: missed for name, (_, missed) in places.items()} == dict.fromkeys(places, 0)
    assert places["root"][0] == places["page, pump"][0] == 586
    assert places["extent table"][0] > 80

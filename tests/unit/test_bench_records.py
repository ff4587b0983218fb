"""The form of bench/results, so that a report can trust it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.record import FIELDS, OPERATORS, RESULTS, bars
from bench.report import shortfall

FILES = sorted(RESULTS.glob("*.json"))
RECORDS = [(p.stem, r) for p in FILES for r in json.loads(p.read_text())]


def test_there_are_records() -> None:
    assert RECORDS


@pytest.mark.parametrize(("topic", "record"), RECORDS, ids=[r["id"] for _, r in RECORDS])
def test_record_has_every_field_and_an_honest_verdict(topic: str, record: dict[str, Any]) -> None:
    assert [field for field in FIELDS if field not in record] == []
    assert record["id"].startswith(f"{topic}.")
    sign, number = bars()[record["id"]]
    assert record["bar"] == [sign, number]
    assert record["met"] == OPERATORS[sign](record["value"], number)
    assert record["met"] or record["limit"] not in {"", "not analysed yet"}


def test_each_measure_has_one_record() -> None:
    names = [record["id"] for _, record in RECORDS]
    assert len(names) == len(set(names))


def test_worst_first_means_missed_before_met() -> None:
    missed = {"value": 3.0, "bar": ["<=", 2.0]}
    met = {"value": 1.0, "bar": ["<=", 2.0]}
    wrong = {"value": 1.0, "bar": ["==", 0.0]}
    assert shortfall(wrong) > shortfall(missed) > 0 > shortfall(met)

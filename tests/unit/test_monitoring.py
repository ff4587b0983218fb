"""Metrics, and the files that watch them: what they name exists, and is bounded."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests import checkpoints
from tests.daemons import make_node
from tests.rest import serving
from tierd.api import metrics
from tierd.api.metrics import METRICS, TABLES_MAX
from tierd.cli import cli

ROOT = Path(__file__).resolve().parents[2]
ETC = ROOT / "etc"
ALERTS = yaml.safe_load((ETC / "alerts.yml").read_text())
BOARD = json.loads((ETC / "grafana.json").read_text())


async def scrape(directory: Path) -> dict[str, Any]:
    tiny = checkpoints.engram(directory / "v41", rows=100)
    device = make_node(directory, {"v41": tiny}).device
    async with serving(device, directory) as rest:
        text = await rest.get("/metrics")
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_every_metric_is_there_with_its_meaning_and_labels(tmp_path: Path) -> None:
    found = await scrape(tmp_path)
    assert len(found) == len(METRICS)
    for metric in METRICS:
        family = found[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.meaning
        assert metric.meaning.endswith(".")
        for sample in family.samples:
            assert set(sample.labels) == set(metric.labels.names)
    assert found["tierd_images"].samples[0].value == 2
    assert {s.labels["state"] for s in found["tierd_jobs"].samples} == {
        *("queued", "running", "done", "failed", "cancelled")
    }


def test_a_peer_is_shown_with_its_state_and_its_connects() -> None:
    peers = [SimpleNamespace(name=f"https://n{n}:9468", up=n == 1, connects=n) for n in range(2)]
    look: Any = SimpleNamespace(daemon=SimpleNamespace(peers=peers))
    shown = {m.name: dict(m.read(look)) for m in METRICS if m.name.startswith("tierd_peer")}
    names = [(peer.name,) for peer in peers]
    assert shown["tierd_peer_up"] == dict(zip(names, (0.0, 1.0), strict=True))
    assert shown["tierd_peer_connects_total"] == dict(zip(names, (0.0, 1.0), strict=True))


def test_tables_beyond_the_bound_are_added_up() -> None:
    rings = {f"m/{n}": Counter(lookups=n, hits=1) for n in range(TABLES_MAX + 5)}
    bounded = metrics._bounded(rings)
    assert len(bounded) == TABLES_MAX + 1
    assert bounded["other"]["hits"] == 5
    assert bounded["other"]["lookups"] == 0 + 1 + 2 + 3 + 4


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\btierd_\w+", expression))


KNOWN = {metric.name for metric in METRICS}
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_name_metrics_and_labels_that_exist_and_a_command(rule: dict[str, Any]) -> None:
    assert names_in(rule["expr"]) <= KNOWN
    assert names_in(rule["expr"]) or rule["expr"].startswith("up{")
    labels = {
        label
        for metric in METRICS
        if metric.name in names_in(rule["expr"])
        for label in metric.labels.names
    }
    used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule))) - {"instance"}
    assert used <= labels
    assert rule["labels"]["severity"] in {"page", "ticket", "info"}
    command = rule["annotations"]["description"].partition("Run: ")[2]
    assert command
    for name in re.findall(r"tierd ([a-z]+)", command):
        assert name in cli.everything().commands or command.startswith("systemctl")


def test_the_dashboard_names_metrics_that_exist() -> None:
    used: set[str] = set()
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            used |= names_in(target["expr"])
    assert used <= KNOWN
    assert {"tierd_late_steps_total", "tierd_stall_seconds_total"} <= used
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_every_bad_thing_has_an_alert() -> None:
    watched = set().union(*(names_in(rule["expr"]) for rule in RULES))
    wanted = {"tierd_tag_errors_total", "tierd_failed_requests_total", "tierd_history_degraded"}
    wanted |= {"tierd_peer_up"}
    assert wanted <= watched

"""Which changes of the configuration a running daemon takes."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest

from tierd import config
from tierd.config import load
from tierd.daemon import reload, systemd
from tierd.daemon.service import Daemon
from tierd.errors import ConfigError


def settings(**overrides: Any) -> Any:
    given = {"daemon.runtime_dir": "/run/x", "devices.paths": ["/dev/a"]}
    names = {key.replace("__", "."): value for key, value in overrides.items()}
    return load(environ={}, overrides={**given, **names}).settings


def test_what_can_change_changes_and_the_rest_is_named() -> None:
    present = settings()
    wanted = settings(
        channel__clients_max=3, log__level="debug", pump__spin_us=7, daemon__drain_ms=5
    )
    found = reload.compare(present, wanted)
    assert found.changed == ["daemon.drain_ms", "channel.clients_max", "log.level"]
    assert found.waiting == ["pump.spin_us"]
    assert found.settings.channel.clients_max == 3
    assert found.settings.daemon.drain_ms == 5
    assert found.settings.pump.spin_us == present.pump.spin_us
    assert reload.compare(found.settings, wanted).changed == []


def test_nothing_changed() -> None:
    found = reload.compare(settings(), settings())
    assert (found.changed, found.waiting) == ([], [])
    assert config.in_force(found.settings) == config.in_force(settings())


def test_every_live_key_exists() -> None:
    for key in reload.LIVE:
        section, name = key.split(".", 1)
        assert hasattr(getattr(settings(), section), name)


def test_a_mistake_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError):
        settings(channel__clients_max=0)


@pytest.mark.parametrize("fault", [ConfigError("a mistake"), RecursionError()])
def test_systemd_is_told_of_the_end_of_every_reload(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def read() -> Any:
        raise fault

    told: list[str] = []
    monkeypatch.setattr(systemd, "notify", told.append)
    daemon = Daemon(settings(), cast("Any", None), read)
    with contextlib.suppress(RecursionError):  # a fault of ours is the event loop's to log
        daemon.reload()
    assert told[0].startswith("RELOADING=1")
    assert told[1:] == ["READY=1"]

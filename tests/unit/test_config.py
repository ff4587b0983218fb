"""The settings tree: where values come from, what is refused and how, and its pages."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tierd import config
from tierd.errors import ConfigError
from tierd.tools import reference

ROOT = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tierd.toml"
    path.write_text(text)
    return path


def refusal(path: Path | None = None, environ: dict[str, str] | None = None, **overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path, environ=environ or {}, overrides=overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_derive_paths_from_the_name() -> None:
    paths = config.load(environ={"TIERD__DAEMON__NAME": "blue"}).settings.paths
    assert paths.engine_socket == Path("/run/blue/engine.sock")
    assert paths.api_socket == Path("/run/blue/api.sock")
    assert paths.catalog == Path("/var/lib/blue/catalog.db")
    assert paths.lock == Path("/run/blue/daemon.lock")


def test_stronger_origins_win_and_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[pump]\nqueue_depth = 7\nspin_us = 8\n\n[io]\ncrc_sample = 9\n")
    environ = {"TIERD__PUMP__QUEUE_DEPTH": "11", "TIERD__PUMP__SPIN_US": "12", "UNRELATED": "x"}
    loaded = config.load(
        path, environ=environ, overrides={"pump.queue_depth": 13, "pump.cpu": None}
    )
    settings, origins = loaded.settings, loaded.origins
    assert (settings.pump.queue_depth, origins["pump.queue_depth"]) == (13, "command line")
    assert settings.pump.spin_us == 12
    assert origins["pump.spin_us"] == "environment variable TIERD__PUMP__SPIN_US"
    assert (settings.io.crc_sample, origins["io.crc_sample"]) == (9, f"{path}:6")
    assert (settings.pump.cpu, origins["pump.cpu"]) == (-1, "default")


def test_tierd_config_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[log]\nlevel = "debug"\n')
    loaded = config.load(environ={"TIERD_CONFIG": str(path)})
    assert loaded.path == path
    assert loaded.settings.log.level == "debug"


def test_lists_and_modes_from_the_environment() -> None:
    environ = {
        "TIERD__DEVICES__PATHS": "/dev/a, /dev/b",
        "TIERD__ENGINE__SOCKET_MODE": "0666",
        "TIERD__API__SOCKET_MODE": "0o600",
    }
    settings = config.load(environ=environ).settings
    assert settings.devices.paths == ["/dev/a", "/dev/b"]
    assert settings.engine.socket_mode == 0o666
    assert settings.api.socket_mode == 0o600
    json_list = {"TIERD__DEVICES__PATHS": '["/dev/a", "/dev/b"]'}
    assert config.load(environ=json_list).settings.devices.paths == ["/dev/a", "/dev/b"]


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("[io]\n# a\ncrc_smaple = 3\n", 3, ["unknown key io.crc_smaple", "io.crc_sample?"]),
        ("[pupm]\ncount = 1\n", 1, ["unknown section pupm", "did you mean pump?"]),
        ("[log]\nrows_max = 3\n", 2, ["unknown key log.rows_max", "channel.rows_max?"]),
        ("[log]\nzzz = 3\n", 2, ["unknown key log.zzz", "run: tierd config reference"]),
        ("queue_depth = 3\n", 1, ["unknown section queue_depth", "pump.queue_depth?"]),
        ("log = 3\n", 1, ["log is a section", "[log]"]),
        ("[pump]\n\nqueue_depth = 0\n", 3, ["pump.queue_depth = 0", "greater than or equal to 1"]),
        ('[pump]\ntransport = "uring"\n', 2, ["pump.transport = 'uring'", "io_uring"]),
        ('[daemon]\nname = "a/b"\n', 2, ["daemon.name = 'a/b'"]),
        ("[engine]\nsocket_mode = 9999\n", 2, ["engine.socket_mode = 9999"]),
    ],
)
def test_refusals_name_file_line_and_key(
    tmp_path: Path, text: str, line: int, parts: list[str]
) -> None:
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("daemon.drain_ms", "2s", "in milliseconds; write drain_ms = 2000"),
        ("pump.park_us", "1.5 ms", "in microseconds; write park_us = 1500"),
        ("api.requests_per_s", "50/s", "in units a second; write requests_per_s = 50"),
        ("channel.arena_pages_max", "4GiB", "without a unit; run: tierd config reference"),
        ("daemon.drain_ms", "2 fortnights", "without a unit; run: tierd config reference"),
    ],
)
def test_numbers_with_a_unit_are_told_the_right_number(key: str, value: str, advice: str) -> None:
    message = refusal(**{key: value})
    assert f"{key} = {value!r}: a plain number is wanted" in message
    assert message.endswith(advice)


def test_sockets_that_would_let_strangers_in() -> None:
    open_to_all = {"api.listen": "0.0.0.0:9468"}
    assert "set api.token_file" in refusal(**open_to_all)
    with_token = {**open_to_all, "api.token_file": "/etc/tierd/token"}
    assert "the token would cross the network in the clear" in refusal(**with_token)
    half_tls = {**with_token, "api.tls_key": "/etc/tierd/key.pem"}
    assert "api.tls_certificate and api.tls_key are needed together" in refusal(**half_tls)
    loopback = {"api.listen": "[::1]:9468"}
    assert "set api.token_file" in refusal(**loopback)
    for text in ("9468", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", ":80"):
        assert f"api.listen: {text!r} is not HOST:PORT" in refusal(**{"api.listen": text})
        assert f"metrics.listen: {text!r}" in refusal(**{"metrics.listen": text})
    fine = {
        **half_tls,
        "api.tls_certificate": "/etc/tierd/certificate.pem",
        "metrics.listen": "0.0.0.0:9469",
    }
    config.load(environ={}, overrides=fine)
    config.load(environ={}, overrides={**loopback, "api.token_file": "/etc/tierd/token"})


def test_refusals_name_the_variable() -> None:
    assert "TIERD__PUMP__COUTN: unknown key pump.coutn; did you mean pump.count?" in refusal(
        environ={"TIERD__PUMP__COUTN": "1"}
    )
    assert "TIERD__PUPM__COUNT: unknown section pupm; did you mean pump?" in refusal(
        environ={"TIERD__PUPM__COUNT": "1"}
    )
    assert "TIERD__PUMP__COUNT: pump.count = 'x'" in refusal(environ={"TIERD__PUMP__COUNT": "x"})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert f"{missing}: no such configuration file" in refusal(missing)
    assert "cannot be read" in refusal(tmp_path)
    assert "line 1" in refusal(write(tmp_path, "a = = 3"))
    assert "not valid TOML" in refusal(write(tmp_path, "a = " + "[" * 3000))
    assert "not valid TOML" in refusal(write(tmp_path, "a = " + "1" * 5000))
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    assert "not UTF-8" in refusal(latin)


def test_paths_are_checked_together(tmp_path: Path) -> None:
    assert "{nmae} is not a placeholder" in refusal(**{"daemon.runtime_dir": "/run/{nmae}"})
    assert "not an absolute path" in refusal(**{"daemon.state_dir": "state"})
    assert "longer than 107 bytes" in refusal(**{"engine.socket": "/tmp/" + "x" * 120})
    twice = {"devices.paths": ["/dev/a", "/dev/b", "/dev/a"]}
    assert "devices.paths lists /dev/a twice" in refusal(**twice)
    same = {"engine.socket": "/tmp/s", "api.socket": "/tmp/s"}
    assert "engine.socket and api.socket are both /tmp/s" in refusal(**same)


def test_the_example_file_is_the_model() -> None:
    text = (ROOT / "etc/tierd.toml").read_text()
    assert text == reference.toml(), "run: tierd config reference > etc/tierd.toml"


def test_the_example_file_uncommented_is_the_defaults(tmp_path: Path) -> None:
    lines = (ROOT / "etc/tierd.toml").read_text().splitlines()
    bare = [line[1:] if line.startswith("#") and line[1:2].isalpha() else line for line in lines]
    path = write(tmp_path, "\n".join(bare))
    given = tomllib.loads(path.read_text())
    assert {f"{s}.{k}" for s, keys in given.items() for k in keys} == {
        f"{section}.{key}" for section, key, _ in config.walk()
    }
    assert config.load(path, environ={}).settings.model_dump() == config.Settings().model_dump()


def test_the_reference_page_is_the_model() -> None:
    text = (ROOT / "docs/config.md").read_text()
    command = "tierd config reference --format markdown > docs/config.md"
    assert text == reference.markdown(), f"run: {command}"


def test_every_key_explains_itself_and_names_its_unit() -> None:
    for section, key, field in config.walk():
        assert field.description, f"{section}.{key}"
        assert field.description.endswith("."), f"{section}.{key}"
        if "how long" in field.description.lower():
            assert key.endswith(("_us", "_ms")), f"{section}.{key}: say which unit"

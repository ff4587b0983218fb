"""The settings tree: defaults, a TOML file, ``TIERD__SECTION__KEY``, the command line; last wins.

Unknown keys are refused, whoever wrote them, because a misspelt key that is silently ignored is
found only when it was needed. Every key explains itself here; ``etc/tierd.toml`` and
``docs/config.md`` are held to these explanations by a test.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tierd.config.dram import DramSection
from tierd.config.explain import wrong_unit
from tierd.config.layers import ENV_PREFIX, Layer, nest, place, read_file
from tierd.config.listen import check_listeners
from tierd.config.remote import ExportsSection, RemoteSection, check_remote
from tierd.config.section import Section
from tierd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

# sun_path holds 108 bytes with its final zero.
SOCKET_PATH_BYTES_MAX = 107


def _parse_mode(value: object) -> object:
    """Accept 0o660, "0o660" and "0660": people write permissions in octal."""
    if isinstance(value, str) and re.fullmatch(r"0?o?[0-7]{3,4}", value):
        return int(value.replace("o", ""), 8)
    return value


FileMode = Annotated[int, BeforeValidator(_parse_mode), Field(ge=0, le=0o777)]


class DaemonSection(Section):
    """Who this daemon is and where it keeps its files."""

    name: str = Field(
        "tierd",
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,31}$",
        description="Name of this instance. Daemons with different names live side by side: "
        "the directories below, and so locks and sockets, derive from it.",
    )
    state_dir: str = Field(
        "/var/lib/{name}",
        description="Where history (catalog.db) is kept. Deleting it loses nothing but history.",
    )
    runtime_dir: str = Field(
        "/run/{name}",
        description="Where the lock file and, by default, the sockets lie.",
    )
    drain_ms: int = Field(
        2000,
        ge=0,
        le=60_000,
        description="On a clean stop, how long engines may take to go on without the daemon, "
        "and reads that are under way to land, before the daemon leaves all the same.",
    )
    watchdog_ms: int = Field(
        2000,
        ge=200,
        le=600_000,
        description="A pump or an event loop that stands still for this long turns /healthz red.",
    )
    watchdog_ends: bool = Field(
        False,
        description="End the process when something has stood still twice as long, for its "
        "supervisor to start it anew. Engines serve themselves meanwhile.",
    )


class DevicesSection(Section):
    """The devices whose images are served."""

    paths: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Block devices or files, made ready with `tierd format`. "
        "The daemon holds each of them exclusively.",
    )


class EngineSection(Section):
    """The socket at which engines attach."""

    socket: str = Field(
        "{runtime_dir}/engine.sock",
        description="Unix socket of the attach protocol (docs/protocol.md).",
    )
    socket_mode: FileMode = Field(
        0o660,
        description="Permissions of the socket. Whoever may connect may read every table.",
    )
    socket_group: str = Field(
        "",
        description="Group of both sockets, so that engines need not run as the daemon's user; "
        "empty leaves the daemon's own.",
    )
    expected_ranks: int = Field(
        0,
        ge=0,
        le=4096,
        description="Ranks that an engine on this node must say it has (its world size); "
        "a client that says another number is refused. 0 accepts any.",
    )


class ApiSection(Section):
    """The REST interface."""

    socket: str = Field(
        "{runtime_dir}/api.sock",
        description="Unix socket of the REST interface; `tierd status` asks here.",
    )
    socket_mode: FileMode = Field(
        0o660, description="Permissions of the socket. Whoever may connect may read."
    )
    admin_group: str = Field(
        "",
        description="Group whose members may also change things over the Unix socket; root and "
        "the daemon's own user always may.",
    )
    listen: str = Field(
        "",
        description="HOST:PORT of a TCP socket, such as 127.0.0.1:9468; empty: none. It needs "
        "api.token_file, and TLS as well where HOST is not a loopback address.",
    )
    token_file: str = Field(
        "",
        description="File that holds the bearer token of the TCP socket, mode 0600. Whoever has "
        "the token may change everything.",
    )
    tls_certificate: str = Field(
        "", description="PEM file with the certificate chain of the TCP socket."
    )
    tls_key: str = Field("", description="PEM file with the certificate's private key.")
    connections_max: int = Field(
        128, ge=8, le=4096, description="Connections at once of a listener; one more gets 503."
    )
    streams_max: int = Field(
        32,
        ge=1,
        le=1024,
        description="Readers of server-sent events at once; one more is answered 503.",
    )
    requests_per_s: int = Field(
        500,
        ge=1,
        le=1_000_000,
        description="Requests a second of one user (Unix socket) or address (TCP), with bursts of "
        "as many; what comes faster is answered 429.",
    )


class MetricsSection(Section):
    """The read-only listener for /metrics, /healthz and /readyz."""

    listen: str = Field(
        "",
        description="HOST:PORT, such as 127.0.0.1:9469, for Prometheus and load balancers; "
        "empty: none. It answers without a token and can change nothing.",
    )


class PumpSection(Section):
    """The native threads that serve rings."""

    transport: Literal["auto", "io_uring", "threads"] = Field(
        "auto",
        description="How bytes move: io_uring, preadv threads, or auto: io_uring where the "
        "kernel grants it. `tierd status` says what it became, and why.",
    )
    queue_depth: int = Field(
        128, ge=1, le=4096, description="Reads in flight of one pump, on all its devices together."
    )
    read_threads: int = Field(
        16, ge=1, le=256, description="Threads of one pump where the transport is threads."
    )
    spin_us: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description="How long an idle pump spins before it parks. Spinning costs a core and "
        "saves a wake-up of some 50 us.",
    )
    park_us: int = Field(
        50,
        ge=1,
        le=1_000_000,
        description="How long a parked pump sleeps at most while a GPU ring, which cannot wake "
        "it, is attached.",
    )
    count: int = Field(
        1, ge=1, le=64, description="Pumps. Each client is served by the one with fewest rings."
    )
    cpu: int = Field(
        -1,
        ge=-1,
        le=4095,
        description="CPU of the first pump; the others take the next ones. -1 pins none.",
    )


class IoSection(Section):
    """What is checked while rows are served, and in the background."""

    crc_sample: int = Field(
        16,
        ge=0,
        le=1_000_000,
        description="The CRC of one page in so many is checked on the hot path, 0: none. "
        "Identity, generation and page number are checked on every page, tags on every row.",
    )
    scrub: bool = Field(
        True,
        description="Whether the daemon reads and checks every page in the background, again and "
        "again (docs/operating/recovery.md). It goes on where it stopped after a restart.",
    )
    scrub_mib_s: int = Field(
        32,
        ge=1,
        le=100_000,
        description="How much is scrubbed at most, MiB/s. While rows are read it waits; it never "
        "falls below some 1 MiB/s.",
    )
    scrub_interval_h: int = Field(
        168,
        ge=0,
        le=10_000,
        description="Hours between the end of a pass over all images and the start of the next.",
    )


class ChannelSection(Section):
    """Bounds on what one client may ask for."""

    rows_max: int = Field(
        65_536,
        ge=1,
        le=1 << 20,
        description="Largest number of missing rows that one request may list.",
    )
    arena_pages_max: int = Field(
        1 << 18,
        ge=1,
        le=1 << 21,
        description="Largest sum of one client's arenas, in pages of 4 KiB: the daemon pins "
        "that much of the client's memory.",
    )
    clients_max: int = Field(
        64, ge=1, le=1024, description="Clients (engine ranks) attached at once."
    )


class KvSection(Section):
    """The host pool for KV caches beyond HBM (docs/kv.md)."""

    pool_bytes: int = Field(
        0,
        ge=0,
        le=1 << 45,
        description="Host memory that engine ranks may lease for the full KV of their requests; "
        "it is taken as they use it and pinned by them. 0: no pool.",
    )


class ControllerSection(Section):
    """What watches the cache split and the placement (docs/controller.md)."""

    mode: Literal["steer", "advise", "off"] = Field(
        "steer",
        description="steer: decide from what attached clients do and move their ways; advise: "
        "decide and only show it; either way each decision has its reason (`tierd explain`). off: "
        "look at nothing.",
    )
    windows: str = Field(
        "",
        description="Windows file of the probe, measured on this GPU with this engine. Without "
        "it there are curves and read times, but no decisions.",
    )
    interval_ms: int = Field(500, ge=50, le=60_000, description="How often clients are looked at.")
    half_life_s: int = Field(
        60,
        ge=1,
        le=86_400,
        description="Traffic of so long ago counts half in the miss curves.",
    )


class LossySection(Section):
    """Rows that are left out on purpose: it changes what models compute (docs/controller.md)."""

    seen_sets: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Files of `tierd trace seen`. Rows of their tables that no trace saw are not "
        "read: engines get zeroes for them. `tierd status` says so first.",
    )


class CatalogSection(Section):
    """History."""

    events_max: int = Field(
        100_000, ge=100, le=100_000_000, description="Events kept; the oldest go first."
    )


class LogSection(Section):
    """The daemon's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is written."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto",
        description="One JSON object a line, or text for people; auto is text on a terminal "
        "and JSON elsewhere.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Paths:
    """The files that a daemon of these settings uses, placeholders filled in."""

    state_dir: Path
    runtime_dir: Path
    engine_socket: Path
    api_socket: Path

    @property
    def catalog(self) -> Path:
        """The history database."""
        return self.state_dir / "catalog.db"

    @property
    def lock(self) -> Path:
        """Held by the one daemon of this name."""
        return self.runtime_dir / "daemon.lock"


class Settings(BaseSettings):
    """The whole tree. :func:`load` builds it; ``Settings()`` alone is the defaults."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    daemon: DaemonSection = DaemonSection()
    devices: DevicesSection = DevicesSection()
    engine: EngineSection = EngineSection()
    api: ApiSection = ApiSection()
    metrics: MetricsSection = MetricsSection()
    pump: PumpSection = PumpSection()
    io: IoSection = IoSection()
    channel: ChannelSection = ChannelSection()
    kv: KvSection = KvSection()
    dram: DramSection = DramSection()
    exports: ExportsSection = ExportsSection()
    remote: RemoteSection = RemoteSection()
    controller: ControllerSection = ControllerSection()
    lossy: LossySection = LossySection()
    catalog: CatalogSection = CatalogSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        paths = self.paths
        for key, path in (("engine", paths.engine_socket), ("api", paths.api_socket)):
            if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
                text = f"{key}.socket: {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes"
                raise ValueError(text + ", the most that a Unix socket's path may have")
        if paths.engine_socket == paths.api_socket:
            raise ValueError(f"engine.socket and api.socket are both {paths.api_socket}")
        check_listeners(self.api, self.metrics)
        check_remote(self.exports, self.remote, self.api)
        for device in self.devices.paths:
            if self.devices.paths.count(device) > 1:
                raise ValueError(f"devices.paths lists {device} twice")
        return self

    @property
    def paths(self) -> Paths:
        """The files these settings lead to.

        Raises:
            ValueError: an unknown placeholder or a path that is not absolute.
        """
        known = {"name": self.daemon.name}
        state_dir = _expand("daemon.state_dir", self.daemon.state_dir, known)
        runtime_dir = _expand("daemon.runtime_dir", self.daemon.runtime_dir, known)
        known |= {"runtime_dir": str(runtime_dir), "state_dir": str(state_dir)}
        return Paths(
            state_dir=state_dir,
            runtime_dir=runtime_dir,
            engine_socket=_expand("engine.socket", self.engine.socket, known),
            api_socket=_expand("api.socket", self.api.socket, known),
        )


def _expand(key: str, template: str, known: Mapping[str, str]) -> Path:
    def fill(match: re.Match[str]) -> str:
        if match[1] not in known:
            names = ", ".join("{" + name + "}" for name in known)
            raise ValueError(f"{key}: {match[0]} is not a placeholder; there are: {names}")
        return known[match[1]]

    path = Path(re.sub(r"\{([^{}]*)\}", fill, template))
    if not path.is_absolute():
        raise ValueError(f"{key}: {template!r} is not an absolute path")
    return path


class _Given(PydanticBaseSettingsSource):
    """A layer that was read beforehand, so that its errors can be told apart by origin."""

    def __init__(self, settings_cls: type[BaseSettings], layer: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return one section."""
        del field
        return self._layer.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._layer


def _bind(layers: list[dict[str, Any]]) -> type[Settings]:
    """Make a class that reads these layers, first wins, and nothing else.

    pydantic-settings asks the class for its sources; its own environment source would pass over
    variables that name no section, and a dotenv file would be a stray influence.
    """

    class Bound(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_Given(settings_cls, layer) for layer in layers)

    return Bound


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and where each value came from.

    Attributes:
        path: the file that was read, None if there was none.
        origins: ``section.key`` -> origin, for every key.
    """

    settings: Settings
    path: Path | None
    origins: dict[str, str]


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read the settings.

    Args:
        path: the file; None means ``TIERD_CONFIG``, else ``/etc/tierd/tierd.toml`` if it exists.
        environ: the environment; None means the process's.
        overrides: ``section.key`` -> value, from the command line; None values are left out.

    Raises:
        ConfigError: one line that names the file and line, or the variable, and the key.
    """
    environ = os.environ if environ is None else environ
    file_path, file_layer = read_file(path, environ)
    layers = [
        Layer("command line", nest(overrides or {})),
        Layer("environment", _read_environment(environ)),
        *([file_layer] if file_layer else []),
    ]
    for layer in layers:
        _refuse_unknown(layer)
    try:
        settings = _bind([layer.values for layer in layers])()
    except ValidationError as error:
        raise ConfigError(_explain(error, layers)) from None
    origins = {
        f"{section}.{key}": place(layers, section, key, "default") for section, key, _ in walk()
    }
    return Loaded(settings=settings, path=file_path, origins=origins)


def walk() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, key, field) for every key, in the order of the reference."""
    for section, field in Settings.model_fields.items():
        model = cast("type[Section]", field.annotation)
        for key, inner in model.model_fields.items():
            yield section, key, inner


def in_force(settings: Settings) -> dict[str, Any]:
    """Return ``section.key`` -> JSON-ready value, placeholders in paths filled in."""
    paths = settings.paths
    filled = {
        "daemon.state_dir": str(paths.state_dir),
        "daemon.runtime_dir": str(paths.runtime_dir),
        "engine.socket": str(paths.engine_socket),
        "api.socket": str(paths.api_socket),
    }
    raw = settings.model_dump(mode="json")
    return {f"{section}.{key}": raw[section][key] for section, key, _ in walk()} | filled


def section_model(section: str) -> type[Section]:
    """Return the class of a section."""
    return cast("type[Section]", Settings.model_fields[section].annotation)


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collect ``TIERD__SECTION__KEY``; a list is JSON or comma-separated."""
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        section, _, key = name[len(ENV_PREFIX) :].lower().partition("__")
        values.setdefault(section, {})[key] = _split_list(section, key, text)
    return values


def _split_list(section: str, key: str, text: str) -> str | list[str]:
    field = Settings.model_fields.get(section)
    inner = section_model(section).model_fields.get(key) if field else None
    if inner is None or inner.annotation != list[str]:
        return text
    text = text.strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("\"'") for part in text.split(",") if part.strip()]


def _refuse_unknown(layer: Layer) -> None:
    known = [f"{section}.{key}" for section, key, _ in walk()]
    sections = list(Settings.model_fields)
    for section, inner in layer.values.items():
        if section not in sections:
            near = _near(section, sections) or _near_key(section, known)
            raise ConfigError(_unknown(layer, section, None, near))
        if not isinstance(inner, dict):
            where = layer.where(section, None)
            raise ConfigError(f"{where}: {section} is a section; write it as [{section}]")
        for key in inner:
            if f"{section}.{key}" not in known:
                near = _near(f"{section}.{key}", known) or _near_key(key, known)
                raise ConfigError(_unknown(layer, section, key, near))


def _unknown(layer: Layer, section: str, key: str | None, near: str | None) -> str:
    what = f"unknown key {section}.{key}" if key is not None else f"unknown section {section}"
    cure = f"; did you mean {near}?" if near else "; run: tierd config reference"
    if key is None and layer.origin == "environment":
        key = next(iter(layer.values[section]))  # a variable is found by its whole name
    return f"{layer.where(section, key)}: {what}{cure}"


def _near(word: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return found[0] if found else None


def _near_key(key: str, known: list[str]) -> str | None:
    """Find a key by its last part: it may stand in the wrong section."""
    by_name = {dotted.partition(".")[2]: dotted for dotted in known}
    found = _near(key, list(by_name))
    return by_name[found] if found else None


def _explain(error: ValidationError, layers: list[Layer]) -> str:
    first = error.errors(include_url=False)[0]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = first["msg"].removeprefix("Value error, ")
    location = [str(part) for part in first["loc"]]
    if len(location) < 2:  # a rule across keys: its text names them
        return text + more
    section, key = location[0], location[1]
    where = place(layers, section, key, "default")
    text = wrong_unit(key, first["input"]) or text[0].lower() + text[1:]
    return f"{where}: {section}.{key} = {first['input']!r}: {text}{more}"

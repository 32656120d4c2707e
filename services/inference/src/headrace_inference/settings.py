"""Settings of the inference service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from headrace_inference import INFO
from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS
from headrace_inference.engine import ENGINES, EngineKind
from headrace_runtime.registries import NameIn
from headrace_runtime.settings.sections import Port, Section, ServiceSettings
from headrace_runtime.settings.table import Fixed

if TYPE_CHECKING:
    from headrace_inference.engine import Engine

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
HEARTBEAT_S = 2.0
"""Longest time between two heartbeats. Changes are announced at once, so a heartbeat only tells that the replica
lives."""
_HEARTBEATS_PER_TTL = 5
"""Heartbeats in `ttl_s`: four may be late or lost before the replica counts as dead."""


class TorchSettings(Section):
    """The `torch` engine: transformers models on a CPU or a GPU."""

    COMMON: ClassVar = ("device",)
    SHARED: ClassVar = ("dtype", "sequences_max", "waiting_max", "context_tokens_max", "probe_tolerance")
    PARAMETERS: ClassVar = ("trace",)

    device: str = "auto"
    """`auto` (a GPU when there is one), or a torch device such as `cpu` or `cuda:1`."""
    dtype: Dtype = "auto"
    """Type of weights and KV: see `inference.dtype`."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads per operator; 0 uses one on machines with up to four cores, else half the cores."""
    trace: bool = True
    """Whether to record the forward pass once per architecture and replay it without Python. A recording that differs
    from the model's own code is not used, so nobody has to turn it off."""
    sequences_max: Annotated[int, Field(ge=1, le=1024)] = 64
    """Sequences of one version that decode together."""
    waiting_max: Annotated[int, Field(ge=0)] = 256
    """Sequences that may wait for a row of a batch, of all versions; further requests get the error `overloaded`."""
    prefill_tokens_max: Annotated[int, Field(ge=16)] = 512
    """Prompt tokens computed between two decode steps. A longer prompt is split so that other sequences keep
    decoding."""
    context_tokens_max: Positive = 32_768
    """Largest length of prompt plus completion, unless the model's own limit is lower."""
    kv_mib_max: Positive = 2048
    """Memory for the KV of one version's running sequences."""
    prefix_mib_max: Annotated[int, Field(ge=0)] = 256
    """Memory for the KV of one version's finished sequences, which prompts that extend them reuse; 0 stores none."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """See `inference.probe_tolerance`."""


def _torch(settings: TorchSettings) -> Engine:
    from headrace_inference.torch_engine.engine import TorchEngine

    return TorchEngine(settings)


TORCH = EngineKind(_torch, TorchSettings)
"""The engine `torch` (`headrace.engines`)."""


class InferenceSettings(ServiceSettings):
    """Settings of one replica. The section of an engine may set `dtype`, `sequences_max`, `waiting_max`,
    `context_tokens_max` and `probe_tolerance` to other values."""

    COMMON: ClassVar = ("dtype",)
    FIXED: ClassVar = {"heartbeat_s": Fixed(HEARTBEAT_S, "set inference.ttl_s, whose fifth is the longest interval")}
    PARAMETERS: ClassVar = ("drain_s",)

    port: Port = INFO.port
    """Port of the OpenAI-compatible HTTP interface."""
    replica_id: str = ""
    """Name of this replica on the bus; empty derives it from host and port."""
    advertise_url: str = ""
    """URL at which gateways reach this replica; empty derives it from host and port."""
    engine: Annotated[str, NameIn(ENGINES)] = "torch"
    """Engine that computes the tokens. Its own settings are in the section of its name."""
    dtype: Dtype = "auto"
    """Type of weights and KV. `auto` is bfloat16 where the trainer keeps frozen weights in bfloat16 (LoRA, engine
    `torch`); otherwise float32 on a CPU, and the checkpoint's own on a GPU."""
    sequences_max: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences of one version that decode together; of one full version and its adapters in vLLM. The engine `torch`
    takes at most 1024."""
    waiting_max: Annotated[int, Field(ge=0)] = 256
    """Sequences that may wait, of all versions; further requests get the error `overloaded`."""
    context_tokens_max: Positive = 32_768
    """Largest length of prompt plus completion, unless the model's own limit is lower."""
    probe_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest accepted difference between the engine's logprobs and a manifest's fingerprint, in nats. None: 0.001 in
    float32 and in vLLM; in the engine `torch` with types of 16 bits the mean difference may be 0.02 times the square
    root of the number of layers."""
    ttl_s: Annotated[float, Field(ge=1)] = 10.0
    """Time without a heartbeat after which gateways consider this replica dead. It sends one every 2 s, or in a fifth
    of this time if that is less."""
    versions_max: Annotated[int, Field(ge=1, le=64)] = 8
    """Versions loaded at a time. A further version waits if another one is draining; otherwise it is announced as
    failed."""
    drain_s: Seconds = 5.0
    """Seconds for which a version that routing dropped still answers. All gateways must learn of the change in this
    time. In this time the version also takes over streams of replicas that die."""
    tool_parser: Annotated[str, NameIn(TOOL_PARSERS)] = "hermes"
    """Parser of tool calls: `hermes` reads `<tool_call>{json}</tool_call>`, and `vllm:NAME` is a parser of vLLM."""
    reasoning_parser: Annotated[str, NameIn(REASONING_PARSERS)] = "think"
    """Parser of reasoning: `think` reads `<think>...</think>` before the answer; `vllm:NAME` is a parser of vLLM."""

    @classmethod
    def announced(cls) -> dict[str, type[Section]]:
        """Return the settings class of each installed engine."""
        return {name: kind.settings for name, kind in ENGINES.all().items()}

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(HEARTBEAT_S, self.ttl_s / _HEARTBEATS_PER_TTL)

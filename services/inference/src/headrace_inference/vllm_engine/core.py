"""Protocols of the parts of vLLM that the engine uses. Only `library` imports the package itself.

The protocols follow `vllm.v1.engine.async_llm.AsyncLLM` and its outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace_inference.vllm_engine.probing import StepSeparation


class LogprobEntry(Protocol):
    """Entry of one token in `CompletionPiece.logprobs`."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...


class CompletionPiece(Protocol):
    """New tokens of a request: `vllm.outputs.CompletionOutput`."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, LogprobEntry]] | None: ...
    @property
    def finish_reason(self) -> str | None: ...


class RequestPiece(Protocol):
    """New output of a request: `vllm.outputs.RequestOutput`."""

    @property
    def outputs(self) -> Sequence[CompletionPiece]: ...
    @property
    def num_cached_tokens(self) -> int | None: ...


class LLM(Protocol):
    """Interface of one engine core. Methods are called from one event loop; `shutdown` blocks."""

    @property
    def errored(self) -> bool:
        """Whether the engine core has died and cannot answer any more."""

    def generate(
        self,
        prompt: object,
        sampling_params: object,
        request_id: str,
        *,
        lora_request: object | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestPiece, None]:
        """Generate tokens for a request. Closing the generator aborts it."""

    async def add_lora(self, lora_request: object) -> bool: ...

    async def pin_lora(self, lora_id: int) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


@dataclass(frozen=True)
class Request:
    """Parameters of one choice. Names and meanings are those of `vllm.SamplingParams`."""

    max_tokens: int
    delta: bool
    """Whether tokens are returned as they are sampled, instead of all at the end."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprob_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """Grammar for vLLM's back end `guidance` (`StructuredOutputsParams.grammar`). Empty: none."""
    priority: int = 0
    """Priority, an argument of `generate`. Lower numbers go first; equal ones in order of arrival."""


@dataclass(frozen=True)
class StartedCore:
    """A started engine core of vLLM, with vocabulary size and context length of its model."""

    llm: LLM
    vocabulary: int
    context_tokens: int


class Library(Protocol):
    """Interface of the functions of vLLM that the engine needs, so that tests can replace the package."""

    def start(self, folder: Path) -> StartedCore:
        """Start an engine core for the weights in `folder`. May block for a minute, and may raise any exception."""

    def abandon(self) -> None:
        """Kill the engine core that `start` is starting in another thread. `start` then raises an exception."""

    def parameters(self, request: Request) -> object:
        """Return the `vllm.SamplingParams` of a request."""

    def adapter(self, name: str, number: int, folder: Path) -> object:
        """Return a `vllm.lora.request.LoRARequest`. Its number must be new, because vLLM's caches use it as the key."""


@dataclass(eq=False)
class Core:
    """A running engine core of vLLM and its loaded versions: one full version and LoRA adapters for it."""

    base: str
    started: StartedCore
    versions: set[str] = field(default_factory=set)
    separation: StepSeparation = field(default_factory=StepSeparation)

    @property
    def llm(self) -> LLM:
        """Interface of the running engine core."""
        return self.started.llm

    @property
    def adapters(self) -> int:
        """Number of loaded adapters."""
        return len(self.versions - {self.base})

    async def stop(self) -> None:
        """Stop the process of the engine core, after its output handler, which would otherwise log a failure."""
        handler: asyncio.Task[None] | None = getattr(self.llm, "output_handler", None)
        if handler is not None:
            handler.cancel()
        await asyncio.to_thread(self.llm.shutdown)

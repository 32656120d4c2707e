"""What is used of vLLM, as protocols: the package itself is imported by `library` alone.

The shapes are those of `vllm.v1.engine.async_llm.AsyncLLM` and of what it gives out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace_inference.vllm_engine.apart import StepSeparation


class LogprobEntry(Protocol):
    """One token's entry in `CompletionPiece.logprobs`."""

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
    """`vllm.outputs.RequestOutput`."""

    @property
    def outputs(self) -> Sequence[CompletionPiece]: ...
    @property
    def num_cached_tokens(self) -> int | None: ...


class LLM(Protocol):
    """One engine core. Methods are called from one event loop; `shutdown` blocks."""

    @property
    def errored(self) -> bool:
        """It died and will never answer again."""

    def generate(
        self,
        prompt: object,
        sampling_params: object,
        request_id: str,
        *,
        lora_request: object | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestPiece, None]:
        """Closing the generator aborts the request."""

    async def add_lora(self, lora_request: object) -> bool: ...

    async def pin_lora(self, lora_id: int) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


@dataclass(frozen=True)
class Request:
    """What a choice asks of vLLM; names and meanings are those of `vllm.SamplingParams`."""

    max_tokens: int
    delta: bool
    """New tokens as they come, instead of all at the end."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprob_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """`vllm.sampling_params.StructuredOutputsParams.grammar`, for its back end `guidance`; empty: none."""
    priority: int = 0
    """Lower numbers go first; of equal ones the earlier. An argument of `generate`."""


@dataclass(frozen=True)
class Started:
    """An engine core that answers."""

    llm: LLM
    vocabulary: int
    context_tokens: int


class Library(Protocol):
    """The package."""

    def start(self, folder: Path) -> Started:
        """Start an engine core for the weights in `folder`. Blocks, for a minute perhaps; raises whatever it likes."""

    def abandon(self) -> None:
        """End what `start` is starting in another thread; it raises then."""

    def parameters(self, request: Request) -> object:
        """`vllm.SamplingParams`."""

    def adapter(self, name: str, number: int, folder: Path) -> object:
        """`vllm.lora.request.LoRARequest`. Numbers are never used twice: what is cached goes by them."""


@dataclass(eq=False)
class Core:
    """An engine core and the versions that it answers for: a full one and adapters of it."""

    base: str
    started: Started
    versions: set[str] = field(default_factory=set)
    apart: StepSeparation = field(default_factory=StepSeparation)

    @property
    def llm(self) -> LLM:
        return self.started.llm

    @property
    def adapters(self) -> int:
        return len(self.versions - {self.base})

    async def stop(self) -> None:
        """End its process. What waits for its answers ends first: it would log the end as a failure."""
        handler: asyncio.Task[None] | None = getattr(self.llm, "output_handler", None)
        if handler is not None:
            handler.cancel()
        await asyncio.to_thread(self.llm.shutdown)

"""Stand-in for the package vLLM: engine cores that compute one plain forward pass of transformers for each token.

Its inputs and outputs have the types of `headrace_inference.vllm_engine.core`, and the engine contract
(`test_engine.py`) holds it to the real package. It recomputes everything for each token: its answers are correct, but
slow.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, grammar_from
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from headrace_inference.importer import load_model
from headrace_inference.vllm_engine.core import Request, RequestPiece, StartedCore
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_runtime.grammars.vocabulary import allow_stops, library_vocabulary

BLOCK = 16
"""Tokens of a prompt that are cached together."""
PORTION = 2
"""Tokens per delivery: a slow reader gets several at once."""


@dataclass(frozen=True)
class Entry:
    logprob: float
    rank: int | None


@dataclass(frozen=True)
class Piece:
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Entry]]
    finish_reason: str | None


@dataclass(frozen=True)
class ScriptedRequest:
    outputs: Sequence[Piece]
    num_cached_tokens: int


@dataclass(frozen=True)
class Adapter:
    name: str
    number: int
    folder: Path


class CoreDied(Exception):
    """Counterpart of `vllm.v1.engine.exceptions.EngineDeadError`."""


class StandIn:
    """Stand-in for the protocol `Library`."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self.started: list[StandInLLM] = []
        self.abandoned = False
        self.hold: threading.Event | None = None
        """Set it, and `start` waits for it."""

    def start(self, folder: Path) -> StartedCore:
        while self.hold is not None and not self.hold.wait(0.01):
            if self.abandoned:
                raise CoreDied("killed while it started")
        llm = self.core(folder)
        self.started.append(llm)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        context = min(self.settings.context_tokens_max, config["max_position_embeddings"])
        return StartedCore(llm, config["vocab_size"], context)

    def core(self, folder: Path) -> StandInLLM:
        return StandInLLM(folder, self.settings)

    def abandon(self) -> None:
        self.abandoned = True

    def parameters(self, request: Request) -> object:
        return request

    def adapter(self, name: str, number: int, folder: Path) -> object:
        return Adapter(name, number, folder)


@dataclass(frozen=True)
class Matched:
    """Counterpart of `headrace_inference.vllm_engine.masks.HeadraceGrammar`."""

    matcher: Any
    end_id: int
    stop_ids: Set[int]

    def held(self, logits_V: Tensor) -> Tensor:
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.int32).copy()
        allow_stops(mask, self.end_id, self.stop_ids)
        bits_V = torch.from_numpy(np.unpackbits(mask.view(np.uint8), bitorder="little"))[: len(logits_V)]
        return logits_V.masked_fill(bits_V == 0, float("-inf"))


@functools.cache
def _words_of(folder: Path, vocabulary: int) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return library_vocabulary(tokenizer.backend_tokenizer, vocabulary, tokenizer.eos_token_id).words


def guide_of(request: Request, folder: Path, vocabulary: int) -> Matched:
    """Return the grammar of a request as `HeadraceBackend` builds it, with the library's limits."""
    words = _words_of(folder, vocabulary)
    matcher = LLMatcher(words, grammar_from("grammar", request.grammar))
    assert not matcher.is_error(), matcher.get_error()
    return Matched(matcher, words.eos_token, {token for token in request.stop_token_ids if token < vocabulary})


class StandInLLM:
    """Stand-in for the protocol `LLM`. Adapters are merged into complete models here."""

    def __init__(self, folder: Path, settings: VllmSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._weights: dict[int, Any] = {0: load_model(folder, None, torch.float32).eval()}
        self._pinned: set[int] = set()
        self._cached: set[tuple[str, int, tuple[int, ...]]] = set()
        self.running: set[str] = set()
        self._scoring = 0
        """Requests with `logprob_token_ids`: other requests of the step get only their sampled tokens."""
        self.shut = False
        self.errored = False

    def die(self) -> None:
        """Die, as after a kill of the process."""
        self.errored = True

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None, priority: int = 0
    ) -> AsyncGenerator[RequestPiece, None]:
        self.running.add(request_id)
        self._scoring += bool(sampling_params.logprob_token_ids)
        try:
            async for output in self._outputs(prompt, sampling_params, lora_request):
                yield output
        finally:
            self.running.discard(request_id)
            self._scoring -= bool(sampling_params.logprob_token_ids)

    async def _outputs(
        self, prompt: Mapping[str, Any], request: Request, adapter: Adapter | None
    ) -> AsyncGenerator[RequestPiece, None]:
        number = adapter.number if adapter else 0
        ids = list(prompt["prompt_token_ids"])
        cached = self._prefix(prompt["cache_salt"], number, ids)
        generator = None if request.seed is None else torch.Generator().manual_seed(request.seed)
        guide = guide_of(request, self._folder, len(self._logits(number, ids))) if request.grammar else None
        sampled: list[int] = []
        entries: list[Mapping[int, Entry]] = []
        reported_count = 0
        finish: str | None = None
        while finish is None:
            await asyncio.sleep(0)
            if self.errored:
                raise CoreDied("the core is dead")
            logits_V = self._logits(number, [*ids, *sampled])
            if guide is not None:
                logits_V = guide.held(logits_V)
            token, entry = self._draw(logits_V, request, sampled, generator)
            if guide is not None and token not in guide.stop_ids:
                guide.matcher.consume_token(token)
            sampled.append(token)
            entries.append(entry)
            ended = token in request.stop_token_ids
            finish = "stop" if ended else "length" if len(sampled) >= request.max_tokens else None
            if finish is not None or (request.delta and len(sampled) - reported_count >= PORTION):
                yield ScriptedRequest([Piece(sampled[reported_count:], entries[reported_count:], finish)], cached)
                reported_count = len(sampled)

    def _logits(self, number: int, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._weights[number](torch.tensor([ids])).logits[0, -1].float()
        return logits

    def _draw(
        self, logits_V: Tensor, request: Request, sampled: Sequence[int], generator: torch.Generator | None
    ) -> tuple[int, Mapping[int, Entry]]:
        logits_V = logits_V.clone()
        for token, bias in request.logit_bias.items():
            logits_V[token] += bias
        for token, count in Counter(sampled).items():
            logits_V[token] -= request.frequency_penalty * count + request.presence_penalty
        if request.temperature:
            logits_V = self.truncated(logits_V / request.temperature, request)
        logprobs_V = self.logprobs(logits_V, request)
        weights_V = torch.empty_like(logits_V).exponential_(generator=generator)
        token = int((logits_V.softmax(0) / weights_V).argmax() if request.temperature else logits_V.argmax())
        order = logprobs_V.argsort(descending=True, stable=True)
        best = [int(other) for other in order[: request.logprobs]]
        token_ids = list(request.logprob_token_ids) or best
        if self._scoring and not request.logprob_token_ids and token_ids:
            return token, {token: Entry(float(logprobs_V[token]), None), 0: Entry(float("-inf"), 1)}
        entry = {
            token_id: Entry(float(logprobs_V[token_id]), best.index(token_id) + 1 if token_id in best else None)
            for token_id in token_ids
        }
        return token, {token: Entry(float(logprobs_V[token]), None), **entry}

    def truncated(self, logits_V: Tensor, request: Request) -> Tensor:
        """Return the logits of the kept tokens, and minus infinity for all others.

        Kept are the tokens that reach `min_p`, of these the `top_k` most likely, and of those the fewest that reach
        `top_p`.
        """
        order = logits_V.argsort(descending=True, stable=True)
        order = order[logits_V[order].softmax(0) >= request.min_p * logits_V.softmax(0).max()]
        keep = order[: request.top_k] if request.top_k else order
        before = logits_V[keep].softmax(0).cumsum(0) - logits_V[keep].softmax(0)
        keep = keep[before < request.top_p]
        truncated_logits_V = torch.full_like(logits_V, float("-inf"))
        truncated_logits_V[keep] = logits_V[keep]
        return truncated_logits_V

    def logprobs(self, logits_V: Tensor, _request: Request) -> Tensor:
        """Return the logprobs of the distribution that is sampled from, as vLLM's `processed_logprobs`."""
        return logits_V.log_softmax(0)

    def _prefix(self, salt: str, number: int, ids: Sequence[int]) -> int:
        """Return the number of cached prompt tokens in complete blocks, and cache all complete blocks."""
        ends = range(BLOCK, len(ids), BLOCK)
        keys = [(self.salt(salt), self.separated(number), tuple(ids[:end])) for end in ends]
        hits = 0
        for key in keys:
            if key not in self._cached:
                break
            hits += BLOCK
        self._cached |= set(keys)
        return hits

    def salt(self, salt: str) -> str:
        return salt

    def separated(self, number: int) -> int:
        return number

    async def add_lora(self, lora_request: Any) -> bool:
        await asyncio.sleep(0)
        if len(self._weights) > self._settings.adapters_max:
            raise ValueError("all slots are taken")
        with safe_open(lora_request.folder / "adapter_model.safetensors", framework="pt") as file:
            list(file.keys())
        self._weights[lora_request.number] = self.adapted(lora_request.folder)
        return True

    def adapted(self, folder: Path) -> Any:
        return load_model(self._folder, folder, torch.float32).merge_and_unload().eval()

    async def pin_lora(self, lora_id: int) -> bool:
        self._pinned.add(lora_id)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self._pinned.discard(lora_id)
        return self._weights.pop(lora_id, None) is not None

    def shutdown(self, timeout: float | None = None) -> None:
        self.shut = True
        self._weights.clear()

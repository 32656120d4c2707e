"""Engines that break one promise each: the `vllm` engine over a stand-in, with a fault injected into one of the two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_inference.streams import Stream
from headrace_inference.vllm_engine import engine, probing, requests
from headrace_inference.vllm_engine.core import Request, StartedCore
from headrace_inference.vllm_engine.engine import VllmEngine
from headrace_inference.vllm_engine.probing import StepSeparation
from headrace_schemas import Probe
from tests.contract.engine import ground, promises, stand_in
from tests.contract.engine.promises import Promise
from tests.contract.engine.stand_in import Adapter, StandIn, StandInLLM

Fault = Callable[[pytest.MonkeyPatch], None]


def patched(target: object, name: str, value: object) -> Fault:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


def before_temperature(_llm: StandInLLM, logits_V: torch.Tensor, request: Request) -> torch.Tensor:
    """Return logprobs before the temperature is applied, as vLLM's default `raw_logprobs` does."""
    return (logits_V * (request.temperature or 1.0)).log_softmax(0)


def never_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = StandInLLM._draw

    def drawn(llm: StandInLLM, logits_V: torch.Tensor, request: Request, *rest: Any) -> Any:
        return draw(llm, logits_V, replace(request, temperature=request.temperature or 1.0), *rest)

    monkeypatch.setattr(StandInLLM, "_draw", drawn)


def base_for_adapters(llm: StandInLLM, _folder: Path) -> Any:
    return llm._weights[0]


async def always_passes(_engine: VllmEngine, _version: str) -> Probe:
    return Probe(max_abs_delta=0.0, parent_max_abs_delta=1.0, passed=True)


def worst_first(entry: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    ranked = sorted(entry.items(), key=lambda item: item[1].logprob)
    return [(token, scored.logprob) for token, scored in ranked[:count]]


def changed_request(monkeypatch: pytest.MonkeyPatch, change: Callable[[Request], Request]) -> None:
    make = requests.request_of

    def create(*args: Any, **options: Any) -> Request:
        return change(make(*args, **options))

    monkeypatch.setattr(engine, "request_of", create)


def streams_draw_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(
        monkeypatch,
        lambda request: replace(request, seed=request.seed + request.delta if request.seed is not None else None),
    )


def no_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(monkeypatch, lambda request: replace(request, seed=None))


def one_stream_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(monkeypatch, lambda request: replace(request, seed=1))


def no_stop_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(monkeypatch, lambda request: replace(request, stop_token_ids=()))


def resumed_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(monkeypatch, lambda request: replace(request, logit_bias={}))


def no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(monkeypatch, lambda request: replace(request, grammar=""))


def one_cache_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInLLM, "salt", lambda _llm, _salt: "")
    monkeypatch.setattr(StandInLLM, "separated", lambda _llm, _number: 0)


def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    start = StandIn.start

    def started(library: StandIn, folder: Path) -> StartedCore:
        return replace(start(library, folder), context_tokens=10**6)

    monkeypatch.setattr(StandIn, "start", started)


def endless_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine, "in_flight", lambda _engine, _version=None: 0)


def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    changed_request(monkeypatch, lambda request: replace(request, max_tokens=min(request.max_tokens, 5)))


def any_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "check_adapter", lambda _folder, _rank_max: None)

    async def added(llm: StandInLLM, lora_request: Adapter) -> bool:
        llm._weights[lora_request.number] = llm._weights[0]
        return True

    monkeypatch.setattr(StandInLLM, "add_lora", added)


def forgotten_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the streams of an unloaded version continue."""

    async def unload(engine: VllmEngine, version: str) -> None:
        engine._loaded.pop(version, None)

    monkeypatch.setattr(VllmEngine, "unload", unload)


def newcomers_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    add = StandInLLM.add_lora

    async def added(llm: StandInLLM, lora_request: Adapter) -> bool:
        await add(llm, lora_request)
        if len(llm._weights) > 3:
            llm._weights = dict.fromkeys(llm._weights, llm._weights[lora_request.number])
        return True

    monkeypatch.setattr(StandInLLM, "add_lora", added)


def mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSeparation, "enter_probe", lambda _apart: contextlib.nullcontext())


def as_it_is(tokens: object, _start: object) -> object:
    return tokens


def not_truncated(_llm: StandInLLM, logits_V: torch.Tensor, _request: Request) -> torch.Tensor:
    return logits_V


def all_ranked(entries: Sequence[Mapping[int, object]], _ranked: int) -> list[int]:
    return [number for entry in entries for number in (len(entry), *entry)]


def nothing(*_: object) -> None:
    return None


FAULTS: tuple[tuple[str, Fault, Promise], ...] = (
    (
        "logprobs before temperature",
        patched(StandInLLM, "logprobs", before_temperature),
        promises.logprobs_are_the_trainers,
    ),
    ("never greedy", never_greedy, promises.greedy_takes_the_most_likely),
    (
        "the base for an adapter",
        patched(StandInLLM, "adapted", base_for_adapters),
        promises.loaded_weights_answer_as_their_fingerprint,
    ),
    (
        "every probe passes",
        patched(VllmEngine, "probe", always_passes),
        promises.other_weights_than_the_fingerprints_do_not_pass,
    ),
    ("no truncation", patched(StandInLLM, "truncated", not_truncated), ground.truncation_is_in_the_logprobs),
    (
        "more than was kept",
        patched(requests, "_kept_sets", all_ranked),
        ground.kept_sets_are_those_that_the_logprobs_are_of,
    ),
    ("the worst first", patched(requests, "_most_likely", worst_first), promises.the_best_tokens_come_first),
    ("probes among all others", mixed_steps, promises.a_probe_takes_nothing_from_whom_it_is_beside),
    ("streams draw otherwise", streams_draw_otherwise, promises.a_stream_brings_what_a_whole_answer_does),
    ("no seeds", no_seeds, promises.a_seed_gives_the_same_tokens_in_any_company),
    ("one stream for all choices", one_stream_for_all, promises.choices_differ_and_have_streams_of_their_own),
    ("no stop tokens", no_stop_tokens, promises.a_stop_token_ends_a_choice_and_belongs_to_it),
    ("no stop conditions", patched(engine, "cut_at_stop", as_it_is), promises.a_stop_condition_sees_each_token_once),
    (
        "resumed tokens do not count",
        resumed_tokens_do_not_count,
        promises.a_resumed_greedy_choice_goes_on_as_if_it_had_never_moved,
    ),
    ("any penalty is taken", patched(engine, "refuse_unsupported", nothing), promises.a_penalty_is_counted_or_refused),
    ("no bias", resumed_tokens_do_not_count, ground.logprobs_are_those_after_a_bias),
    ("one cache for all", one_cache_for_all, promises.what_is_kept_of_a_prompt_belongs_to_a_version_and_a_salt),
    ("no context", no_context, promises.bounds_are_refused_by_name),
    ("an endless queue", endless_queue, promises.more_than_may_wait_are_refused_and_leaving_makes_room),
    ("short answers", short_answers, promises.without_a_limit_a_choice_ends_with_the_context),
    ("nobody can leave", patched(Stream, "close", nothing), promises.a_client_that_leaves_frees_its_place),
    ("any adapter is taken", any_adapter, promises.what_is_unusable_is_refused_by_name_and_disturbs_nobody),
    (
        "what is unloaded goes on",
        forgotten_streams,
        promises.an_unloaded_version_fails_what_it_had_begun_and_nothing_else,
    ),
    ("no grammar", no_grammar, ground.answers_keep_to_their_grammar),
    (
        "one end token",
        patched(stand_in, "allow_stops", nothing),
        ground.held_logprobs_are_over_the_masks_of_the_guide,
    ),
    ("grammars begin anew", patched(engine, "refuse_unsupported", nothing), ground.a_held_answer_goes_on_or_is_refused),
    ("newcomers take over", newcomers_take_over, promises.versions_come_and_go_beside_streams),
)
"""Faults, and the promise that finds each."""

"""Choices are converted to vLLM's requests, its outputs to tokens, and unsupported parameters are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from headrace_inference.engine import Sampling, Start, Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.vllm_engine.requests import refuse_unsupported, request_of, seed_of, tokens_of, until_stopped
from headrace_runtime.errors import Refused


@dataclass(frozen=True)
class Entry:
    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class Piece:
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Entry]] | None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Given:
    outputs: Sequence[Piece]
    num_cached_tokens: int | None = None


@dataclass
class Watch:
    stop: int
    seen: list[int] = field(default_factory=list)

    def __call__(self, token: int) -> bool:
        self.seen.append(token)
        return token == self.stop


def test_every_field_of_a_sampling_is_passed_on() -> None:
    sampling = Sampling(
        max_tokens=99,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        stop_ids=frozenset({7, 3}),
        top_logprobs=4,
    )
    request = request_of(sampling, Start(), 50, stream=True)
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (50, 0.7, 0.9, 40)
    assert (request.presence_penalty, request.frequency_penalty, request.logprobs) == (0.5, 0.25, 4)
    assert request.stop_token_ids == (3, 7)
    assert request.seed is None
    assert request.logit_bias == {}


def test_no_limit_of_the_best_is_zero_for_vllm() -> None:
    assert request_of(Sampling(top_k=-1), Start(), 5, stream=False).top_k == 0


@pytest.mark.parametrize(
    ("start", "stream", "delta"),
    [(Start(), False, False), (Start(), True, True), (Start(until=lambda _: False), False, True)],
    ids=["whole", "stream", "whole with a stop string"],
)
def test_tokens_are_asked_for_as_they_come_where_somebody_watches(start: Start, stream: bool, delta: bool) -> None:
    assert request_of(Sampling(), start, 5, stream=stream).delta is delta


def test_a_frequency_penalty_counts_what_was_sampled_elsewhere() -> None:
    """vLLM takes resumed tokens for prompt and counts none: 0.5 for each of three 9s and one 4 is a bias."""
    request = request_of(Sampling(frequency_penalty=0.5), Start(resumed=[9, 4, 9, 9]), 5, stream=True)
    assert request.logit_bias == {9: -1.5, 4: -0.5}


def test_seeds_are_of_a_choice_and_of_a_place() -> None:
    seeds = {seed_of(seed, choice, resumed) for seed in (1, 2) for choice in (0, 1) for resumed in (0, 5)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds), "as torch takes them"
    assert seed_of(-(2**70), 3, 0) == seed_of(-(2**70), 3, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_that_vllm_samples_at(temperature: float) -> None:
    refuse_unsupported(Sampling(temperature=temperature), [Start()])


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    """vLLM would sample at 0.01, so the logprobs would be of another distribution than the requested one."""
    with pytest.raises(Refused, match=r"at 0 \(greedy\) or at 0.01 and above") as refused:
        refuse_unsupported(Sampling(temperature=0.009), [Start()])
    assert (refused.value.status, refused.value.param) == (400, "temperature")


def test_a_presence_penalty_on_a_resumed_choice_is_refused_alone() -> None:
    penalised = Sampling(presence_penalty=0.1)
    refuse_unsupported(penalised, [Start(0), Start(1)])
    refuse_unsupported(Sampling(frequency_penalty=0.1), [Start(resumed=[5])])
    with pytest.raises(Refused, match="headrace_resume") as refused:
        refuse_unsupported(penalised, [Start(0), Start(1, resumed=[5])])
    assert refused.value.param == "presence_penalty"


def test_an_output_becomes_tokens() -> None:
    entries = [{5: Entry(-0.5, 1), 6: Entry(-1.0, 2)}, {7: Entry(-3.0, 9), 5: Entry(-0.1, 1), 6: Entry(-0.2, 2)}]
    tokens = tokens_of(Given([Piece([5, 7], entries, "length")], 30), 2, 20, 2)
    assert (tokens.choice, tokens.token_ids, tokens.logprobs, tokens.finish) == (2, [5, 7], [-0.5, -3.0], "length")
    assert tokens.top == [[(5, -0.5), (6, -1.0)], [(5, -0.1), (6, -0.2)]], "the sampled one is no more than sampled"
    assert tokens.cached_tokens == 20, "of the prompt; what was resumed is none of it"


def test_nobody_asked_for_the_best() -> None:
    assert tokens_of(Given([Piece([5], [{5: Entry(-0.5, 1)}])]), 0, 9, 0).top == []


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (Piece([5], None), "0 logprobs for 1 tokens"),
        (Piece([5], [{5: Entry(float("nan"))}]), "the logits are NaN"),
        (Piece([], [], "abort"), "ended a request with 'abort'"),
        (Piece([], [], "error"), "ended a request with 'error'"),
    ],
    ids=["without logprobs", "nan", "aborted", "error"],
)
def test_what_is_no_answer_fails(piece: Piece, reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        tokens_of(Given([piece]), 0, 9, 0)


def piece(ids: Sequence[int], finish: str | None = None) -> Tokens:
    top = [[(token, -1.0)] for token in ids]
    return Tokens(0, [*ids], [-1.0] * len(ids), top, "stop" if finish == "stop" else None, 3)


def test_what_was_sampled_behind_a_stop_string_was_never_asked_for() -> None:
    watch = Watch(6)
    tokens = until_stopped(piece([5, 6, 7, 8]), Start(until=watch))
    assert (tokens.token_ids, tokens.finish, tokens.cached_tokens) == ([5, 6], "stop", 3)
    assert len(tokens.logprobs) == len(tokens.top) == 2
    assert watch.seen == [5, 6]


def test_a_stop_token_is_no_text_to_look_at() -> None:
    watch = Watch(6)
    tokens = until_stopped(piece([5, 6], "stop"), Start(until=watch))
    assert (tokens.token_ids, tokens.finish) == ([5, 6], "stop")
    assert watch.seen == [5]
    assert until_stopped(piece([5, 6]), Start()).finish is None, "nobody watches"

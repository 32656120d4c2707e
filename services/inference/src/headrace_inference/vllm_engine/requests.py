"""Conversion of choices to requests of vLLM and of its outputs to tokens. Unsupported requests are refused."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace_inference.engine import Finish, Sampling, Start, Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.vllm_engine.core import LogprobEntry, Request, RequestPiece
from headrace_runtime.errors import Refused
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN
from headrace_schemas.events.turn import iterate_sets

KEPT_MAX = 128
"""Number of logprobs that a truncated request asks for at each position. Tokens that truncation excluded have none that
is finite, so a smaller number of finite ones is the whole set that was kept."""
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}


def refuse_unsupported(sampling: Sampling, starts: Sequence[Start]) -> None:
    """Raise `Refused` for parameters that vLLM would not apply as requested."""
    if 0 < sampling.temperature < SAMPLED_TEMPERATURE_MIN:
        message = f"temperature: this engine samples at 0 (greedy) or at {SAMPLED_TEMPERATURE_MIN:g} and above"
        raise Refused(400, "unsupported_value", message, "temperature")
    if sampling.presence_penalty and any(start.resumed for start in starts):
        message = "presence_penalty: this engine cannot count tokens that another replica sampled (headrace_resume)"
        raise Refused(400, "unsupported_value", message, "presence_penalty")
    if sampling.grammar and any(start.resumed for start in starts):
        message = "headrace_resume: this engine cannot continue a grammar after tokens of another replica"
        raise Refused(400, "unsupported_value", message, "headrace_resume")


def request_of(sampling: Sampling, start: Start, max_tokens: int, *, stream: bool, priority: int = 0) -> Request:
    """Return vLLM's parameters for sampling one choice of a call.

    Args:
        sampling: sampling parameters of the call.
        start: state from which the choice starts or is resumed.
        max_tokens: limit of tokens that are still to be sampled.
        stream: whether tokens are delivered one by one.
        priority: priority in vLLM's scheduler.
    """
    ranked = ranked_of(sampling)
    return Request(
        max_tokens=max_tokens,
        delta=stream or start.until is not None or ranked > 0,  # else all logprobs would be in memory until the end
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=None if sampling.seed is None else seed_of(sampling.seed, start.choice, len(start.resumed)),
        stop_token_ids=tuple(sorted(sampling.stop_ids)),
        logprobs=max(sampling.top_logprobs, ranked),
        grammar=sampling.grammar,
        logit_bias=_bias(sampling, start.resumed),
        priority=priority,
    )


def ranked_of(sampling: Sampling) -> int:
    """Return how many of the most likely tokens vLLM must report at each position to reveal the truncated sets.

    These are the sets of tokens that top-k, top-p and min-p leave. Without truncation it is 0.
    """
    if not sampling.truncated or not sampling.temperature:
        return 0
    return min(sampling.top_k + 1, KEPT_MAX) if sampling.top_k > 0 else KEPT_MAX


def seed_of(seed: int, choice: int, resumed: int) -> int:
    """Return vLLM's seed of one choice. It differs for each choice, and for each number of resumed tokens."""
    digest = hashlib.sha256(f"{seed}/{choice}/{resumed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _bias(sampling: Sampling, resumed: Sequence[int]) -> Mapping[int, float]:
    """Return the logit bias of a choice, with the frequency penalty of its resumed tokens, which vLLM treats as prompt.

    This is exact, because the penalty is linear in the number of occurrences.
    """
    bias = dict(sampling.logit_bias)
    for token, count in Counter(resumed if sampling.frequency_penalty else ()).items():
        bias[token] = bias.get(token, 0.0) - sampling.frequency_penalty * count
    return bias


def tokens_of(output: RequestPiece, choice: int, prompt_length: int, top: int, ranked: int = 0) -> Tokens:
    """Convert vLLM's output for one choice to `Tokens`.

    Args:
        top: number of most likely tokens to return.
        ranked: number of logprobs at each position that the request asked for because of truncation (`ranked_of`).

    Raises:
        EngineFailed: the output is inconsistent.
    """
    (sampled,) = output.outputs
    ids = list(sampled.token_ids)
    entries = list(sampled.logprobs or ())
    if len(entries) != len(ids):
        raise EngineFailed(f"vLLM returned {len(entries)} logprobs for {len(ids)} tokens")
    tokens = Tokens(choice, ids, [entry[token].logprob for token, entry in zip(ids, entries, strict=True)])
    if any(math.isnan(logprob) for logprob in tokens.logprobs):
        raise EngineFailed("the logits are NaN")
    if top:
        tokens.top = [_most_likely(entry, top) for entry in entries]
    if ranked:
        tokens.sets = _kept_sets(entries, ranked)
    tokens.cached_tokens = min(output.num_cached_tokens or 0, prompt_length)
    if sampled.finish_reason is not None:
        if sampled.finish_reason not in _FINISHES:
            raise EngineFailed(f"vLLM ended a request with {sampled.finish_reason!r}")
        tokens.finish = _FINISHES[sampled.finish_reason]
    return tokens


def _kept_sets(entries: Sequence[Mapping[int, LogprobEntry]], ranked: int) -> list[int] | None:
    """Return the tokens from which each token was sampled, in the form of `Tokens.sets`.

    Args:
        entries: logprobs of the highest-ranked tokens at each position. Tokens that were masked have minus infinity.
        ranked: number of requested tokens at each position.

    Returns:
        The sets, or None if at some position no requested token was masked, so that there may have been more.
    """
    sets: list[int] = []
    for entry in entries:
        token_ids = sorted(token for token, scored in entry.items() if scored.logprob > -math.inf)
        if len(token_ids) >= ranked:
            return None
        sets += (len(token_ids), *token_ids)
    return sets


def _most_likely(entry: Mapping[int, LogprobEntry], count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens. vLLM's entry may have one more, the sampled token."""
    ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    return [(token, scored.logprob) for token, scored in ranked[:count]]


def cut_at_stop(tokens: Tokens, start: Start) -> Tokens:
    """Return `tokens` up to the first one for which `start.until` is true. vLLM may have sampled further ones."""
    if start.until is None:
        return tokens
    for position, token in enumerate(tokens.token_ids):
        if is_stop_token(tokens, position):
            return tokens
        if start.until(token):
            end = position + 1
            return Tokens(
                tokens.choice,
                tokens.token_ids[:end],
                tokens.logprobs[:end],
                tokens.top[:end],
                "stop",
                tokens.cached_tokens,
                _first_sets(tokens.sets, end),
            )
    return tokens


def _first_sets(sets: Sequence[int] | None, count: int) -> list[int] | None:
    if sets is None:
        return None
    return [number for ids in list(iterate_sets(sets))[:count] for number in (len(ids), *ids)]


def is_stop_token(tokens: Tokens, position: int) -> bool:
    """Return whether the token at `position` is a stop token, which ends the choice and has no text."""
    return tokens.finish == "stop" and position == len(tokens.token_ids) - 1

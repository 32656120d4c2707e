"""What a choice becomes in vLLM, what vLLM's answers become, and what is refused because vLLM would not keep it."""

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

_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}


def refuse_unkept(sampling: Sampling, starts: Sequence[Start]) -> None:
    """Raises `Refused` for what would be answered otherwise than it was asked for."""
    if 0 < sampling.temperature < SAMPLED_TEMPERATURE_MIN:
        message = f"temperature: this engine samples at 0 (greedy) or at {SAMPLED_TEMPERATURE_MIN:g} and above"
        raise Refused(400, "unsupported_value", message, "temperature")
    if sampling.presence_penalty and any(start.resumed for start in starts):
        message = "presence_penalty: this engine cannot count tokens that another replica sampled (headrace_resume)"
        raise Refused(400, "unsupported_value", message, "presence_penalty")
    if sampling.grammar and any(start.resumed for start in starts):
        message = "headrace_resume: this engine begins a grammar at its beginning, not after tokens of another replica"
        raise Refused(400, "unsupported_value", message, "headrace_resume")


def request_of(sampling: Sampling, start: Start, room: int, *, stream: bool, priority: int = 0) -> Request:
    """`room`: tokens that may still be sampled."""
    return Request(
        max_tokens=room,
        delta=stream or start.until is not None,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=None if sampling.seed is None else seed_of(sampling.seed, start.choice, len(start.resumed)),
        stop_token_ids=tuple(sorted(sampling.stop_ids)),
        logprobs=sampling.top_logprobs,
        grammar=sampling.grammar,
        logit_bias=_counted(sampling.frequency_penalty, start.resumed),
        priority=priority,
    )


def seed_of(seed: int, choice: int, resumed: int) -> int:
    """The stream of one choice: choices of one request differ, and what is resumed does not draw the same again."""
    digest = hashlib.sha256(f"{seed}/{choice}/{resumed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _counted(frequency_penalty: float, resumed: Sequence[int]) -> Mapping[int, float]:
    """A penalty by frequency adds up, so that a bias can carry what was sampled elsewhere: vLLM takes it for prompt."""
    if not frequency_penalty:
        return {}
    return {token: -frequency_penalty * count for token, count in Counter(resumed).items()}


def tokens_of(output: RequestPiece, choice: int, prompt_length: int, top: int) -> Tokens:
    """What one output brought. Raises `EngineFailed` when it is no answer."""
    (sampled,) = output.outputs
    ids = list(sampled.token_ids)
    entries = list(sampled.logprobs or ())
    if len(entries) != len(ids):
        raise EngineFailed(f"vLLM gave {len(entries)} logprobs for {len(ids)} tokens")
    found = Tokens(choice, ids, [entry[token].logprob for token, entry in zip(ids, entries, strict=True)])
    if any(math.isnan(logprob) for logprob in found.logprobs):
        raise EngineFailed("the logits are no numbers")
    if top:
        found.top = [_best(entry, top) for entry in entries]
    found.cached_tokens = min(output.num_cached_tokens or 0, prompt_length)
    if sampled.finish_reason is not None:
        if sampled.finish_reason not in _FINISHES:
            raise EngineFailed(f"vLLM ended a request with {sampled.finish_reason!r}")
        found.finish = _FINISHES[sampled.finish_reason]
    return found


def _best(entry: Mapping[int, LogprobEntry], count: int) -> list[tuple[int, float]]:
    """The most likely tokens: the sampled one is listed besides, where it is none of them."""
    ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    return [(token, scored.logprob) for token, scored in ranked[:count]]


def until_stopped(tokens: Tokens, start: Start) -> Tokens:
    """`tokens` up to the one at which `start.until` says stop; what vLLM sampled behind it was never asked for."""
    if start.until is None:
        return tokens
    for place, token in enumerate(tokens.token_ids):
        if token_ends(tokens, place):
            return tokens
        if start.until(token):
            end = place + 1
            return Tokens(
                tokens.choice,
                tokens.token_ids[:end],
                tokens.logprobs[:end],
                tokens.top[:end],
                "stop",
                tokens.cached_tokens,
            )
    return tokens


def token_ends(tokens: Tokens, place: int) -> bool:
    """Whether the token at `place` is a stop token: it ends the choice by itself, and no text follows from it."""
    return tokens.finish == "stop" and place == len(tokens.token_ids) - 1

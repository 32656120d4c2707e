"""Attempts of a tenant to learn another tenant's prompts from `cached_tokens` and from the time to the first token."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import httpx

from tests.attack.stacks import MODEL, Serving, serving
from tests.system.program import Line, none_of

TITLE = "no tenant sees in a cache what another has asked"
_PROMPTS = 40
_SHUFFLES = 2000
_P_MIN = 0.001
"""Lowest p-value with which the measured times still count as equal: the probability of a false alarm."""


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    """For each of the victim's prompts, send that prompt and an unused one as the attacker, in random order."""
    leaks = own_hits = 0
    known_s: list[float] = []
    fresh_s: list[float] = []
    again_s: list[float] = []
    async with serving(folder, tenants=("victim", "attacker")) as running, httpx.AsyncClient(timeout=120) as http:
        for _ in range(5):
            await _ask(running, http, "attacker", _prompt(rng))  # the first calls pay for what all later ones use
        for _ in range(_PROMPTS):
            cached_prompt, unasked = _prompt(rng), _prompt(rng)
            await _ask(running, http, "victim", cached_prompt)
            for prompt in rng.sample((cached_prompt, unasked), 2):
                cached, first_s = await _ask(running, http, "attacker", prompt)
                leaks += cached > 0
                (known_s if prompt == cached_prompt else fresh_s).append(first_s)
            cached, first_s = await _ask(running, http, "attacker", cached_prompt)
            own_hits += cached > 0
            again_s.append(first_s)
    chance = paired_p(known_s, fresh_s, rng)
    control = paired_p(again_s, fresh_s, rng)
    figure = f"{_ms(known_s)} against {_ms(fresh_s)} ms at the median, p = {chance:.3f}"
    seen = f"{_ms(again_s)} against {_ms(fresh_s)} ms at the median, p = {control:.4f}"
    return [
        none_of("first calls that were told of cached tokens", leaks, 2 * _PROMPTS),
        Line("own second calls that were", f"{own_hits} of {_PROMPTS}", "all: there is a cache", own_hits == _PROMPTS),
        Line("first token of what the other has asked", figure, f"p at least {_P_MIN}", chance >= _P_MIN),
        Line("first token of an own second call", seen, f"p below {_P_MIN}: it could be seen", control < _P_MIN),
    ]


def paired_p(some: list[float], baseline: list[float], rng: random.Random) -> float:
    """Return the two-sided p-value of a sign-flip permutation test on the median of the paired differences.

    The arguments are pairs by position. The test is Fisher's randomisation test.
    """
    differences = [sample - other for sample, other in zip(some, baseline, strict=True)]
    observed = abs(statistics.median(differences))
    flipped = ([value * rng.choice((-1, 1)) for value in differences] for _ in range(_SHUFFLES))
    return sum(abs(statistics.median(values)) >= observed for values in flipped) / _SHUFFLES


async def _ask(running: Serving, http: httpx.AsyncClient, tenant: str, prompt: str) -> tuple[int, float]:
    """Send a prompt. Return the number of cached tokens, and the seconds to the first event that contains a token."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began = time.perf_counter()
    first_s = cached = 0.0
    headers = {"authorization": f"Bearer {tenant}"}
    url = f"{running.gateway.url}/v1/chat/completions"
    async with http.stream("POST", url, json=body, headers=headers) as answer:
        assert answer.status_code == 200, (await answer.aread())[:300]
        async for line in answer.aiter_lines():
            if not first_s and '"token_ids":[' in line.replace("prompt_token_ids", ""):
                first_s = time.perf_counter() - began
            if '"cached_tokens":' in line:
                cached = int(line.split('"cached_tokens":')[1].split("}")[0].split(",")[0])
    assert first_s, "no token came"
    return int(cached), first_s


def _prompt(rng: random.Random) -> str:
    """Return a prompt of about a thousand tokens that shares no prefix with any other prompt."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz 0123456789") for _ in range(1000))


def _ms(times: list[float]) -> float:
    return round(1000 * statistics.median(times), 1)

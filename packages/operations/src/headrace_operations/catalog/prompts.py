"""A fixed set of prompts, answered greedily by two versions that are served: what users would notice."""

from __future__ import annotations

from dataclasses import dataclass

import httpx2

from headrace.errors import HeadraceError, Unreachable

PROMPTS = (
    "Say hello in one short sentence.",
    "What is 17 + 25? Answer with the number alone.",
    "List three colours, separated by commas.",
    "Summarize in one sentence: The meeting was moved from Monday to Tuesday because the room was taken.",
    "Translate to French: good morning",
    "Is the following friendly or unfriendly? 'Thanks a lot for your help!' Answer with one word.",
    "Write a JSON object with the key name and the value Ada.",
    "I cannot log in to my account. What should I do first?",
)
_TOKENS_MAX = 64
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Pair:
    """What two versions say to one prompt."""

    prompt: str
    before: str
    after: str

    @property
    def equal(self) -> bool:
        return self.before == self.after


def ask(base_url: str, one: str, other: str, key: str | None) -> tuple[Pair, ...]:
    """At temperature 0, as evaluation traffic, so nothing is trained. Raises `HeadraceError` when one is not served."""
    headers = {"X-Headrace-Purpose": "eval", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with httpx2.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
            return tuple(Pair(text, _answer(http, one, text), _answer(http, other, text)) for text in PROMPTS)
    except httpx2.TransportError as error:
        raise Unreachable(f"{base_url}: {error}") from error


def _answer(http: httpx2.Client, version: str, prompt: str) -> str:
    body = {
        "model": version,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": _TOKENS_MAX,
    }
    answer = http.post("/chat/completions", json=body)
    if answer.status_code != 200:
        raise HeadraceError(f"{version} does not answer: {answer.text[:300]}; serve it first")
    return str(answer.json()["choices"][0]["message"]["content"] or "")

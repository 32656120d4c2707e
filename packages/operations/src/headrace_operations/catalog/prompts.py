"""A fixed set of prompts that two served versions answer greedily, to show differences that users would notice."""

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
    """Answers of two versions to one prompt."""

    prompt: str
    before: str
    after: str

    @property
    def equal(self) -> bool:
        return self.before == self.after


def compare_answers(base_url: str, before: str, after: str, key: str | None) -> tuple[Pair, ...]:
    """Let both versions answer all prompts at temperature 0, as evaluation traffic, which is never trained.

    Raises:
        HeadraceError: a version is not served.
        Unreachable: the gateway does not answer.
    """
    headers = {"X-Headrace-Purpose": "eval", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with httpx2.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
            return tuple(Pair(text, _answer(http, before, text), _answer(http, after, text)) for text in PROMPTS)
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
        raise HeadraceError(f"{version}: does not answer ({answer.text[:300]}); serve it first")
    return str(answer.json()["choices"][0]["message"]["content"] or "")

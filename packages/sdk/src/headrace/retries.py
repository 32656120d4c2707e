"""When a request is repeated. Every request of the SDK may be: feedback has an id, the others are idempotent."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ApiError, Unreachable

if TYPE_CHECKING:
    import httpx2

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Retries:
    """`attempts` in all, with pauses that double from `first_pause_s` to `pause_max_s`, up to half of them at random.

    A server's `Retry-After` is kept to, up to `pause_max_s`.
    """

    attempts: int = 5
    first_pause_s: float = 0.2
    pause_max_s: float = 10.0

    def pause_s(self, attempt: int, answer: httpx2.Response | None) -> float | None:
        """How long to wait before the next attempt; None: there is none. `attempt` counts from 1."""
        if attempt >= self.attempts or (answer is not None and answer.status_code not in _AGAIN):
            return None
        asked: str = answer.headers.get("retry-after", "") if answer is not None else ""
        if asked.isdecimal():
            return min(float(asked), self.pause_max_s)
        pause_s = self.first_pause_s * 2.0 ** (attempt - 1)
        return min(pause_s, self.pause_max_s) * random.uniform(0.5, 1.0)


def answered(send: Callable[[], httpx2.Response], retries: Retries, url: str) -> httpx2.Response:
    """What `send` gets from `url`, asked again as `retries` says. Raises `ApiError`, `Unreachable`."""
    from httpx2 import TransportError

    attempt = 0
    while True:
        attempt += 1
        answer, cause = None, None
        try:
            answer = send()
        except TransportError as error:
            cause = error
        pause_s = retries.pause_s(attempt, answer)
        if pause_s is None:
            return checked(answer, cause, url)
        time.sleep(pause_s)


def checked(answer: httpx2.Response | None, cause: Exception | None, url: str) -> httpx2.Response:
    """The answer, or what it means as an error: `ApiError` for a refusal, `Unreachable` for none at all."""
    if answer is None:
        raise Unreachable(f"{url} does not answer: {cause or 'no reason given'}; is Headrace up?") from cause
    if answer.status_code < 400:
        return answer
    try:
        error = answer.json()["error"]
        message, code, param = str(error["message"]), str(error.get("code")), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message, code, param = f"{url} answered {answer.text[:200]!r}", "unknown", None
    raise ApiError(answer.status_code, code, message, param)

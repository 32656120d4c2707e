"""Exceptions of the client, which derive from `HeadraceError`, and the policy by which failed HTTP requests are
repeated.

Each request of the client may be repeated: feedback has an id, and all other requests are idempotent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_schemas.values.errors import HeadraceError

if TYPE_CHECKING:
    import httpx2


class ApiError(HeadraceError):
    """Raised if a service refuses a request.

    Attributes:
        status: HTTP status of the response.
        code: stable, machine-readable error code.
        param: name of the invalid field, if the service named one.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{message} ({status}, {code})")
        self.status = status
        self.code = code
        self.param = param


class Unreachable(HeadraceError):
    """Raised if a service does not respond within the allowed attempts or time."""


class UsageError(HeadraceError):
    """Raised if a request cannot be carried out because of its arguments: a missing file, an invalid setting, or
    options that contradict each other."""


_RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy for HTTP requests: at most `attempts` in total, with pauses between them.

    Pauses double from `first_pause_s` up to `pause_max_s` and are shortened by up to half at random. A `Retry-After`
    header replaces the pause, up to `pause_max_s`.
    """

    attempts: int = 5
    first_pause_s: float = 0.2
    pause_max_s: float = 10.0

    def pause_s(self, attempt: int, response: httpx2.Response | None) -> float | None:
        """Return the pause in seconds before the next attempt, or None if there is no next attempt. `attempt` counts
        from 1."""
        if attempt >= self.attempts or (response is not None and response.status_code not in _RETRIED_STATUSES):
            return None
        retry_after: str = response.headers.get("retry-after", "") if response is not None else ""
        if retry_after.isdecimal():
            return min(float(retry_after), self.pause_max_s)
        pause_s = self.first_pause_s * 2.0 ** (attempt - 1)
        return min(pause_s, self.pause_max_s) * random.uniform(0.5, 1.0)


def send_with_retries(send: Callable[[], httpx2.Response], retries: Retries, url: str) -> httpx2.Response:
    """Send a request, and repeat it according to `retries` while it fails. Return the response. Raises `ApiError` or
    `Unreachable`."""
    from httpx2 import TransportError

    attempt = 0
    while True:
        attempt += 1
        response, cause = None, None
        try:
            response = send()
        except TransportError as error:
            cause = error
        pause_s = retries.pause_s(attempt, response)
        if pause_s is None:
            return raise_for_status(response, cause, url)
        time.sleep(pause_s)


def raise_for_status(response: httpx2.Response | None, cause: Exception | None, url: str) -> httpx2.Response:
    """Return `response` if it is successful. Raise `ApiError` if the service refused the request, and `Unreachable` if
    there is no response."""
    if response is None:
        raise Unreachable(f"{url} does not answer: {cause or 'no reason given'}; is Headrace up?") from cause
    if response.status_code < 400:
        return response
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), str(error.get("code")), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message, code, param = f"{url} answered {response.text[:200]!r}", "unknown", None
    raise ApiError(response.status_code, code, message, param)


__all__ = [
    "ApiError",
    "HeadraceError",
    "Retries",
    "Unreachable",
    "UsageError",
    "raise_for_status",
    "send_with_retries",
]

"""Reading of a service's `/health` page."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import NamedTuple

_BYTES_MAX = 65_536


class HealthAnswer(NamedTuple):
    """Health of a service. `lacks` has the reasons that it gives, or the names of its failed checks."""

    ready: bool
    lacks: tuple[str, ...]


def request_health(url: str, timeout_s: float) -> HealthAnswer | None:
    """Request the health of a service; return None if it does not answer in time."""
    try:
        status, body = get(f"{url}/health", timeout_s, _BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return None
    return HealthAnswer(status == 200, failed_checks(body))


def get(url: str, timeout_s: float, bytes_max: int, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Return status and body of a page of a service.

    Raises:
        OSError: the service does not answer in time.
        HTTPException: the answer is not HTTP.
    """
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        connection.request("GET", f"/{path}", headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(bytes_max)
    finally:
        connection.close()


def failed_checks(body: bytes) -> tuple[str, ...]:
    """Parse a `/health` page (`headrace_runtime.http.web`): return its reasons, and failed checks that have no
    reason."""
    try:
        page = json.loads(body)
        reasons = page.get("reasons", {})
        unexplained = [name for name, holds in page["checks"].items() if not holds and name not in reasons]
        return tuple(dict.fromkeys([*unexplained, *map(str, reasons.values())]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()

"""Reads `/health` of a service, with the reasons when it is not ready."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import NamedTuple

_BYTES_MAX = 65_536


class Answer(NamedTuple):
    """What a service says of itself. `lacks` are its reasons, or the names of the checks that do not hold."""

    ready: bool
    lacks: tuple[str, ...]


def ask(url: str, timeout_s: float) -> Answer | None:
    """None when it does not answer in time."""
    try:
        status, body = get(f"{url}/health", timeout_s, _BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return None
    return Answer(status == 200, lacking(body))


def get(url: str, timeout_s: float, bytes_max: int, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of a page of a service. Raises `OSError` or `HTTPException` when there is none in time."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    try:
        connection.request("GET", f"/{path}", headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(bytes_max)
    finally:
        connection.close()


def lacking(body: bytes) -> tuple[str, ...]:
    """What a service complains of (`headrace_runtime.web`): its reasons, else the checks that do not hold."""
    try:
        page = json.loads(body)
        reasons = page.get("reasons", {})
        unexplained = [name for name, holds in page["checks"].items() if not holds and name not in reasons]
        return tuple(dict.fromkeys([*unexplained, *map(str, reasons.values())]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()

"""W3C trace context: one `traceparent` follows a turn from the gateway through every event it causes.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar

_current: ContextVar[str | None] = ContextVar("traceparent", default=None)
_PATTERN = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


def current() -> str | None:
    """The `traceparent` of the work in progress."""
    return _current.get()


def trace_id() -> str | None:
    value = _current.get()
    return value.split("-")[1] if value else None


def continued(parent: str | None) -> str:
    """A new span of the same trace as `parent`, or of a fresh trace when there is none or it is malformed."""
    match = _PATTERN.match(parent or "")
    trace = match.group(1) if match else os.urandom(16).hex()
    flags = match.group(3) if match else "01"
    return f"00-{trace}-{os.urandom(8).hex()}-{flags}"


@contextlib.contextmanager
def span(parent: str | None) -> Iterator[str]:
    """Make a child of `parent` current for the duration; logs and produced events carry it."""
    value = continued(parent)
    token = _current.set(value)
    try:
        yield value
    finally:
        _current.reset(token)

"""W3C trace context: one `traceparent` identifies a turn from the gateway through all events that it causes.

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
    """Return the `traceparent` of the work in progress."""
    return _current.get()


def trace_id() -> str | None:
    """Return the trace id of the work in progress."""
    value = _current.get()
    return value.split("-")[1] if value else None


def child_span(parent: str | None) -> str:
    """Return a new span of the trace of `parent`, or of a new trace if `parent` is None or malformed."""
    match = _PATTERN.match(parent or "")
    trace = match.group(1) if match else os.urandom(16).hex()
    flags = match.group(3) if match else "01"
    return f"00-{trace}-{os.urandom(8).hex()}-{flags}"


@contextlib.contextmanager
def span(parent: str | None) -> Iterator[str]:
    """Make a child span of `parent` the current one while the body runs. Logs and produced events contain it."""
    value = child_span(parent)
    token = _current.set(value)
    try:
        yield value
    finally:
        _current.reset(token)

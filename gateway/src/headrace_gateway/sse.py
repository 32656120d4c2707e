"""Server-sent events, as OpenAI-compatible servers use them: `data: ...` lines, events parted by an empty line.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_json

DONE = b"[DONE]"
COMMENT = b": keep-alive\n\n"
"""Bytes between events that readers skip."""
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""U+2028, U+2029 and U+0085 in UTF-8, and as JSON escapes them."""


class EventTooLarge(Exception):
    """An event did not end within its bound."""


class Splitter:
    """Bytes as they come, events' data out. Comments and other fields are skipped."""

    def __init__(self, event_bytes_max: int) -> None:
        self._rest = b""
        self._max = event_bytes_max

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes. Raises `EventTooLarge`."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > self._max:
            raise EventTooLarge(f"an event is larger than {self._max} bytes")
        return [payload for event in events if (payload := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def encode(data: bytes, kind: str = "") -> bytes:
    """Return one event, with its `kind` where readers separate kinds. `data` is JSON without newlines.

    Line separators of Unicode are escaped, because some clients split an event at them. Such characters stand inside of
    JSON strings only.
    """
    for separator, escaped in _SEPARATORS:
        if separator in data:
            data = data.replace(separator, escaped)
    named = b"event: %b\n" % kind.encode() if kind else b""
    return named + b"data: " + data + b"\n\n"


def encode_typed(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return events whose field `type` is their kind, one after the other."""
    return b"".join(encode(to_json(event), event["type"]) for event in events)

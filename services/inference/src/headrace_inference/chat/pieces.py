"""Search for markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of one of `markers`."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the end of `text` that begins `mark`.

    It is fast, because every token of an answer needs it.
    """
    at = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


class StopStrings:
    """Filter that returns text up to the stop string that is complete first. `complete` is that stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._buffer = ""
        self.complete: str | None = None

    def feed(self, text: str) -> str:
        """Read the next text, and return the part that does not belong to a stop string."""
        if not self._stops:
            return text
        if self.complete is not None:
            return ""
        text = self._buffer + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.complete = text[start:end]
            self._buffer = ""
            return text[:start]
        length = partial_marker_length(text, self._stops)
        self._buffer = text[len(text) - length :]
        return text[: len(text) - length]

    def end(self) -> str:
        """Return the buffered text, which did not become a stop string."""
        text, self._buffer = self._buffer, ""
        return text

"""Cutting text that comes in pieces, without ever giving out half of something."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


class StopStrings:
    """Text up to the stop string that is complete first. `stopped` once it was there; the rest is swallowed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        if not self._stops:
            return text
        if self.stopped:
            return ""
        text = self._held + text
        complete = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if complete:
            self.stopped = True
            self._held = ""
            return text[: min(complete)[1]]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

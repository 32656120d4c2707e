"""Cuts text that arrives in pieces, and keeps back a piece that may be half of a marker."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of one of `marks`."""
    return max((_begun(text, mark) for mark in marks), default=0)


def _begun(text: str, mark: str) -> int:
    """Looks only where the mark's first character stands: this is done for every token of every answer."""
    at = text.find(mark[0], max(len(text) - len(mark) + 1, 0))
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
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

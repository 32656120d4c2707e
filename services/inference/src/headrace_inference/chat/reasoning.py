"""Takes `<think>...</think>` off the front of an answer."""

from __future__ import annotations

from headrace_inference.chat.parsers import ReasoningParser
from headrace_inference.chat.pieces import held_back

OPEN, CLOSE = "<think>", "</think>"


class Reasoning:
    """Text in, (reasoning, answer) out, in pieces. Only what stands before the answer is reasoning.

    `opened`: the prompt already ended with the opening tag. Reasoning that is never closed is all reasoning.
    Whitespace around reasoning belongs to the tags.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "inside" if opened else "before"
        self._held = ""
        self._begun = False
        self._space = ""

    def feed(self, text: str) -> tuple[str, str]:
        if self._state == "after":
            return "", text
        self._held += text
        if self._state == "before" and not self._opens():
            return "", ""
        if self._state == "inside":
            return self._inside()
        return "", self._after()

    def end(self) -> tuple[str, str]:
        """What was held back; afterwards nothing more comes."""
        held, self._held = self._held, ""
        if self._state == "inside":
            return self._said(held), ""
        return "", held

    def _opens(self) -> bool:
        """Whether it is clear by now if the answer begins with reasoning."""
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held = start[len(OPEN) :]
            self._state = "inside"
            return True
        if OPEN.startswith(start):
            return False
        self._state = "plain"
        return True

    def _inside(self) -> tuple[str, str]:
        place = self._held.find(CLOSE)
        if place < 0:
            keep = held_back(self._held, (CLOSE,))
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return self._said(ready), ""
        reasoning, self._held = self._held[:place], self._held[place + len(CLOSE) :]
        said = self._said(reasoning)
        self._state = "closed"
        return said, self._after()

    def _after(self) -> str:
        """The answer from its first visible character on, once there is one."""
        text = self._held.lstrip() if self._state == "closed" else self._held
        self._held = ""
        if text:
            self._state = "after"
        return text

    def _said(self, text: str) -> str:
        """`text` without the whitespace at the begin and the end of all reasoning."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept


THINK = ReasoningParser(lambda opened: Reasoning(opened=opened), (OPEN, CLOSE), opening=OPEN, closing=CLOSE)

"""Parser of reasoning in `<think>...</think>` at the beginning of an answer."""

from __future__ import annotations

from headrace_inference.chat.json_scanner import partial_marker_length
from headrace_inference.chat.parsers import ReasoningParser

OPEN, CLOSE = "<think>", "</think>"


class ThinkReader:
    """`ReasoningReader` that splits an answer at `<think>` and `</think>` at its beginning.

    Without the closing tag all text is reasoning. Later tags are text. Whitespace next to the tags is removed.

    Args:
        opened: whether the prompt ends with the opening tag.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "inside" if opened else "before"
        self._buffer = ""
        self._begun = False
        self._space = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Read the next text, and return the new reasoning and the new answer text that later text cannot change."""
        if self._state == "after":
            return "", text
        self._buffer += text
        if self._state == "before" and not self._is_beginning_certain():
            return "", ""
        if self._state == "inside":
            return self._inside()
        return "", self._after()

    def end(self) -> tuple[str, str]:
        """End the answer, and return the buffered text: reasoning and the text after it."""
        text, self._buffer = self._buffer, ""
        if self._state == "inside":
            return self._strip_reasoning(text), ""
        return "", text

    def _is_beginning_certain(self) -> bool:
        """Decide whether the answer begins with reasoning, and store it. Return False if more text is needed for
        that."""
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            self._buffer = start[len(OPEN) :]
            self._state = "inside"
            return True
        if OPEN.startswith(start):
            return False
        self._state = "plain"
        return True

    def _inside(self) -> tuple[str, str]:
        end = self._buffer.find(CLOSE)
        if end < 0:
            certain = len(self._buffer) - partial_marker_length(self._buffer, (CLOSE,))
            text, self._buffer = self._buffer[:certain], self._buffer[certain:]
            return self._strip_reasoning(text), ""
        text, self._buffer = self._buffer[:end], self._buffer[end + len(CLOSE) :]
        reasoning = self._strip_reasoning(text)
        self._state = "closed"
        return reasoning, self._after()

    def _after(self) -> str:
        """Return the buffered answer text, without whitespace after the closing tag."""
        text = self._buffer.lstrip() if self._state == "closed" else self._buffer
        self._buffer = ""
        if text:
            self._state = "after"
        return text

    def _strip_reasoning(self, text: str) -> str:
        """Return `text` without whitespace at the beginning and the end of the whole reasoning."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped


THINK = ReasoningParser(lambda opened: ThinkReader(opened=opened), (OPEN, CLOSE), opening=OPEN, closing=CLOSE)

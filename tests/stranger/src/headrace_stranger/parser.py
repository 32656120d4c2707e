"""Parsers of tool calls in the form `[[name {json}]]`, and of reasoning in a first line that begins with `hmm`."""

from __future__ import annotations

import json
import re

from headrace_inference.chat.parsers import Call, ParsedText, ReasoningParser, ToolParser

_CALL = re.compile(r"\[\[(\w+) (\{.*?\})\]\]", re.DOTALL)


class Brackets:
    """Parser of tool calls; it buffers all text from the first bracket on."""

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> ParsedText:
        self._buffer += text
        parsed = ParsedText()
        while match := _CALL.search(self._buffer):
            parsed.content += self._buffer[: match.start()]
            self._buffer = self._buffer[match.end() :]
            try:
                json.loads(match[2])
                parsed.calls.append(Call(match[1], match[2]))
            except ValueError:
                parsed.content += match[0]
        start = self._buffer.find("[")
        ready = len(self._buffer) if start < 0 else start
        parsed.content += self._buffer[:ready]
        self._buffer = self._buffer[ready:]
        return parsed

    def end(self) -> ParsedText:
        text, self._buffer = self._buffer, ""
        return ParsedText(text)


class Hmm:
    """Parser of reasoning; it buffers text until the first line is complete."""

    def __init__(self) -> None:
        self._buffer = ""
        self._over = False

    def feed(self, text: str) -> tuple[str, str]:
        if self._over:
            return "", text
        self._buffer += text
        if not "hmm".startswith(self._buffer[:3]):
            return "", self._rest()
        line, end, rest = self._buffer.partition("\n")
        if not end:
            return "", ""
        self._buffer = rest
        return line, self._rest()

    def end(self) -> tuple[str, str]:
        return "", self._rest()

    def _rest(self) -> str:
        self._over = True
        rest, self._buffer = self._buffer, ""
        return rest


BRACKETS = ToolParser(Brackets, ("[[", "]]"))
HMM = ReasoningParser(lambda _opened: Hmm())

"""Tool calls as `[[name {json}]]`, and reasoning as a first line that begins with `hmm`."""

from __future__ import annotations

import json
import re

from headrace_inference.chat.parsers import Call, Found, ReasoningParser, ToolParser

_CALL = re.compile(r"\[\[(\w+) (\{.*?\})\]\]", re.DOTALL)


class Brackets:
    """Holds everything back from the first bracket on."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> Found:
        self._held += text
        found = Found()
        while match := _CALL.search(self._held):
            found.content += self._held[: match.start()]
            self._held = self._held[match.end() :]
            try:
                json.loads(match[2])
                found.calls.append(Call(match[1], match[2]))
            except ValueError:
                found.content += match[0]
        begun = self._held.find("[")
        ready = len(self._held) if begun < 0 else begun
        found.content += self._held[:ready]
        self._held = self._held[ready:]
        return found

    def end(self) -> Found:
        held, self._held = self._held, ""
        return Found(held)


class Hmm:
    """Holds back until the first line is over."""

    def __init__(self) -> None:
        self._held = ""
        self._over = False

    def feed(self, text: str) -> tuple[str, str]:
        if self._over:
            return "", text
        self._held += text
        if not "hmm".startswith(self._held[:3]):
            return "", self._rest()
        line, end, rest = self._held.partition("\n")
        if not end:
            return "", ""
        self._held = rest
        return line, self._rest()

    def end(self) -> tuple[str, str]:
        return "", self._rest()

    def _rest(self) -> str:
        self._over = True
        rest, self._held = self._held, ""
        return rest


BRACKETS = ToolParser(Brackets, ("[[", "]]"))
HMM = ReasoningParser(lambda _opened: Hmm())

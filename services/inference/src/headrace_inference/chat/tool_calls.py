"""Finds hermes-style tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call is given out when it is complete and valid; until then it is held back whole, because what turns out malformed
is text, and text that was already sent as a call could not be taken back. Nothing of an answer is lost, except
whitespace next to a call.
"""

from __future__ import annotations

import json
from json import JSONDecoder

from headrace_inference.chat.parsers import Call, Found, ToolParser
from headrace_inference.chat.pieces import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME_LENGTH_MAX = 512
_SPACE = " \t\r\n"


class ToolCalls:
    """Text in, content and calls out, in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._space = ""
        """Whitespace that is content only if content follows it."""
        self._called = False

    def feed(self, text: str) -> Found:
        self._held += text
        found = Found()
        while self._take(found):
            pass
        return found

    def end(self) -> Found:
        """What was held back: half a call is text. Afterwards nothing more comes."""
        found = Found()
        self._say(found, self._held)
        if not self._called:
            found.content += self._space
        self._held = self._space = ""
        return found

    def _take(self, found: Found) -> bool:
        """Take one piece of content or one call off the front; False when more text is needed first."""
        place = self._held.find(OPEN)
        if place != 0:
            ready = place if place > 0 else len(self._held) - held_back(self._held, (OPEN,))
            self._say(found, self._held[:ready])
            self._held = self._held[ready:]
            return place > 0
        close = self._held.find(CLOSE)
        if close < 0:
            return False
        call = parse_call(self._held[len(OPEN) : close])
        block, self._held = self._held[: close + len(CLOSE)], self._held[close + len(CLOSE) :]
        if call is None:
            again = block.find(OPEN, len(OPEN))
            if again > 0:  # the text of a broken call ends where the next one begins
                block, self._held = block[:again], block[again:] + self._held
            self._say(found, block)
        else:
            found.calls.append(call)
            self._space = ""
            self._called = True
        return True

    def _say(self, found: Found, text: str) -> None:
        text = self._space + text
        if self._called:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._called = False
        found.content += kept


def form(name: str) -> tuple[str, str]:
    """See `ToolParser.form`."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', f"}}\n{CLOSE}"


HERMES = ToolParser(ToolCalls, (OPEN, CLOSE), form=form)


def parse_call(text: str) -> Call | None:
    """The call in `text`, None when it is malformed: no JSON object, no name, arguments that are no object."""
    try:
        parts = _members(text.strip())
        name = _DECODER.decode(parts["name"])
        arguments = parts.get("arguments", "{}")
        value = _DECODER.decode(arguments)
        if isinstance(value, str):  # some models write the arguments as a string that holds the object
            arguments, value = value, _DECODER.decode(value)
        f"{name}{arguments}".encode()  # half a surrogate pair is no text
    except (ValueError, KeyError, RecursionError):
        return None
    if not (isinstance(name, str) and 0 < len(name) <= _NAME_LENGTH_MAX and isinstance(value, dict)):
        return None
    return Call(name, arguments)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written. Raises `ValueError`."""
    members: dict[str, str] = {}
    if not text.startswith("{"):
        raise ValueError("not an object")
    _DECODER.decode(text)  # so that what follows can rely on it
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        members[key] = text[begin:end]
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = JSONDecoder(parse_constant=_no_constant)


def _skip(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at

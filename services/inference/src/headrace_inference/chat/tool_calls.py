"""Finds hermes-style tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call is given out when it is complete and valid; until then it is held back whole, because what turns out malformed
is text, and text that was already sent as a call could not be taken back. A call ends where its JSON ends, so a tag
inside a string of it is a part of the string. Nothing of an answer is lost, except whitespace next to a call at the
begin or the end of the content.
"""

from __future__ import annotations

import json

from headrace_inference.chat.json_scanner import MalformedJson, ObjectScanner
from headrace_inference.chat.parsers import Call, Found, ToolParser
from headrace_inference.chat.pieces import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME_LENGTH_MAX = 512
_ARGUMENTS_LENGTH_MAX = 1_048_576
_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
"""Models that were trained on other forms write the second."""
_LABELS = ("id", "type", "index")
"""What some models add to a call, which holds nothing that a function gets."""
NO_ARGUMENTS = "{}"
"""How a call without arguments reads, whether the model left them out or wrote `null`, `""` or `{}`."""


class ToolCalls:
    """Text in, content and calls out, in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._scanner: ObjectScanner | None = None
        """Reads the call that `_held` begins with."""
        self._space = ""
        """Whitespace that is content only if content follows it."""
        self._written = False
        self._called = False
        """A call stands between the last content and what follows."""

    def feed(self, text: str) -> Found:
        self._held += text
        found = Found()
        while self._take(found):
            pass
        return found

    def end(self) -> Found:
        """What was held back: half a call is text. Afterwards nothing more comes."""
        found = Found()
        self._take_text(found, len(self._held))
        if not self._called:
            found.content += self._space
        self._space = ""
        return found

    def _take(self, found: Found) -> bool:
        """Take one piece of content or one call off the front; False when more text is needed first."""
        if not self._held.startswith(OPEN):
            place = self._held.find(OPEN)
            ready = place if place > 0 else len(self._held) - held_back(self._held, (OPEN,))
            self._take_text(found, ready)
            return place > 0
        scanner = self._scanner = self._scanner or ObjectScanner(len(OPEN))
        try:
            if not scanner.scan(self._held):
                return False
            close = _skip(self._held, scanner.end or 0)
            tag = self._held[close : close + len(CLOSE)]
            if tag != CLOSE and CLOSE.startswith(tag):
                return False
            call = call_of(self._held, scanner) if tag == CLOSE else None
        except MalformedJson:
            call = None
        if call is None:  # all of it is text, up to where another call may begin
            again = self._held.find(OPEN, len(OPEN))
            self._take_text(found, len(OPEN) if again < 0 else again)
        else:
            self._held, self._scanner = self._held[close + len(CLOSE) :], None
            found.calls.append(call)
            self._called = True
        return True

    def _take_text(self, found: Found, length: int) -> None:
        """Move the first `length` characters to the content."""
        text, self._held, self._scanner = self._held[:length], self._held[length:], None
        text = self._space + text
        kept = text.strip() if self._called else text.rstrip()
        after = len(text.rstrip())
        if not kept:
            self._space = text
            return
        if self._called and self._written:
            found.content += text[: after - len(kept)] or "\n"
        self._space = text[after:]
        found.content += kept
        self._written = True
        self._called = False


def form(name: str) -> tuple[str, str]:
    """See `ToolParser.form`."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', f"}}\n{CLOSE}"


HERMES = ToolParser(ToolCalls, (OPEN, CLOSE), form=form)


def parse_call(text: str) -> Call | None:
    """Return the call that `text` is, None when it is malformed."""
    scanner = ObjectScanner()
    try:
        if not scanner.scan(text) or text[scanner.end :].strip(_SPACE):
            return None
    except MalformedJson:
        return None
    return call_of(text, scanner)


def call_of(text: str, scanner: ObjectScanner) -> Call | None:
    """Return the call in a complete object of `text`.

    None where it names no function, where its arguments are no object, and where it has a member that a call would
    lose: a key twice, or one that is neither name nor arguments.
    """
    members: dict[str, str] = {}
    for key, value in scanner.members:
        name = _string(text[key])
        if name is None or name in members:
            return None
        members[name] = text[value]
    named = [name for name in _ARGUMENTS if name in members]
    labels = {name for name in _LABELS if named and members.get(name, "")[:1] not in ("{", "[")}
    if len(named) > 1 or members.keys() - labels - {"name", *named}:
        return None
    function = _string(members.get("name", ""))
    arguments = _arguments(members[named[0]]) if named else NO_ARGUMENTS
    if function is None or "\0" in function or not 0 < len(function) <= _NAME_LENGTH_MAX:
        return None
    if arguments is None or len(arguments) > _ARGUMENTS_LENGTH_MAX:
        return None
    return Call(function, arguments)


def _arguments(written: str) -> str | None:
    """Return the arguments as the model wrote them; some models write a string that holds the object."""
    inner = _string(written) if written.startswith('"') else written
    if inner is None or inner.strip(_SPACE) in ("", "null"):
        return None if inner is None else NO_ARGUMENTS
    scanner = ObjectScanner()
    try:
        whole = scanner.scan(inner) and not inner[scanner.end :].strip(_SPACE)
    except MalformedJson:
        return None
    return inner if whole else None


def _string(written: str) -> str | None:
    """Return the value of a JSON string; None where it is none, or holds half a surrogate pair, which is no text."""
    try:
        value = json.loads(written)
        return value if isinstance(value, str) and value.encode() is not None else None
    except (ValueError, RecursionError):
        return None


def _skip(text: str, at: int) -> int:
    """Return the place behind the whitespace at `at`."""
    return len(text) - len(text[at:].lstrip(_SPACE))

"""Parser of hermes-style tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call is returned when it is complete and valid. Until then its text is buffered, because a malformed call is content,
and a stream cannot take back a call that it has sent. A call ends where its JSON ends, so a tag inside a string is part
of the string. No text is lost, except whitespace next to a call at the beginning or the end of the content.
"""

from __future__ import annotations

import json
import re

from headrace_inference.chat.json_scanner import MalformedJson, ObjectScanner, partial_marker_length
from headrace_inference.chat.parsers import Call, ParsedText, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME_LENGTH_MAX = 512
_ARGUMENTS_LENGTH_MAX = 1_048_576
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]*")
_ARGUMENTS = ("arguments", "parameters")
"""Keys of the arguments. Models that were trained on other formats write the second."""
_LABELS = ("id", "type", "index")
"""Further keys that some models add to a call. They are ignored."""
NO_ARGUMENTS = "{}"
"""Arguments of a call for which the model wrote none, `null`, `""` or `{}`."""


class HermesToolReader:
    """Incremental parser of the hermes-style tool calls in one answer. Implements `parsers.ToolReader`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        """Position in the buffer up to which it is read. Cutting it after each piece would take quadratic time."""
        self._scanner: ObjectScanner | None = None
        """Scanner of the call at the position."""
        self._content: list[str] = []
        """Pieces of content of this text."""
        self._space = ""
        """Whitespace that is content only if content follows it."""
        self._written = False
        self._called = False
        """Whether a call lies between the last content and the following text."""

    def feed(self, text: str) -> ParsedText:
        """Read the next text, and return the content and the complete calls that later text cannot change."""
        self._buffer += text
        parsed = ParsedText()
        while self._parse_next(parsed):
            pass
        if self._scanner is None:
            self._buffer, self._at = self._buffer[self._at :], 0
        return self._add_content(parsed)

    def end(self) -> ParsedText:
        """End the answer, and return the buffered text as content, because it is no complete call."""
        self._move_text(len(self._buffer))
        if not self._called:
            self._content.append(self._space)
        self._space = ""
        return self._add_content(ParsedText())

    def _add_content(self, parsed: ParsedText) -> ParsedText:
        parsed.content, self._content = "".join(self._content), []
        return parsed

    def _parse_next(self, parsed: ParsedText) -> bool:
        """Move one piece of content or one call from the buffer to `parsed`. Return False if more text is needed."""
        if not self._buffer.startswith(OPEN, self._at):
            start = self._buffer.find(OPEN, self._at)
            end = start if start >= 0 else len(self._buffer) - partial_marker_length(self._buffer, (OPEN,))
            self._move_text(max(end, self._at))
            return start >= 0
        scanner = self._scanner = self._scanner or ObjectScanner(self._at + len(OPEN))
        try:
            if not scanner.scan(self._buffer):
                return False
            close = _SPACES.match(self._buffer, scanner.end or 0).end()  # type: ignore[union-attr]
            tag = self._buffer[close : close + len(CLOSE)]
            if tag != CLOSE and CLOSE.startswith(tag):
                return False
            call = call_of(self._buffer, scanner) if tag == CLOSE else None
        except MalformedJson:
            call = None
        if call is None:  # the text is content up to the next position where a call may begin
            next_call = self._buffer.find(OPEN, self._at + len(OPEN))
            self._move_text(self._at + len(OPEN) if next_call < 0 else next_call)
        else:
            self._at, self._scanner = close + len(CLOSE), None
            parsed.calls.append(call)
            self._called = True
        return True

    def _move_text(self, end: int) -> None:
        """Move the characters of the buffer up to the position `end` to the content."""
        text, self._at, self._scanner = self._buffer[self._at : end], end, None
        text = self._space + text
        content = text.strip() if self._called else text.rstrip()
        after = len(text.rstrip())
        if not content:
            self._space = text
            return
        if self._called and self._written:
            self._content.append(text[: after - len(content)] or "\n")
        self._space = text[after:]
        self._content.append(content)
        self._written = True
        self._called = False


def call_form(name: str) -> tuple[str, str]:
    """Return the text before and after the arguments in a call of the function `name` (`ToolParser.form`)."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', f"}}\n{CLOSE}"


HERMES = ToolParser(HermesToolReader, (OPEN, CLOSE), form=call_form)


def parse_call(text: str) -> Call | None:
    """Return the tool call that `text`, a JSON object, represents, or None if it is malformed."""
    scanner = ObjectScanner()
    try:
        if not scanner.scan(text) or text[scanner.end :].strip(_SPACE):
            return None
    except MalformedJson:
        return None
    return call_of(text, scanner)


def call_of(text: str, scanner: ObjectScanner) -> Call | None:
    """Return the tool call that a complete JSON object of `text` represents.

    None if it has no function name, if its arguments are not an object, or if it has members that a call cannot
    represent: a key twice, or a key that is neither name nor arguments.
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
    """Return a call's arguments as JSON exactly as the model wrote them; None if they are not an object.

    Some models write a JSON string that contains the object; then its content is returned.
    """
    inner = _string(written) if written.startswith('"') else written
    if inner is None or inner.strip(_SPACE) in ("", "null"):
        return None if inner is None else NO_ARGUMENTS
    scanner = ObjectScanner()
    try:
        is_object = scanner.scan(inner) and not inner[scanner.end :].strip(_SPACE)
    except MalformedJson:
        return None
    return inner if is_object else None


def _string(written: str) -> str | None:
    """Return the value of a JSON string; None if it is not a string, or has an incomplete surrogate pair."""
    try:
        value = json.loads(written)
        return value if isinstance(value, str) and value.encode() is not None else None
    except (ValueError, RecursionError):
        return None

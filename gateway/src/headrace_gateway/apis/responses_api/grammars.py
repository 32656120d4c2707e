"""Conversion of the grammars of custom tools to regular expressions, which the JSON Schema of a function's argument can
contain.

A Lark grammar whose rules do not contain themselves describes a regular language, so it can be written as one regular
expression (pattern). The replica's grammar library applies the pattern to the text inside of the JSON string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue
from pydantic_core import from_json

_PATTERN_LENGTH_MAX = 1024
"""Length in characters of the longest pattern that replicas enforce."""
_GRAMMAR_LENGTH_MAX = 16_384
_DEPTH_MAX = 64
_TOKEN = re.compile(
    r'[ \t\r\n]+|//[^\n]*|#[^\n]*|(?P<token>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|->|\.\.'
    r"|[?!]?[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[:|*+?~()\[\].,%])"
)
_FLAGS = frozenset("ims")
_NAME = re.compile(r"[?!]?[A-Za-z_]\w*")
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[A-Za-z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
"""Terminals of Lark's module `common`."""
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}


class NotRegularError(ValueError):
    """Raised if a grammar cannot be converted to a regular expression."""


def pattern_of(text_format: Mapping[str, JsonValue] | None) -> str | None:
    """Return the pattern that the `format` of a custom tool requires of its input, or None if the format has no
    grammar.

    Raises:
        NotRegularError: The grammar is recursive, too long, not in the supported part of Lark, or damaged.
    """
    if text_format is None or text_format.get("type") != "grammar":
        return None
    definition, syntax = text_format.get("definition"), text_format.get("syntax")
    if not isinstance(definition, str) or len(definition) > _GRAMMAR_LENGTH_MAX:
        raise NotRegularError("definition: must be a text of bounded length")
    if syntax == "regex":
        inner = definition.removeprefix("^")
        inner = inner[:-1] if inner.endswith("$") and not inner.endswith(r"\$") else inner
    elif syntax == "lark":
        inner = _Reader(_tokens(definition)).pattern()
    else:
        raise NotRegularError("syntax: must be lark or regex")
    return _bounded(f"^(?:{inner})$")


def _tokens(definition: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(definition):
        match = _TOKEN.match(definition, position)
        if match is None:
            raise NotRegularError(f"character {position}: is not part of a Lark grammar")
        if match["token"] is not None:
            tokens.append(match["token"])
        position = match.end()
    return tokens


@dataclass
class _Reader:
    """Recursive-descent reader of a Lark grammar."""

    tokens: list[str]
    at: int = 0
    rules: dict[str, int] = field(default_factory=dict)
    """The index of the token at which the expansion of each rule and terminal begins."""
    imported: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    """The patterns of the rules that were already expanded."""
    open_rules: list[str] = field(default_factory=list)

    def pattern(self) -> str:
        """Return the pattern of the rule `start`."""
        while self.at < len(self.tokens):
            if self.peek() == "%":
                self.directive()
            else:
                self.declaration()
        return self.expand("start")

    def peek(self, ahead: int = 0) -> str:
        position = self.at + ahead
        return self.tokens[position] if position < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise NotRegularError(f"token {self.at}: {expected or 'more'} expected")
        self.at += 1
        return token

    def directive(self) -> None:
        """Parse `%import common.NAME`, with an alias or as a list. Raises `NotRegularError` for other directives."""
        self.take("%")
        if (self.take(), self.take()) != ("import", "common"):
            raise NotRegularError("only terminals of common can be imported; other directives are not supported")
        if self.peek() == ".":
            self.take(".")
            name = alias = self.take()
            if self.peek() == "->":
                self.take("->")
                alias = self.take()
            self.imported[alias] = name
            return
        self.take("(")
        while self.peek() != ")":
            name = self.take()
            self.imported[name] = name
            if self.peek() == ",":
                self.take(",")
        self.take(")")

    def declaration(self) -> None:
        """Parse the head of a rule, record where its expansion begins, and skip the expansion."""
        name = self.take().lstrip("?!")
        if self.peek() == ".":
            self.take(".")
            self.take()
        self.take(":")
        self.rules[name] = self.at
        while self.peek() and self.peek() != "%" and not self.is_head():
            self.take()

    def is_head(self) -> bool:
        """Return whether a rule begins at the current token: a name with a colon, or with a priority and a colon."""
        has_priority = self.peek(1) == "." and self.peek(3) == ":"
        return bool(_NAME.fullmatch(self.peek())) and (self.peek(1) == ":" or has_priority)

    def expand(self, name: str) -> str:
        """Return the pattern of a rule or terminal."""
        if name in self.written:
            return self.written[name]
        if name in self.imported:
            return _group(_common(self.imported[name]))
        if name not in self.rules or name in self.open_rules:
            raise NotRegularError(f"{name}: is not defined, or contains itself")
        before, self.at = self.at, self.rules[name]
        self.open_rules.append(name)
        pattern = self.written[name] = _group(self.alternatives())
        if self.peek() and self.peek() != "%" and not self.is_head():
            raise NotRegularError(f"token {self.at}: not understood")
        self.open_rules.pop()
        self.at = before
        return pattern

    def alternatives(self) -> str:
        if len(self.open_rules) > _DEPTH_MAX:
            raise NotRegularError("nested too deep")
        parts = [self.sequence()]
        while self.peek() == "|":
            self.take("|")
            parts.append(self.sequence())
        return _bounded("|".join(parts))

    def sequence(self) -> str:
        parts: list[str] = []
        while self.peek() not in ("", "|", ")", "]", "%") and not self.is_head():
            if self.peek() == "->":
                self.take("->")
                self.take()
            else:
                parts.append(self.repeated())
        return _bounded("".join(parts))

    def repeated(self) -> str:
        item = self.item()
        while self.peek() in ("*", "+", "?"):
            item = _group(item + self.take())
        if self.peek() == "~":
            self.take("~")
            least = most = self.take()
            if self.peek() == "..":
                self.take("..")
                most = self.take()
            if not (least.isdecimal() and most.isdecimal()):
                raise NotRegularError("a repetition needs a number")
            item = _group(f"{item}{{{least},{most}}}")
        return item

    def item(self) -> str:
        word = self.take()
        if word in ("(", "["):
            self.open_rules.append(word)
            inner = _group(self.alternatives())
            self.open_rules.pop()
            self.take(")" if word == "(" else "]")
            return inner if word == "(" else _group(inner + "?")
        if word.startswith('"'):
            if self.peek() == "..":
                self.take("..")
                return f"[{_character(word)}-{_character(self.take())}]"
            text = _group(_escaped(_text(word.removesuffix("i"))))
            return f"(?i:{text})" if word.endswith("i") else text
        if word.startswith("/"):
            body, _, flags = word[1:].rpartition("/")
            if not _FLAGS.issuperset(flags):
                raise NotRegularError(f"flags {flags} have no pattern")
            body = body.replace(r"\/", "/")
            return f"(?{flags}:{body})" if flags else _group(body)
        if _NAME.fullmatch(word):
            return self.expand(word.lstrip("?!"))
        raise NotRegularError(f"token {self.at}: not understood")


def _common(name: str) -> str:
    if name not in _COMMON:
        raise NotRegularError(f"common.{name}: is not a supported terminal of Lark's module common")
    return _COMMON[name]


def _text(literal: str) -> str:
    try:
        text = from_json(literal)
    except ValueError:
        raise NotRegularError("a string has an escape that JSON lacks, or half of a surrogate pair") from None
    assert isinstance(text, str)
    return text


def _character(literal: str) -> str:
    text = _text(literal)
    if len(text) != 1:
        raise NotRegularError("a range needs two characters")
    return rf"\{text}" if text in r"\]^-[" else _ESCAPES.get(text, text)


def _escaped(text: str) -> str:
    return "".join(rf"\{char}" if char in r"\.+*?()|[]{}^$" else _ESCAPES.get(char, char) for char in text)


def _group(pattern: str) -> str:
    return _bounded(pattern if len(pattern) == 1 else f"(?:{pattern})")


def _bounded(pattern: str) -> str:
    if len(pattern) > _PATTERN_LENGTH_MAX:
        raise NotRegularError(f"its pattern is longer than {_PATTERN_LENGTH_MAX} characters")
    return pattern

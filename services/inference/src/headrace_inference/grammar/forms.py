"""The answer form that a request requires, and its grammar in llguidance's dialect of Lark with JSON Schemas. Pure.

An answer may begin with reasoning if the model's template has reasoning; only the text after it is constrained. The
text around the arguments of a call comes from the tool parser (`ToolParser.form`), so the parser can read the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from headrace_inference.chat.parsers import Parsers
from headrace_runtime.errors import Refused
from headrace_schemas import Tool
from headrace_schemas.http.answer_form import (
    RESPONSE_FORMAT,
    TOOL_CHOICE,
    NamedTool,
    ResponseFormat,
    ToolChoice,
    requires_call,
)

Special = Callable[[str], int | None]
"""Function that returns the id of a special token with this text, or None if the tokenizer has no such token."""
_LITERALS = frozenset(("const", "enum", "pattern"))
_NAMES = frozenset(("properties", "patternProperties"))
_LITERAL_LENGTH_MAX = 1024
"""Longest text that a schema may spell out. The library's work for each token grows with its length: with 20,000
characters it takes up to 0.1 s, which every sequence of the batch waits for."""
_SPACE = "SPACE: /[ \\n]{1,4}/\n"
_ANYTHING = "/(?s:.*)/"
_ANY_TOKENS = "<[*]>*"
"""All tokens, special ones included."""
_LAYOUT = {"whitespace_flexible": False, "item_separator": r",(\n[ \t]{0,64}| )?", "key_separator": ": ?"}
"""Whitespace in JSON: after a comma a line break with an indentation, a blank, or nothing. A model could fill its
answer with more whitespace, and vLLM's release of the library (1.7) allows unlimited repetition of
`whitespace_pattern`."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have: JSON, tool calls, or either of them."""

    schema: Mapping[str, JsonValue] | None
    """JSON Schema of the answer; None if only calls are constrained."""
    calls: tuple[Tool, ...] = ()
    lenient: bool = False
    """Whether keywords of `schema` that no grammar can enforce are ignored. Otherwise the schema is refused."""
    forced: bool = False
    """Whether the answer must be calls."""
    several: bool = True
    """Whether an answer may have more than one call."""


def required_form(
    response_format: ResponseFormat | None, choice: ToolChoice, tools: Sequence[Tool], *, several: bool
) -> AnswerForm | None:
    """Return the form that a request requires of its answer: a JSON Schema, or calls of certain tools; or None.

    Args:
        response_format: the request's `response_format`.
        choice: the request's `tool_choice`.
        tools: tools that the model may call.
        several: whether one answer may contain more than one tool call.
    """
    if requires_call(choice):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        callable_tools = tuple(tool for tool in tools if named in (None, tool.function.name))
        return AnswerForm(None, callable_tools, forced=True, several=several and named is None)
    if response_format is None or not response_format.constrains:
        return None
    schema, is_lenient = response_format.required_schema, not response_format.strict
    return AnswerForm(schema, tuple(tools), is_lenient, several=several)


def grammar_of(form: AnswerForm, parsers: Parsers, special: Special, *, thinks: bool, opened: bool) -> str:
    """Return the grammar of an answer form.

    Args:
        thinks: whether the model's template has reasoning.
        opened: whether the prompt ends inside reasoning.

    Raises:
        Refused: the parsers of this replica do not support the form.
    """
    write = _Writer(parsers, special)
    answers = []
    if not form.forced:
        assert form.schema is not None
        answers.append("json")
        write.rule("json", f"%json {_json(form.schema, lenient=form.lenient)}")
    if form.calls or form.forced:
        answers.append("calls")
        if form.forced or not form.several or not write.free_calls(form.calls):
            write.calls(form.calls, forced=form.forced, several=form.several)
    write.rule("answer", " | ".join(answers))
    write.start(thinks=thinks, opened=opened)
    return "".join(write.rules)


class _Writer:
    """Builder of the text of a Lark grammar that describes the permitted answers."""

    def __init__(self, parsers: Parsers, special: Special) -> None:
        self.rules: list[str] = [_SPACE]
        self._parsers = parsers
        self._special = special

    def rule(self, name: str, body: str) -> None:
        self.rules.append(f"{name}: {body}\n")

    def calls(self, tools: Sequence[Tool], *, forced: bool, several: bool) -> None:
        form = self._parsers.tools.form
        if form is None:
            field = TOOL_CHOICE if forced else RESPONSE_FORMAT
            message = f"{field}: the tool parser of this replica (inference.tool_parser) has no grammar for calls"
            raise Refused(400, "unsupported_value", message, field)
        names = [f"call_{number}" for number in range(len(tools))]
        for number, (name, tool) in enumerate(zip(names, tools, strict=True)):
            before, after = (self._expression(part) for part in form(tool.function.name))
            self.rule(name, f"{before} arguments_{number} {after}")
            self.rule(
                f"arguments_{number}", f"%json {_json(_arguments(number, tool), lenient=not tool.function.strict)}"
            )
        self.rule("call", " | ".join(names))
        self.rule("calls", "call (SPACE? call)*" if several else "call")

    def free_calls(self, tools: Sequence[Tool]) -> bool:
        """Add the rule for calls with `tool_choice` `auto`: the token that opens a call, followed by any tokens.

        So the model decides whether to call, and the call itself is not constrained. Return False if the parser's
        opening tag is not a single token.
        """
        form = self._parsers.tools.form
        openings = {next(self._pieces(form(tool.function.name)[0]), "") for tool in tools} if form else {""}
        if not all(opening.startswith("<[") for opening in openings):
            return False
        self.rule("calls", f"({' | '.join(sorted(openings))}) {_ANY_TOKENS}")
        return True

    def start(self, *, thinks: bool, opened: bool) -> None:
        reasoning = self._parsers.reasoning
        if opened and not reasoning.closing:
            message = (
                f"{RESPONSE_FORMAT}: the prompt ends inside reasoning, and the reasoning parser of this replica "
                "(inference.reasoning_parser) does not define the tag that ends it"
            )
            raise Refused(400, "unsupported_value", message, RESPONSE_FORMAT)
        if not opened and not (thinks and reasoning.opening and reasoning.closing):
            self.rule("start", "answer")
            return
        closing = self._special(reasoning.closing)
        if closing is not None:
            self.rule("thought", f"{_ANYTHING} <[{closing}]> SPACE?")
        else:
            self.rule("thought", "until_closed SPACE?")
            self.rule("until_closed[lazy]", f"/(?s:.*){_escaped(reasoning.closing)}/")
        self.rule("start", "thought answer" if opened else f"({self._expression(reasoning.opening)} thought)? answer")

    def _expression(self, text: str) -> str:
        """Return the grammar expression that matches `text`.

        Tags that are special tokens match as tokens, and each newline of `text` may be missing.
        """
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        tags = sorted({*self._parsers.tools.tags, *self._parsers.reasoning.tags}, key=len, reverse=True)
        separators = "|".join(map(re.escape, [*tags, "\n"]))
        for piece in filter(None, re.split(f"({separators})", text)):
            token = self._special(piece) if piece in tags else None
            if token is not None:
                yield f"<[{token}]>"
            elif piece == "\n":
                yield '"\\n"?'
            else:
                yield json.dumps(piece, ensure_ascii=False)


def check_schemas(form: AnswerForm, depth_max: int) -> None:
    """Raise `Refused` for a schema that is nested deeper than `depth_max` or contains a long name, pattern or
    constant."""
    fields: list[tuple[str, Mapping[str, JsonValue] | None]] = [(RESPONSE_FORMAT, form.schema)]
    fields += [(f"tools.{number}", tool.function.parameters) for number, tool in enumerate(form.calls)]
    for field, schema in fields:
        if _is_deeper(schema, depth_max):
            message = f"{field}: its schema is nested deeper than {depth_max}"
            raise Refused(400, "schema_too_large", message, field)
        if _longest_literal(schema) > _LITERAL_LENGTH_MAX:
            message = (
                f"{field}: a property name, pattern or constant of its schema has more than {_LITERAL_LENGTH_MAX} "
                "characters; shorten it"
            )
            raise Refused(400, "schema_too_large", message, field)


def _longest_literal(value: object, *, is_literal: bool = False, has_names: bool = False) -> int:
    """Return the length of the longest text that an answer may have to spell out.

    Args:
        value: a schema or a part of it.
        is_literal: whether `value` is a pattern or a constant.
        has_names: whether `value` has schemas by property names.
    """
    if isinstance(value, str):
        return len(value) if is_literal else 0
    if isinstance(value, list):
        return max((_longest_literal(item, is_literal=is_literal) for item in value), default=0)
    if not isinstance(value, Mapping):
        return 0
    lengths = [len(name) for name in value] if has_names or is_literal else []
    for name, item in value.items():
        inside = is_literal or (name in _LITERALS and not has_names)
        lengths.append(_longest_literal(item, is_literal=inside, has_names=name in _NAMES and not has_names))
    return max(lengths, default=0)


def _is_deeper(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list) and (depth == 0 or any(_is_deeper(item, depth - 1) for item in value))


def _arguments(number: int, tool: Tool) -> Mapping[str, JsonValue]:
    schema = tool.function.parameters or {}
    kind = schema.get("type", "object")
    if kind != "object":
        field = f"tools.{number}.function.parameters"
        raise Refused(400, "invalid_value", f"{field}: must describe an object, because arguments are an object", field)
    return {**schema, "type": "object"}


def _json(schema: Mapping[str, JsonValue], *, lenient: bool) -> str:
    return json.dumps({**schema, "x-guidance": _LAYOUT | ({"lenient": True} if lenient else {})}, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")

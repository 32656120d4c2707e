"""From what a request asks of an answer to a grammar: llguidance's dialect of Lark, with JSON Schemas inside. Pure.

An answer may begin with reasoning where the model's template knows of any; what follows is held. What stands around the
arguments of a call comes from the tool parser (`ToolParser.form`), so that it reads what was held.
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
from headrace_schemas.answer_form import (
    RESPONSE_FORMAT,
    TOOL_CHOICE,
    NamedTool,
    ResponseFormat,
    ToolChoice,
    requires_call,
)

Special = Callable[[str], int | None]
"""The token id of a text that the tokenizer keeps apart from all others; None: it is text like any other."""
_SPACE = "SPACE: /[ \\n]{1,4}/\n"
_ANYTHING = "/(?s:.*)/"
_LAYOUT = {"whitespace_flexible": False, "item_separator": r",(\n[ \t]{0,64}| )?", "key_separator": ": ?"}
"""Of JSON: after a comma a line break with an indentation, a blank, or nothing. More would be an answer of blanks, and
what `whitespace_pattern` says may be repeated without end in the library's release that vLLM has, 1.7."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What one answer has to be: JSON, calls, or either of them."""

    schema: Mapping[str, JsonValue] | None
    calls: tuple[Tool, ...] = ()
    forced: bool = False
    """No answer but calls."""
    several: bool = True
    """More than one call at a time."""


def form_of(
    response_format: ResponseFormat | None, choice: ToolChoice, tools: Sequence[Tool], *, several: bool
) -> AnswerForm | None:
    """`tools` are those on offer. None: the answer may be anything."""
    wanted = response_format is not None and response_format.constrains
    if requires_call(choice):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        callable_tools = tuple(tool for tool in tools if named in (None, tool.function.name))
        return AnswerForm(None, callable_tools, forced=True, several=several and named is None)
    if response_format is None or not wanted:
        return None
    return AnswerForm(response_format.required_schema, tuple(tools), several=several)


def grammar_of(form: AnswerForm, parsers: Parsers, special: Special, *, thinks: bool, opened: bool) -> str:
    """`thinks`: the model's template knows of reasoning. `opened`: the prompt ended inside of it. Raises `Refused`."""
    write = _Writer(parsers, special)
    answers = []
    if not form.forced:
        assert form.schema is not None
        answers.append("json")
        write.rule("json", f"%json {_json(form.schema)}")
    if form.calls or form.forced:
        answers.append("calls")
        write.calls(form.calls, forced=form.forced, several=form.several)
    write.rule("answer", " | ".join(answers))
    write.start(thinks=thinks, opened=opened)
    return "".join(write.rules)


class _Writer:
    """Rules, in the order in which they were needed."""

    def __init__(self, parsers: Parsers, special: Special) -> None:
        self.rules: list[str] = [_SPACE]
        self._parsers = parsers
        self._special = special

    def rule(self, name: str, body: str) -> None:
        self.rules.append(f"{name}: {body}\n")

    def calls(self, tools: Sequence[Tool], *, forced: bool, several: bool) -> None:
        written = self._parsers.tools.form
        if written is None:
            field = TOOL_CHOICE if forced else RESPONSE_FORMAT
            message = f"{field}: the tool parser of this replica (inference.tool_parser) cannot hold an answer to calls"
            raise Refused(400, "unsupported_value", message, field)
        names = [f"call_{number}" for number in range(len(tools))]
        for number, (name, tool) in enumerate(zip(names, tools, strict=True)):
            before, after = (self._text(part) for part in written(tool.function.name))
            self.rule(name, f"{before} arguments_{number} {after}")
            self.rule(f"arguments_{number}", f"%json {_json(_arguments(number, tool))}")
        self.rule("call", " | ".join(names))
        self.rule("calls", "call (SPACE? call)*" if several else "call")

    def start(self, *, thinks: bool, opened: bool) -> None:
        reasoning = self._parsers.reasoning
        if opened and not reasoning.closing:
            message = (
                f"{RESPONSE_FORMAT}: the prompt ends inside reasoning, and the reasoning parser of this replica "
                "(inference.reasoning_parser) does not say what ends it"
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
        self.rule("start", "thought answer" if opened else f"({self._text(reasoning.opening)} thought)? answer")

    def _text(self, text: str) -> str:
        """What spells `text`: its tags as tokens where the tokenizer keeps them apart, newlines that may be missing."""
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        tags = sorted({*self._parsers.tools.tags, *self._parsers.reasoning.tags}, key=len, reverse=True)
        apart = "|".join(map(re.escape, [*tags, "\n"]))
        for piece in filter(None, re.split(f"({apart})", text)):
            token = self._special(piece) if piece in tags else None
            if token is not None:
                yield f"<[{token}]>"
            elif piece == "\n":
                yield '"\\n"?'
            else:
                yield json.dumps(piece, ensure_ascii=False)


def check_depth(form: AnswerForm, depth_max: int) -> None:
    """Raises `Refused` for a schema that is nested deeper than `depth_max`."""
    fields: list[tuple[str, Mapping[str, JsonValue] | None]] = [(RESPONSE_FORMAT, form.schema)]
    fields += [(f"tools.{number}", tool.function.parameters) for number, tool in enumerate(form.calls)]
    for field, schema in fields:
        if _deeper(schema, depth_max):
            message = f"{field}: its schema is nested deeper than {depth_max} (inference.grammar.depth_max)"
            raise Refused(400, "schema_too_large", message, field)


def _deeper(value: object, room: int) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list) and (room == 0 or any(_deeper(one, room - 1) for one in value))


def _arguments(number: int, tool: Tool) -> Mapping[str, JsonValue]:
    schema = tool.function.parameters or {}
    kind = schema.get("type", "object")
    if kind != "object":
        field = f"tools.{number}.function.parameters"
        raise Refused(400, "invalid_value", f"{field}: must describe an object, which arguments are", field)
    return {**schema, "type": "object"}


def _json(schema: Mapping[str, JsonValue]) -> str:
    return json.dumps({**schema, "x-guidance": _LAYOUT}, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")

"""Any text around and inside tool calls: no text is lost or invented, and streams give the same result."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_inference.chat.answer import Answer, Reading
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.json_scanner import MalformedJson, ObjectScanner
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import CLOSE, HERMES, OPEN, ToolCalls
from headrace_runtime.chat_messages import argument_value
from headrace_schemas import FunctionCall, Message, Tool

Read = tuple[str, list[tuple[str, str]]]
TOOLS = (Tool.model_validate({"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}),)

words = st.sampled_from(
    ["a", "é", "😀", " ", "\n", "<", ">", "{", "}", '"', "\\", CLOSE, "<tool", "</", "<|im_end|>", "null", "</think>"]
)
texts = st.lists(words, max_size=6).map("".join)
strings = st.lists(st.one_of(words, st.just(OPEN), st.just("\\u0041"), st.text(max_size=3)), max_size=6).map("".join)
numbers = st.sampled_from(["0", "-1", "3.5", "1e400", "-0", "9" * 5000, "0.1000000000000000055511151231257827"])


def _spaced(parts: list[str], opening: str, closing: str, space: str) -> str:
    return f"{opening}{space}{f',{space}'.join(parts)}{space}{closing}"


def _objects(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """JSON objects as text, duplicate keys and odd spacing included."""
    keys = strings.map(lambda text: json.dumps(text.encode("utf-8", "ignore").decode()))
    members = st.lists(st.tuples(keys, children).map(lambda pair: f"{pair[0]}: {pair[1]}"), max_size=3)
    return st.builds(_spaced, members, st.just("{"), st.just("}"), st.sampled_from(["", " ", "\n  "]))


_scalars = st.one_of(
    strings.map(lambda text: json.dumps(text.encode("utf-8", "ignore").decode(), ensure_ascii=len(text) % 2 == 0)),
    numbers,
    st.sampled_from(["true", "false", "null", "[]", "{}"]),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        _objects(inner),
        st.lists(inner, max_size=3).map(lambda parts: _spaced(parts, "[", "]", " ")),
        st.tuples(inner, st.integers(1, 700)).map(lambda pair: "[" * pair[1] + pair[0] + "]" * pair[1]),
    ),
    max_leaves=6,
)
arguments = st.one_of(_objects(_values), st.sampled_from(["null", '""', "{}", None]))


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[str, str]]:
    """A call as text, and its name and arguments."""
    name = draw(st.sampled_from(["search", "x", "é", "a" * 512, CLOSE]))
    written = draw(arguments)
    members = [f'"name": {json.dumps(name)}']
    if written is not None:
        wrapped = json.dumps(written) if draw(st.integers(0, 9)) == 0 and written.startswith("{") else written
        members.append(f'"{draw(st.sampled_from(["arguments", "parameters"]))}": {wrapped}')
    space = draw(st.sampled_from(["", "\n", " "]))
    body = _spaced(draw(st.permutations(members)), "{", "}", space)
    expected = "{}" if written in ("null", '""', None) else written
    return f"{OPEN}{space}{body}{space}{CLOSE}", (name, expected)


malformed = st.sampled_from(
    [
        "{oops}", "", "search(1)", "[]", '{"name": "x", "query": 1}', '{"name": "x", "arguments": [1]}',
        '{"name": "x", "arguments": {}, "arguments": {}}', '{"name": "x", "arguments": {"a": 1}}}', '{"arguments": {}}',
        '{"name": "x", "arguments": {"a": "\n"}}', '{"name": "x", "arguments": {}} text',
        '{"name": "x" "arguments": {}}',
        '{"name": "x", "arguments": {"a": 1}, "parameters": {"a": 1}}', '{"name": "x", "arguments": {"a": NaN}}',
    ]
).map(lambda body: f"{OPEN}{body}{CLOSE}")  # fmt: skip
Piece = tuple[str, tuple[str, str] | None]
pieces = st.lists(
    st.one_of(texts.map(lambda text: (text, None)), malformed.map(lambda text: (text, None)), calls()), max_size=6
)


def read(portions: list[str]) -> Read:
    reader = ToolCalls()
    content, calls_found = "", []
    for portion in [*portions, None]:
        news = reader.end() if portion is None else reader.feed(portion)
        content += news.content
        calls_found += [(call.name, call.arguments) for call in news.calls]
    return content, calls_found


@settings(max_examples=150, deadline=None)
@given(pieces, st.randoms(use_true_random=False))
def test_calls_and_texts_are_read_whole_however_they_are_cut(answer: list[Piece], dice: random.Random) -> None:
    text = "".join(piece for piece, _ in answer)
    content, calls_found = read([text])
    assert calls_found == [call for _, call in answer if call is not None]
    texts = ["".join(piece for piece, call in answer if call is None)]
    assert "".join(content.split()) == "".join("".join(texts).split())
    parts = [""]
    for piece, call in answer:
        parts = [*parts, ""] if call is not None else [*parts[:-1], parts[-1] + piece]
    visible = [part.strip() for part in parts if part.strip()]
    at = 0
    for before, part in zip([None, *visible], visible, strict=False):
        position = content.index(part, at)
        assert before is None or content[at:position].isspace(), "texts around a call are kept apart"
        at = position + len(part)
    if len(text) < 3000:
        assert read(list(text)) == (content, calls_found)
    for _ in range(3):
        cuts = sorted(dice.randint(0, len(text)) for _ in range(3))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == (content, calls_found)


@settings(max_examples=30, deadline=None)
@given(calls(), calls(), texts)
def test_every_cut_reads_the_same(first: Any, second: Any, between: str) -> None:
    text = f"{first[0]}{between}{second[0]}"[:4000]
    complete = read([text])
    for cut in range(0, len(text), max(1, len(text) // 300)):
        assert read([text[:cut], text[cut:]]) == complete


@settings(max_examples=150, deadline=None)
@given(st.one_of(_objects(_values), st.lists(st.one_of(words, numbers), max_size=8).map(lambda p: "{" + "".join(p))))
def test_the_scanner_ends_where_json_ends(text: str) -> None:
    """The scanner agrees with Python's decoder, wherever that can convert the text."""
    try:
        _, end = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=int).raw_decode(text)
    except RecursionError:
        return
    except ValueError:
        end = None
    scanner = ObjectScanner()
    try:
        complete = scanner.scan(f"{text} ")
    except MalformedJson:
        complete = False
    assert (scanner.end if complete else None) == end


@settings(max_examples=80, deadline=None)
@given(pieces, st.booleans())
def test_an_echoed_answer_goes_on_with_its_exact_tokens(
    tokenizer: ChatTokenizer, answer: list[Piece], rewritten: bool
) -> None:
    text = "".join(piece for piece, _ in answer)
    parsers = Parsers(HERMES, THINK)
    prompts = ExactPrompts(1_000_000, parsers)
    messages = [Message(role="user", content="go")]
    prompt = prompts.build(tokenizer, messages, TOOLS, {})
    ids = [*tokenizer.encode(text.replace("<|im_end|>", "")), tokenizer.eos_id or 0]
    reader = Answer(tokenizer, Reading.of(prompt.text, parsers, tools=True))
    reader.feed(ids)
    reader.end()
    message = reader.message
    prompts.remember(prompt, message, ids)
    echo = message
    if rewritten and message.tool_calls:
        echo = echo.model_copy(update={"tool_calls": tuple(map(_rewritten, message.tool_calls))})
    results = [Message(role="tool", tool_call_id=call.id, content="ok") for call in message.tool_calls or ()]
    following = prompts.build(tokenizer, [*messages, echo, *results, Message(role="user", content="on")], TOOLS, {})
    if message.tool_calls and OPEN in message.text:
        return  # a broken call as text before a call means something else once the template has put it there
    assert following.token_ids[: len(prompt.token_ids) + len(ids)] == [*prompt.token_ids, *ids]


def _rewritten(call: Any) -> Any:
    """Serialize a call like a client that parses arguments and serializes them again."""
    value = argument_value(call.function.arguments)
    again = call.function.arguments if isinstance(value, str) else json.dumps(value, indent=1)
    return call.model_copy(update={"function": FunctionCall(name=call.function.name, arguments=again)})


@pytest.mark.parametrize("written", ["", " ", "null", '""', "{}"])
def test_no_arguments_have_one_meaning(written: str) -> None:
    assert argument_value(written) == {}


@pytest.mark.parametrize("written", ["9" * 5000, "1e999", "[" * 300 + "]" * 300, '"\\ud800"', "NaN", "{oops"])
def test_arguments_that_python_cannot_hold_stay_as_they_are_written(written: str) -> None:
    assert argument_value(written) == written

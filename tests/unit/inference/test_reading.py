"""Tests of the incremental parsing of answers: no text is lost, and no tag is returned in part."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_inference.chat.answer import AnswerParser, AnswerSyntax, AnswerTextParser, Delta, StopWatch
from headrace_inference.chat.json_scanner import StopStrings
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES, HermesToolReader, parse_call
from headrace_runtime.grammars.vocabulary import byte_level_table

BOTH = AnswerSyntax(HERMES, THINK)
CALL = '<tool_call>{"name": "search", "arguments": {"query": "a  b", "limit": 3}}</tool_call>'


def read(pieces: Sequence[str], syntax: AnswerSyntax = BOTH) -> Delta:
    """Return the whole answer, and check that each delta equals the growth of the total."""
    text = AnswerTextParser(syntax)
    grown = Delta()
    for piece in pieces:
        grown += text.feed(piece)
    grown += text.end()
    assert (grown.reasoning, grown.content, grown.calls) == (
        text.total.reasoning,
        text.total.content,
        text.total.calls,
    )
    return grown


def calls(delta: Delta) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in delta.calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "called"),
    [
        ("hello", "", "hello", []),
        (" hello \n", "", " hello \n", []),
        (CALL, "", "", [("search", '{"query": "a  b", "limit": 3}')]),
        (f"Let me look.\n{CALL}\n", "", "Let me look.", [("search", '{"query": "a  b", "limit": 3}')]),
        (f"{CALL}\n{CALL}", "", "", [("search", '{"query": "a  b", "limit": 3}')] * 2),
        (f"{CALL} and then", "", "and then", [("search", '{"query": "a  b", "limit": 3}')]),
        (f"a {CALL} b", "", "a  b", [("search", '{"query": "a  b", "limit": 3}')]),
        ("<think>hm\n</think>\n\nyes", "hm", "yes", []),
        (f"<think>\nhm </think>{CALL}", "hm", "", [("search", '{"query": "a  b", "limit": 3}')]),
        ("<think>never closed <tool_call>", "never closed <tool_call>", "", []),
        ("\n<think>a</think>b<think>c</think>", "a", "b<think>c</think>", []),
        ("yes <think>no</think>", "", "yes <think>no</think>", []),
        ("<thinking is hard", "", "<thinking is hard", []),
        ("a <tool_call", "", "a <tool_call", []),
        ("<tool_call>{oops}</tool_call>", "", "<tool_call>{oops}</tool_call>", []),
        ('<tool_call>{"name": "x"', "", '<tool_call>{"name": "x"', []),
        (f"a{CALL}b", "", "a\nb", [("search", '{"query": "a  b", "limit": 3}')]),
        (f" {CALL} a \n{CALL} {CALL}b ", "", "a \n b ", [("search", '{"query": "a  b", "limit": 3}')] * 3),
        (f"<tool_call>broken {CALL}", "", "<tool_call>broken", [("search", '{"query": "a  b", "limit": 3}')]),
        ("</tool_call>", "", "</tool_call>", []),
    ],
)
def test_what_is_read(text: str, reasoning: str, content: str, called: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        delta = read(pieces)
        assert (delta.reasoning, delta.content, calls(delta)) == (reasoning, content, called)


FRAGMENTS = ("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "</", "think>", " ", "\n", "a", "{", "é")


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.randoms(use_true_random=False), st.booleans())
def test_portions_never_change_what_is_read(fragments: list[str], dice: random.Random, opened: bool) -> None:
    """The reasoning, content and calls are equal whether the answer is parsed whole, by letter, or in any pieces."""
    text = "".join(fragments)
    syntax = AnswerSyntax(HERMES, THINK, opened)
    cuts = sorted(dice.randint(0, len(text)) for _ in range(4))
    portions = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    complete, letters, cut = read([text], syntax), read(list(text), syntax), read(portions, syntax)
    for other in (letters, cut):
        assert (other.reasoning, other.content, calls(other)) == (complete.reasoning, complete.content, calls(complete))
    accounted = _visible(complete.reasoning + complete.content) + len(complete.calls) * _visible(CALL)
    assert _visible(text) - _visible("<think></think>") <= accounted <= _visible(text)


def _visible(text: str) -> int:
    return len("".join(text.split()))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "x", "arguments": [1]}',
        '{"name": "x", "arguments": "no json"}',
        '{"name": "x", "arguments": NaN}',
        '{"name": "x", "arguments": {"a": Infinity}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "a\\u0000b", "arguments": {}}',
        '{"name": "x", "arguments": {}} trailing',
        '{"name": "x", "arguments": {},}',
        '{"name": "' + "x" * 513 + '", "arguments": {}}',
        '{"name": "x", "query": "y"}',
        '{"name": "x", "id": 3}',
        '{"name": "x", "arguments": {}, "query": "y"}',
        '{"name": "x", "arguments": {"a": 1}, "parameters": {"a": 2}}',
        '{"name": "x", "name": "y", "arguments": {}}',
        '{"name": "x", "arguments": {"a": 1}, "arguments": {}}',
        '{"name": "x", "arguments": {"a": 01}}',
        '{"name": "x", "arguments": {"a": "line\nbreak"}}',
        '{"name": "x", "arguments": "null and more"}',
    ],
)
def test_malformed_calls_are_no_calls(body: str) -> None:
    assert parse_call(body) is None
    assert read([f"<tool_call>{body}</tool_call>"]).content.strip() == f"<tool_call>{body}</tool_call>".strip()


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "x", "arguments": {"b":1,  "a" : [ 2 ]}}', '{"b":1,  "a" : [ 2 ]}'),
        ('\n{"arguments": {"a": "}\\"{"}, "name": "x"}\n', '{"a": "}\\"{"}'),
        ('{"name": "x"}', "{}"),
        ('{"name": "x", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "x", "arguments": null}', "{}"),
        ('{"name": "x", "arguments": ""}', "{}"),
        ('{"name": "x", "arguments": "{}"}', "{}"),
        ('{"name": "x", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"type": "function", "name": "x", "parameters": {"a": 1}, "id": "call_1"}', '{"a": 1}'),
        ('{"name": "x", "arguments": {"n": 1e400, "n": 2}}', '{"n": 1e400, "n": 2}'),
        (f'{{"name": "x", "arguments": {{"a": {"9" * 5000}}}}}', f'{{"a": {"9" * 5000}}}'),
        ('{"name": "x", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001, '{"a":' * 3000 + "1" + "}" * 3000),
        ('{"name": "x", "arguments": {"t": "a</tool_call>b<tool_call>"}}', '{"t": "a</tool_call>b<tool_call>"}'),
    ],
)
def test_arguments_are_what_the_model_wrote(body: str, arguments: str) -> None:
    call = parse_call(body)
    assert call is not None
    assert (call.name, call.arguments) == ("x", arguments)


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>{", '<tool_call>{"name":"f","arguments":{}}</tool_call>'], ids=len
)
def test_many_tags_are_read_in_time_linear_in_the_text(unit: str) -> None:
    """1 MB of them, in an answer or in reasoning that a client sends back, took 9 s of the replica's processor."""

    def read_s(length: int) -> float:
        reader, text = HermesToolReader(), unit * (length // len(unit))
        began_s = time.thread_time()
        reader.feed(text)
        reader.end()
        return time.thread_time() - began_s

    assert min(read_s(800_000) for _ in range(3)) < 12 * min(read_s(100_000) for _ in range(3))


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    syntax = AnswerSyntax.of("<|im_start|>assistant\n<think>\n", Parsers(HERMES, THINK), tools=False)
    assert read(["so", " be it</think>", "yes"], syntax).reasoning == "so be it"
    assert not AnswerSyntax.of("<think>", Parsers(), tools=False).reasoning_opened


def test_without_parsers_tags_are_text() -> None:
    text = f"<think>a</think>{CALL}"
    assert read(list(text), AnswerSyntax()).content == text


@settings(max_examples=200)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_at_the_one_that_is_complete_first(text: str, stops: list[str]) -> None:
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end, start = min(matches, default=(len(text), len(text)))
    expected = text[:start]
    cutter = StopStrings(stops)
    passed_text = ""
    for letter in text:
        passed_text += cutter.feed(letter)
        assert expected.startswith(passed_text), "not a letter of a stop string was given out"
    assert passed_text + cutter.end() == expected
    assert cutter.complete == (text[start:end] if matches else None)
    unsplit = StopStrings(stops)
    assert unsplit.feed(text) + unsplit.end() == expected


def test_a_token_costs_little_whatever_the_stop_strings_are() -> None:
    """16 stop strings of 512 characters took 7 ms for each token of each sequence, which the whole batch waits for."""

    def read_s(first: str) -> float:
        reader = StopStrings([first * 511 + "c", *(f"ab{chr(100 + number) * 500}" for number in range(15))])
        began_s = time.thread_time()
        for _ in range(500):
            reader.feed("a")
        return time.thread_time() - began_s

    read_s("a")
    assert min(read_s("a") for _ in range(3)) < 10 * min(read_s("x") for _ in range(3))


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=7), max_size=8),
)
def test_text_is_held_back_as_long_as_it_may_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    reader, given_out, text = StopStrings(stops), "", ""
    for piece in pieces:
        given_out += reader.feed(piece)
        text += piece
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if ends:
            assert reader.complete is not None
            assert given_out + reader.complete == text[: min(ends)]
            return
        begun = [length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])]
        assert given_out == text[: len(text) - max(begun)]


def test_characters_come_whole(tokenizer: ChatTokenizer) -> None:
    """The tiny tokenizer spells an emoji with four tokens. The emoji appears with the fourth token."""
    ids = tokenizer.encode("a😀é")
    assert len(ids) > 3
    stream = tokenizer.stream()
    pieces = [stream.feed((token,)) for token in ids]
    assert "".join(pieces) + stream.end() == "a😀é"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "".join(bytes(tokenizer.token(token).bytes).decode("latin-1") for token in ids) == "a😀é".encode().decode(
        "latin-1"
    )


@settings(max_examples=200)
@given(data=st.data())
def test_what_was_given_out_depends_on_the_tokens_alone(tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    """The text is the same in any pieces, also with invalid bytes, so that a resumed stream continues exactly."""
    ids = data.draw(st.lists(st.integers(0, 319), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    first, two = tokenizer.stream(), tokenizer.stream()
    by_one = "".join(first.feed((token,)) for token in ids[:cut])
    at_once = two.feed(ids[:cut])
    assert by_one == at_once
    assert by_one + first.feed(ids[cut:]) + first.end() == tokenizer.text_of(ids)


@given(data=st.data())
@settings(max_examples=200)
def test_bytes_that_are_no_characters_are_read_alike_in_any_portions(
    tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    spelled = {byte: character for character, byte in byte_level_table().items()}
    sampled = data.draw(st.lists(st.sampled_from(b"\x80\xe2\x82\xac\xf0\x9f\x98\xc3a"), min_size=1, max_size=80))
    ids = [number for byte in sampled if (number := tokenizer.token_id(spelled[byte])) is not None]
    stream = tokenizer.stream()
    one_by_one = "".join(stream.feed((token,)) for token in ids) + stream.end()
    assert one_by_one == tokenizer.text_of(ids) == bytes(sampled).decode("utf-8", "replace")


def test_bytes_that_are_no_characters_are_read_in_linear_time(tokenizer: ChatTokenizer) -> None:
    """A bias on the token of such a byte made each token cost as much as all before it: minutes for one answer."""
    spelled = {byte: character for character, byte in byte_level_table().items()}
    token = tokenizer.token_id(spelled[0x80])
    assert token is not None
    stream = tokenizer.stream()
    for _ in range(1000):
        stream.feed((token,))
        assert len(stream._open) <= 64
    assert stream.feed((token,)) + stream.end() != ""


def test_a_nul_that_was_sampled_reads_as_a_replacement_character(tokenizer: ChatTokenizer) -> None:
    """Messages and events cannot contain NUL characters. The tokens do not change."""
    ids = tokenizer.encode("a\0b")
    answer = AnswerParser(tokenizer, BOTH)
    for token in ids:
        answer.feed((token,))
    answer.end()
    assert (answer.message.content, answer.token_ids) == ("a\N{REPLACEMENT CHARACTER}b", ids)
    assert tokenizer.text_of(ids) == answer.message.content


def test_an_answer_keeps_every_token_whatever_is_read(tokenizer: ChatTokenizer) -> None:
    """Pitfall 3: tags, hidden tokens and the end of the turn are kept."""
    ids = [*tokenizer.encode(f"<think>hm</think>ok {CALL}"), *sorted(tokenizer.stop_ids)]
    answer = AnswerParser(tokenizer, BOTH)
    for token in ids:
        answer.feed((token,))
    answer.end()
    assert answer.token_ids == ids
    message = answer.message
    assert (message.reasoning_content, message.content) == ("hm", "ok")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"query": "a  b", "limit": 3}
    assert message.tool_calls[0].id.startswith("call_")


def test_a_stop_watch_tells_when_a_stop_string_is_complete(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("one two three")
    watch = StopWatch(tokenizer, ("two",))
    stopped = [watch(token) for token in ids]
    assert stopped.index(True) == len(tokenizer.encode("one two")) - 1
    resumed = StopWatch(tokenizer, ("two",))
    assert not resumed.replay(ids[: stopped.index(True)])
    assert resumed(ids[stopped.index(True)])


def test_token_texts_cover_special_and_byte_tokens(tokenizer: ChatTokenizer) -> None:
    end = tokenizer.eos_id
    assert end is not None
    assert tokenizer.token(end).text == "<|im_end|>"
    (space,) = tokenizer.encode(" ")[:1]
    assert tokenizer.token(space).bytes == [32]
    lone = next(token for token in tokenizer.encode("😀") if len(tokenizer.token(token).bytes) == 1)
    assert tokenizer.token(lone).text == "\N{REPLACEMENT CHARACTER}"

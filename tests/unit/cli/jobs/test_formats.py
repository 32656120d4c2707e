"""Tests of row formats: each format is parsed into the expected conversation, and invalid rows are refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_operations.jobs.formats import ROW_FORMATS, RowReader
from headrace_operations.jobs.sources import BadRow, DataRow
from headrace_schemas import Message

READER = RowReader({})
FEW = settings(max_examples=60)
Texts = list[tuple[str, str]]


def texts(messages: tuple[Message, ...]) -> Texts:
    return [(message.role, message.text) for message in messages]


def read(record: dict[str, Any], **options: Any) -> tuple[Texts, list[Texts]]:
    row = RowReader(options.pop("columns", {}), **options).read(record)
    return texts(row.prompt), [texts(answer) for answer in row.answers]


QUESTION, REPLY = ("user", "2 + 2?"), ("assistant", "4")


@pytest.mark.parametrize(
    ("record", "prompt", "answers"),
    [
        ({"prompt": "2 + 2?", "completion": "4"}, [QUESTION], [[REPLY]]),
        ({"question": "2 + 2?", "answer": "4"}, [QUESTION], [[REPLY]]),
        ({"instruction": "2 + 2?", "output": "4"}, [QUESTION], [[REPLY]]),
        ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, [("user", "Add.\n\n2 + 2")], [[REPLY]]),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, [QUESTION], [[REPLY]]),
        (
            {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]},
            [],
            [[QUESTION, REPLY]],
        ),
        (
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
            [],
            [[QUESTION, REPLY]],
        ),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, [QUESTION], [[REPLY], [("assistant", "5")]]),
        (
            {"prompt": [{"role": "user", "content": "2 + 2?"}], "completion": [{"role": "assistant", "content": "4"}]},
            [QUESTION],
            [[REPLY]],
        ),
        (
            {
                "chosen": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
                "rejected": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}],
            },
            [QUESTION],
            [[REPLY], [("assistant", "5")]],
        ),
        (
            {
                "prompt": "2 + 2?",
                "chosen": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
                "rejected": [{"role": "assistant", "content": "5"}],
            },
            [QUESTION],
            [[REPLY], [("assistant", "5")]],
        ),
        ({"prompt": "2 + 2?", "completion": "4", "system": "Add."}, [("system", "Add."), QUESTION], [[REPLY]]),
    ],
)  # fmt: skip
def test_each_row_format_is_read_as_a_conversation(record: dict[str, Any], prompt: Texts, answers: list[Texts]) -> None:
    assert read(record) == (prompt, answers)


def test_a_label_and_a_reward_are_read_and_no_reward_is_no_zero() -> None:
    row = READER.read({"prompt": "p", "completion": "c", "label": False})
    assert (row.label, row.reward) == (False, None)
    assert READER.read({"prompt": "p", "completion": "c", "reward": 0}).reward == 0.0
    assert READER.read({"prompt": "p", "completion": "c"}).reward is None
    for wrong in ("no", None, 2):
        record = {"prompt": "p", "completion": "c", "label": wrong}
        if wrong is None:
            assert READER.read(record).label is None, "a table gives every row every column"
        else:
            with pytest.raises(BadRow, match="label = "):
                READER.read(record)
    with pytest.raises(BadRow, match="reward = True: must be a finite number"):
        READER.read({"prompt": "p", "completion": "c", "reward": True})


def test_columns_are_renamed_by_options() -> None:
    columns = {"prompt": "frage", "completion": "antwort"}
    assert read({"frage": "2 + 2?", "antwort": "4", "answer": "x", "question": "y"}, columns=columns)[1] == [[REPLY]]
    with pytest.raises(BadRow, match=r"column 'frage' is missing; the row has q"):
        read({"q": "2 + 2?"}, columns=columns)


def test_a_format_can_be_named_and_unread_columns_are_reported() -> None:
    record = {"prompt": "p", "completion": "c", "chosen": "x", "rejected": "y", "id": 7}
    assert READER.read(record).answers[0][0].text == "x", "the form that needs the most columns"
    assert RowReader({}, "completion").read(record).answers[0][0].text == "c"
    assert READER.unread(record) == {"completion", "id"}
    with pytest.raises(BadRow, match="format labelled needs column 'label'"):
        RowReader({}, "labelled").read(record)
    with pytest.raises(BadRow, match="no format has the columns id, text"):
        READER.read({"id": 1, "text": "t"})


def test_all_forms_of_tool_calls_are_equal() -> None:
    arguments = {"query": "invoice"}
    nested = {"id": "a", "type": "function", "function": {"name": "search", "arguments": json.dumps(arguments)}}
    forms: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [nested]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": arguments}}]},
        {"role": "assistant", "tool_calls": [{"name": "search", "arguments": arguments}]},
        {"role": "assistant", "function_call": {"name": "search", "arguments": json.dumps(arguments)}},
        {"from": "function_call", "value": json.dumps({"name": "search", "arguments": arguments})},
    ]
    for form in forms:
        row = READER.read({"messages": [{"role": "user", "content": "?"}, form]})
        (call,) = row.answers[0][1].tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("search", arguments), form
        assert call.id


def test_tools_are_read_from_a_list_or_from_text() -> None:
    function = {"name": "search", "parameters": {"type": "object"}}
    for tools in ([{"type": "function", "function": function}], [function], json.dumps([function])):
        row = READER.read({"prompt": "p", "completion": "c", "tools": tools})
        assert [tool.function.name for tool in row.tools] == ["search"]
    assert READER.read({"prompt": "p", "completion": "c", "tools": ""}).tools == ()
    with pytest.raises(BadRow, match="tools: is not JSON"):
        READER.read({"prompt": "p", "completion": "c", "tools": "["})


def test_answers_with_the_weight_zero_are_context() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 1},
    ]
    assert READER.read({"messages": messages}).untrained == (1,)
    assert READER.read({"messages": messages, "system": "s"}).untrained == (2,), "counted from the prompt's first"


def test_unknown_message_fields_are_refused_unless_ignored() -> None:
    record = {"messages": [{"role": "user", "content": "a", "mood": "x"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(BadRow, match=r"messages, message 1: unknown field 'mood'; ignore it with --ignore mood"):
        READER.read(record)
    assert RowReader({}, ignored=frozenset({"mood"})).read(record).answers[0][0].text == "a"


_KEYS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "weight", "x"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)
_COLUMNS = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "chosen", "rejected", "label", "question", "answer",
     "instruction", "input", "output", "system", "tools", "reward", "id"]
)  # fmt: skip


@FEW
@given(st.dictionaries(_COLUMNS, JSON, max_size=6))
def test_any_row_is_read_or_refused_with_a_reason(record: dict[str, Any]) -> None:
    with contextlib.suppress(BadRow):
        row = READER.read(record)
        assert row.answers
        assert all(row.answers)
        assert len(row.digest) == 64


@FEW
@given(st.lists(st.text(min_size=1, max_size=20).filter(lambda text: "\0" not in text), min_size=2, max_size=2))
def test_a_conversation_has_the_same_digest_in_all_formats(texts_pair: list[str]) -> None:
    """The digest detects a duplicate row in any format."""
    question, answer = texts_pair
    rows = [
        READER.read({"prompt": question, "completion": answer}),
        READER.read({"question": question, "answer": answer}),
        READER.read({"instruction": question, "output": answer}) if question.strip() else None,
    ]
    valid_rows = [row for row in rows if row is not None]
    assert len({row.digest for row in valid_rows}) == 1
    chat = READER.read({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    assert chat.prompt_digest == valid_rows[0].prompt_digest


def test_row_formats_have_different_columns() -> None:
    formats = ROW_FORMATS.all()
    assert {"messages", "completion", "preference", "labelled", "sharegpt"} <= formats.keys()
    assert len({frozenset(row_format.columns) for row_format in formats.values()}) == len(formats), (
        "columns must differ"
    )
    assert isinstance(formats["messages"].read({"messages": [{"role": "user", "content": "x"}]}), DataRow)

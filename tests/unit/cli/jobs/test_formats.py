"""Tests of rows: data sources, and row formats that are parsed into the expected conversation or refused."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace_operations.evaluation.tasks import read as read_tasks
from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.formats import ROW_FORMATS, RowReader
from headrace_operations.jobs.sources import BadRow, DataRow, RowFile, find_files
from headrace_schemas import Message
from headrace_schemas.programs import WrittenBranch

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


def rows(path: Path) -> list[tuple[int, Any]]:
    return [(number, str(row) if isinstance(row, BadRow) else row) for number, row in RowFile(path).rows()]


def test_rows_have_the_numbers_of_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('﻿{"a": 1}\r\n\n[1]\n{"a"\n{"a": "ü"}'.encode() + b'\n{"a": "\xff"}\n')
    numbered_rows = rows(path)
    assert [number for number, _ in numbered_rows] == [1, 3, 4, 5, 6]
    assert [row for _, row in numbered_rows][0::3] == [{"a": 1}, {"a": "ü"}]
    assert numbered_rows[1][1] == "the line is not a JSON object"
    assert numbered_rows[2][1].startswith("the line is not JSON: ")
    assert numbered_rows[4][1].startswith("the line is not in UTF-8 (byte 0xff in line 6")
    assert RowFile(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_json_list_is_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, 2]')
    assert rows(path) == [(1, {"a": 1}), (2, "the row is not a JSON object")]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(UsageError, match=r"is not JSON.*must end in \.jsonl"):
        rows(path)
    path.write_text('{"a": 1}')
    with pytest.raises(UsageError, match="is not a JSON list of rows"):
        rows(path)


def test_folders_have_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has the splits test, train; choose one with --split"):
        find_files(tmp_path, None)
    assert [file.path.name for file in find_files(tmp_path, "train")] == [
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
    ]
    with pytest.raises(UsageError, match="has no split 'dev'; it has test, train"):
        find_files(tmp_path, "dev")


def test_folders_of_datasets_have_splits_as_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "data-00000-of-00001.arrow").write_bytes(b"")
        (tmp_path / split / "state.json").write_text("{}")
    assert [file.path.parent.name for file in find_files(tmp_path, "test")] == ["test"]


def test_rows_too_deep_or_with_half_a_surrogate_pair_are_refused_one_by_one(tmp_path: Path) -> None:
    deep = '{"messages": ' + "[" * 300 + "]" * 300 + "}"
    halves = '{"id": "a\\ud800", "question": "1?"}', '{"a": {"\\udc00": 1}}'
    pair, at_the_bound = '{"a": "\\ud83d\\ude00"}', '{"a": ' + "[" * 63 + "]" * 63 + "}"
    lines = [deep, *halves, pair, at_the_bound]
    for name, text in (("rows.jsonl", "\n".join(lines)), ("rows.json", f"[{','.join(lines)}]")):
        (tmp_path / name).write_text(text)
        found = [row for _, row in rows(tmp_path / name)]
        assert "more than 64 levels" in found[0]
        assert all("half of a surrogate pair" in row for row in found[1:3])
        assert found[3:] == [json.loads(pair), json.loads(at_the_bound)]
    with pytest.raises(UsageError, match=r"row 1: .*more than 64 levels"):
        read_tasks(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist"),
        ("rows.csv", r"unsupported suffix \.csv; .*\.jsonl"),
        ("empty", "contains no data"),
    ],
)
def test_sources_without_rows_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        find_files(tmp_path / name, None)


def test_parquet_and_arrow_require_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for suffix in ("parquet", "arrow"):
        path = tmp_path / f"rows.{suffix}"
        path.write_bytes(b"")
        with pytest.raises(
            UsageError, match=r"requires pyarrow; install it with pip install pyarrow, or write the data as JSON lines"
        ):
            rows(path)


def test_parquet_and_arrow_are_read_like_json(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="reading tables needs pyarrow, which is no dependency")
    parquet = importlib.import_module("pyarrow.parquet")
    expected_rows = [{"messages": [{"role": "user", "content": f"{n}"}], "n": n} for n in range(700)]
    table = pyarrow.Table.from_pylist(expected_rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as output,
    ):
        output.write_table(table)
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as output:
        output.write_table(table)
    for name in ("rows.parquet", "stream.arrow", "file.arrow"):
        assert rows(tmp_path / name) == list(enumerate(expected_rows, 1)), name
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UsageError, match="is not a Parquet file"):
        rows(tmp_path / "broken.parquet")


def test_a_date_outside_of_the_calendar_makes_its_row_invalid_and_no_other(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="reading tables needs pyarrow, which is no dependency")
    parquet = importlib.import_module("pyarrow.parquet")
    times = pyarrow.array([0, 2**40, 1], pyarrow.timestamp("s"))
    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "at": times}), tmp_path / "rows.parquet")
    read = rows(tmp_path / "rows.parquet")
    assert [number for number, _ in read] == [1, 2, 3]
    assert [row["n"] for _, row in (read[0], read[2])] == [1, 3]
    assert "a column cannot be read: date value out of range" in read[1][1]


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8)), max_size=8))
def test_json_lines_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, expected_rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in expected_rows))
    assert rows(path) == list(enumerate(expected_rows, 1))


def row(*answers: tuple[WrittenBranch, ...], number: int = 3, **fields: Any) -> CheckedRow:
    return CheckedRow(file="a" * 64, row=number, prompt="b" * 64, answers=answers, **fields)

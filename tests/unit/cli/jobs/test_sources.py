"""Tests of data sources and of the experiences that are built from their rows.

Files and folders give numbered rows; errors name the position of an invalid row. Experiences are valid for the trainer,
reproducible and unique.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace_operations.evaluation.tasks import read as read_tasks
from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.filling import experiences, row_order
from headrace_operations.jobs.sources import BadRow, RowFile, find_files
from headrace_schemas import Experience
from headrace_schemas.programs import WrittenBranch, WrittenSpan


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


TIME = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "m@0123456789abcdef"
SHORT_BRANCH = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=1),))
LONG_BRANCH = WrittenBranch(
    token_ids=(5, 6, 7, 8, 9, 4),
    spans=(WrittenSpan(start=1, length=2, message=1), WrittenSpan(start=4, length=2, message=3)),
)
LATER_BRANCH = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=5),))


def row(*answers: tuple[WrittenBranch, ...], number: int = 3, **fields: Any) -> CheckedRow:
    return CheckedRow(file="a" * 64, row=number, prompt="b" * 64, answers=answers, **fields)


def build_experiences(checked_row: CheckedRow, epoch: int = 0) -> list[Experience]:
    return list(experiences(checked_row, epoch, model="m", version=VERSION, time=TIME))


def test_an_answer_becomes_a_written_experience() -> None:
    (experience,) = build_experiences(row((LONG_BRANCH,)))
    assert (experience.origin, experience.reward, experience.no_reward) == ("written", None, "no_reward")
    assert (experience.weight, experience.preferences) == (1.0, ())
    assert experience.branch is not None
    assert experience.branch.loss_mask == (0, 1, 1, 0, 1, 1)
    assert {span.version for span in experience.branch.spans} == {VERSION}
    assert all(set(span.logprobs) == {0.0} for span in experience.branch.spans)
    assert len(set(experience.turn_ids)) == 2
    assert Experience.from_json(experience.to_json()) == experience


def test_a_row_without_reward_and_label_has_no_reward() -> None:
    assert build_experiences(row((SHORT_BRANCH,), reward=-0.5))[0].reward == -0.5
    assert [build_experiences(row((SHORT_BRANCH,), label=label))[0].reward for label in (True, False)] == [1.0, 0.0]
    for experience in build_experiences(row((SHORT_BRANCH,), (LONG_BRANCH,))):
        assert (experience.reward, experience.no_reward) == (None, "no_reward"), (
            "an answer of a preference has no reward"
        )


def test_the_answers_of_a_preference_share_its_id() -> None:
    chosen, rejected = build_experiences(
        row((SHORT_BRANCH,), (SHORT_BRANCH.model_copy(update={"token_ids": (5, 6, 7, 9)}),))
    )
    (chosen_side,), (rejected_side,) = chosen.preferences, rejected.preferences
    assert (chosen_side.side, rejected_side.side) == ("chosen", "rejected")
    assert chosen_side.preference_id == rejected_side.preference_id
    assert (chosen_side.turn_id, rejected_side.turn_id) == (chosen.turn_ids[0], rejected.turn_ids[0])
    assert chosen.experience_id != rejected.experience_id


def test_the_branches_of_an_answer_share_its_weight() -> None:
    branches = build_experiences(row((SHORT_BRANCH, LONG_BRANCH)))
    assert [experience.weight for experience in branches] == [0.5, 0.5]
    assert [experience.branch_index for experience in branches] == [0, 1]
    assert len({experience.trajectory_id for experience in branches}) == 1


def test_ids_are_reproducible_and_unique() -> None:
    rows = [
        row((SHORT_BRANCH,)),
        row((SHORT_BRANCH,), number=4),
        row((SHORT_BRANCH,), (LONG_BRANCH,), number=5),
        row((SHORT_BRANCH, LATER_BRANCH), number=6),
    ]
    all_experiences = [
        experience for epoch in range(3) for checked_row in rows for experience in build_experiences(checked_row, epoch)
    ]
    assert [
        experience.to_json()
        for epoch in range(3)
        for checked_row in rows
        for experience in build_experiences(checked_row, epoch)
    ] == [experience.to_json() for experience in all_experiences]
    assert len({experience.experience_id for experience in all_experiences}) == len(all_experiences)
    assert len({turn for experience in all_experiences for turn in experience.turn_ids}) == sum(
        len(experience.turn_ids) for experience in all_experiences
    )
    other_file = build_experiences(row((SHORT_BRANCH,)).model_copy(update={"file": "c" * 64}))
    assert other_file[0].experience_id not in {experience.experience_id for experience in all_experiences}, (
        "the digest of the file is part of the ids"
    )


def test_each_epoch_has_a_reproducible_order() -> None:
    assert row_order(50, 0, 7, shuffle=False) == list(range(50))
    orders = [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert row_order(50, 0, 8, shuffle=True) != orders[0]

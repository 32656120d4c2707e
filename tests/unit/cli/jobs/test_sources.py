"""Files and folders of rows: numbered rows, and messages with the position of invalid ones."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace_operations.jobs.rows import BadRow
from headrace_operations.jobs.sources import RowFile, find_files


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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8)), max_size=8))
def test_json_lines_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, expected_rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in expected_rows))
    assert rows(path) == list(enumerate(expected_rows, 1))

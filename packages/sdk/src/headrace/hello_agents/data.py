"""Data sets of the tool: registered ones, files and folders, and `gsm8k` through the package datasets."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from headrace.errors import UsageError
from headrace.practice.data_sets import check_rows, rows_of

FORMATS = ("sft", "rl")
_NAMES = {"gsm8k": ("openai/gsm8k", "main")}
_ASKED = ("question", "prompt", "problem")
_SAID = ("completion", "answer", "full_answer", "ground_truth")


def load(
    dataset: str, known: Mapping[str, Any], form: str, split: str, samples: int | None = None
) -> list[dict[str, Any]]:
    """So many rows in the tool's columns. Raises `UsageError` for rows that cannot be used."""
    if form not in FORMATS:
        raise UsageError(f"format {form!r}: it is one of {', '.join(FORMATS)}")
    if dataset in known:
        found = [dict(row) for row in known[dataset]]
    else:
        path, name = _NAMES.get(dataset, (dataset, None))
        found = rows_of(SimpleNamespace(path=path, name=name, split=split))
    rows = [_row(row, form) for row in found[:samples]]
    check_rows(rows)
    return rows


def _row(row: Mapping[str, Any], form: str) -> dict[str, Any]:
    asked = next((row[name] for name in _ASKED if row.get(name) is not None), None)
    said = next((row[name] for name in _SAID if row.get(name) is not None), None)
    if asked is None or said is None:
        raise UsageError(f"a row has the columns {', '.join(map(str, row))}; a question and an answer are wanted")
    if form == "sft":
        return {"prompt": str(asked), "completion": str(said), "text": f"{asked}\n{said}"}
    truth = row.get("ground_truth", str(said).rpartition("####")[2].strip())
    return {"prompt": str(asked), "ground_truth": str(truth), "question": str(asked), "full_answer": str(said)}

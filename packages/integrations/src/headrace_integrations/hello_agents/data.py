"""Data sets of the training tool: registered data sets, files, folders, and `gsm8k` through the package datasets."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.data_sets import check_rows, rows_of

FORMATS = ("sft", "rl")
_NAMES = {"gsm8k": ("openai/gsm8k", "main")}
_QUESTION_COLUMNS = ("question", "prompt", "problem")
_ANSWER_COLUMNS = ("completion", "answer", "full_answer", "ground_truth")


def load(
    dataset: str, registered: Mapping[str, Any], form: str, split: str, samples: int | None = None
) -> list[dict[str, Any]]:
    """Return up to `samples` rows in the columns of the tool. Raises `UsageError` for invalid rows."""
    if form not in FORMATS:
        raise UsageError(f"format = {form!r}: must be one of {', '.join(FORMATS)}")
    if dataset in registered:
        rows_of_dataset = [dict(row) for row in registered[dataset]]
    else:
        path, name = _NAMES.get(dataset, (dataset, None))
        rows_of_dataset = rows_of(SimpleNamespace(path=path, name=name, split=split))
    rows = [_row(row, form) for row in rows_of_dataset[:samples]]
    check_rows(rows)
    return rows


def _row(row: Mapping[str, Any], form: str) -> dict[str, Any]:
    question = next((row[name] for name in _QUESTION_COLUMNS if row.get(name) is not None), None)
    answer = next((row[name] for name in _ANSWER_COLUMNS if row.get(name) is not None), None)
    if question is None or answer is None:
        raise UsageError(
            f"a row has the columns {', '.join(map(str, row))}: "
            f"must have one of {', '.join(_QUESTION_COLUMNS)} and one of "
            f"{', '.join(_ANSWER_COLUMNS)}"
        )
    if form == "sft":
        return {"prompt": str(question), "completion": str(answer), "text": f"{question}\n{answer}"}
    truth = row.get("ground_truth", str(answer).rpartition("####")[2].strip())
    return {"prompt": str(question), "ground_truth": str(truth), "question": str(question), "full_answer": str(answer)}

"""Rows of a data set: a file, a folder with `<split>.jsonl`, or a data set that the package datasets loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.arguments import check_unchanged
from headrace_schemas.values.text import printable, read_user_text

_SUFFIXES = (".jsonl", ".json")
_PROBLEMS_MAX = 5


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    """Return the rows of a data set, which is described by the attributes `path`, `split` and `name`.

    Raises:
        UsageError: there are no rows, or a split or name is given for rows in a single file.
    """
    path, split = Path(dataset.path), dataset.split or "train"
    files = [path] if path.is_file() else [path / f"{split}{suffix}" for suffix in _SUFFIXES]
    file = next((candidate for candidate in files if candidate.is_file()), None)
    if file is not None and dataset.name is not None:
        raise UsageError(f"name = {printable(repr(dataset.name))}: {file} has no named parts; leave name out")
    if path.is_file() and split not in ("train", path.stem):
        raise UsageError(
            f"split = {printable(repr(split))}: {file} is one file; set path to its folder, or leave split out"
        )
    rows = _read(file) if file else _load(dataset, split)
    if not rows:
        raise UsageError(f"data set {dataset.path}, split {split}: has no rows")
    return rows


def check_schedule(dataset: Any, argument: str) -> None:
    """Raise `UsageError` if a data set that is not trained on sets epochs or steps.

    `argument` names it in the message.
    """
    reason = f"{argument} is read once; leave it out"
    check_unchanged(dataset, {"total_epochs": (1, reason), "total_steps": (None, reason)})


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check rows before training for empty texts and duplicates. Raises `UsageError` that lists the first problems."""
    problems: list[str] = []
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for number, row in enumerate(rows, 1):
        empty = [name for name, value in row.items() if not str(value if value is not None else "").strip()]
        key = tuple(sorted((name, str(value)) for name, value in row.items()))
        if empty:
            problems.append(f"row {number}: {empty[0]} is empty")
        elif key in seen:
            problems.append(f"row {number}: duplicates row {seen[key]}")
        seen.setdefault(key, number)
    if not seen:
        raise UsageError("the data set has no rows")
    if problems:
        more = f", and {len(problems) - _PROBLEMS_MAX} more" if len(problems) > _PROBLEMS_MAX else ""
        raise UsageError(f"{'; '.join(problems[:_PROBLEMS_MAX])}{more}")


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        text = read_user_text(file)
    except ValueError as error:
        raise UsageError(f"{file} {error}") from None
    try:
        rows = (
            json.loads(text)
            if file.suffix == ".json"
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: {error}; each row must be a JSON object") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{file}: each row must be a JSON object")
    return rows


def _load(dataset: Any, split: str) -> list[dict[str, Any]]:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise UsageError(
            f"data set {dataset.path}: has no {split}.jsonl; add it, or install the package datasets for other formats"
        ) from None
    return [dict(row) for row in datasets.load_dataset(dataset.path, name=dataset.name, split=split)]

"""The rows of a data set: a file, a folder with `<split>.jsonl`, or whatever the user's package datasets loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import check_unchanged
from headrace_schemas.text import printable
from headrace_schemas.user_text import read_user_text

_SUFFIXES = (".jsonl", ".json")
_SHOWN_MAX = 5


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    """The rows of what has `path`, `split` and `name`. Raises `UsageError` for none, and for a split or name of rows
    that lie in one file."""
    path, split = Path(dataset.path), dataset.split or "train"
    files = [path] if path.is_file() else [path / f"{split}{suffix}" for suffix in _SUFFIXES]
    file = next((one for one in files if one.is_file()), None)
    if file is not None and dataset.name is not None:
        raise UsageError(f"name = {printable(repr(dataset.name))}: {file} has no parts with names; leave it out")
    if path.is_file() and split not in ("train", path.stem):
        raise UsageError(
            f"split = {printable(repr(split))}: {file} is one file; name its folder as path, or leave it out"
        )
    found = _read(file) if file else _loaded(dataset, split)
    if not found:
        raise UsageError(f"data set {dataset.path}, split {split}: it has no rows")
    return found


def check_schedule(dataset: Any, argument: str) -> None:
    """Raise `UsageError` for epochs or steps of a data set that nothing is trained on."""
    reason = f"{argument} is gone through once; leave it out"
    check_unchanged(dataset, {"total_epochs": (1, reason), "total_steps": (None, reason)})


def check_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """What is to be looked at before training: rows without a text, and rows that are there twice. Raises `UsageError`
    that names the first of them."""
    problems: list[str] = []
    seen: dict[tuple[tuple[str, str], ...], int] = {}
    for place, row in enumerate(rows, 1):
        empty = [name for name, value in row.items() if not str(value if value is not None else "").strip()]
        key = tuple(sorted((name, str(value)) for name, value in row.items()))
        if empty:
            problems.append(f"row {place}: {empty[0]} is empty")
        elif key in seen:
            problems.append(f"row {place} is row {seen[key]} again")
        seen.setdefault(key, place)
    if not seen:
        raise UsageError("the data set has no rows")
    if problems:
        more = f", and {len(problems) - _SHOWN_MAX} more" if len(problems) > _SHOWN_MAX else ""
        raise UsageError(f"{'; '.join(problems[:_SHOWN_MAX])}{more}")


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        text = read_user_text(file)
    except ValueError as error:
        raise UsageError(f"{file} {error}") from None
    try:
        found = (
            json.loads(text)
            if file.suffix == ".json"
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: {error}; each row is a JSON object") from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UsageError(f"{file}: each row is a JSON object")
    return found


def _loaded(dataset: Any, split: str) -> list[dict[str, Any]]:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise UsageError(
            f"data set {dataset.path}: there is no {split}.jsonl in it; for other forms install the package datasets"
        ) from None
    return [dict(row) for row in datasets.load_dataset(dataset.path, name=dataset.name, split=split)]

"""The rows of a data set: a file, a folder with `<split>.jsonl`, or whatever the user's package datasets loads."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

_SUFFIXES = (".jsonl", ".json")


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    """The rows of what has `path`, `split` and `name`. Raises `UsageError` for none."""
    path, split = Path(dataset.path), dataset.split or "train"
    files = [path] if path.is_file() else [path / f"{split}{suffix}" for suffix in _SUFFIXES]
    file = next((one for one in files if one.is_file()), None)
    found = _read(file) if file else _loaded(dataset, split)
    if not found:
        raise UsageError(f"data set {dataset.path}, split {split}: it has no rows")
    return found


def _read(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
    try:
        found = (
            json.loads(text)
            if file.suffix == ".json"
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except ValueError as error:
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

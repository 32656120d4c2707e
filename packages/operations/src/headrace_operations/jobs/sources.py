"""The files that rows come from: JSON lines, a JSON list, or a folder of Hugging Face `datasets`.

JSON needs nothing. Parquet and Arrow need `pyarrow`, which is only imported for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.jobs.rows import BadRow
from headrace_schemas.user_text import decode_text, is_utf_16, read_user_text

_CHUNK_BYTES = 1 << 20
_LINE_BYTES_MAX = 64 << 20
_LIST_BYTES_MAX = 2 << 30
_SPLIT_MARKS = ("-", "_", ".")
RawRow = tuple[int, dict[str, Any] | BadRow]
"""Its number in the file, from 1 on, and its columns or why it has none."""


@dataclass(frozen=True)
class RowFile:
    """One file. Rows have the numbers of their lines, in tables those of their order."""

    path: Path

    @cached_property
    def sha256(self) -> str:
        """Of its bytes: what its rows are named by. Reads the file."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def rows(self) -> Iterator[RawRow]:
        """In order. Raises `UsageError` for a file that is none of its kind."""
        if self.path.suffix not in _READERS:
            raise UsageError(f"{self.path}: what ends in {self.path.suffix or 'nothing'} is not read; {_known()}")
        return _READERS[self.path.suffix](self.path)


def files_of(source: Path, split: str | None) -> tuple[RowFile, ...]:
    """The files behind a path, in a fixed order. Raises `UsageError` when there is none, or when a folder has several
    splits and nobody has chosen."""
    if source.is_file():
        if source.suffix not in _READERS:
            raise UsageError(f"{source}: what ends in {source.suffix or 'nothing'} is not read; {_known()}")
        return (RowFile(source),)
    if not source.is_dir():
        raise UsageError(f"{source} does not exist")
    paths = sorted(path for path in source.rglob("*") if path.suffix in _READERS and not _is_metadata(path))
    if not paths:
        raise UsageError(f"{source} holds no data; {_known()}")
    by_split: dict[str, list[Path]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path, source), []).append(path)
    if split is not None and split not in by_split:
        raise UsageError(f"{source} has no split {split!r}; it has {', '.join(sorted(by_split))}")
    if split is None and len(by_split) > 1:
        raise UsageError(f"{source} has the splits {', '.join(sorted(by_split))}; choose one with --split")
    return tuple(RowFile(path) for path in by_split[split or next(iter(by_split))])


def _known() -> str:
    return f"name a file or a folder with files that end in {', '.join(_READERS)}"


def _is_metadata(path: Path) -> bool:
    """What `datasets` writes beside the data; its caches too."""
    return path.name in ("dataset_info.json", "state.json", "dataset_dict.json") or path.name.startswith("cache-")


def _split_of(path: Path, folder: Path) -> str:
    """`train/data-00000-of-00001.arrow` and `data/train-00000-of-00001.parquet` are both of the split train."""
    stem = path.stem
    name = min((stem.partition(mark)[0] for mark in _SPLIT_MARKS), key=len)
    parent = path.parent.relative_to(folder).parts
    return parent[-1] if name in ("data", "part") and parent else name


def _json_lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LINE_BYTES_MAX + 1):
            number += 1
            if len(line) > _LINE_BYTES_MAX:
                raise UsageError(f"{path}, line {number}: longer than {_LINE_BYTES_MAX} bytes")
            if number == 1 and is_utf_16(line):
                raise UsageError(f"{path} is in UTF-16; save it as UTF-8")
            if line.strip():
                yield number, _object(line, number)


def _object(line: bytes, number: int) -> dict[str, Any] | BadRow:
    try:
        text = decode_text(line, number)
    except ValueError as error:
        return BadRow("json", f"the line {error}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow("json", f"the line is no JSON: {error}")
    return found if isinstance(found, dict) else BadRow("json", "the line is no JSON object")


def _json_list(path: Path) -> Iterator[RawRow]:
    if path.stat().st_size > _LIST_BYTES_MAX:
        raise UsageError(f"{path} is larger than {_LIST_BYTES_MAX} bytes; write it as JSON lines")
    try:
        text = read_user_text(path)
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}; lines of JSON belong into a file that ends in .jsonl") from None
    if not isinstance(found, list):
        raise UsageError(f"{path} is no JSON list of rows")
    for number, one in enumerate(found, 1):
        yield number, one if isinstance(one, dict) else BadRow("json", "it is no JSON object")


def _parquet(path: Path) -> Iterator[RawRow]:
    from headrace_operations.jobs import columnar

    return columnar.parquet(path)


def _arrow(path: Path) -> Iterator[RawRow]:
    from headrace_operations.jobs import columnar

    return columnar.arrow(path)


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
    ".arrow": _arrow,
}

"""Files of rows: JSON lines, a JSON list, or a folder of Hugging Face `datasets`.

Parquet and Arrow files need `pyarrow`, which is imported only for them.
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
from headrace_schemas.values.text import decode_text, is_utf_16, read_user_text

_CHUNK_BYTES = 1 << 20
_LINE_BYTES_MAX = 64 << 20
_LIST_BYTES_MAX = 2 << 30
_SPLIT_MARKS = ("-", "_", ".")
RawRow = tuple[int, dict[str, Any] | BadRow]
"""Row number, starting at 1, and the columns of the row or the reason why it is invalid."""


@dataclass(frozen=True)
class RowFile:
    """One file of rows. Rows are numbered by line, in Parquet and Arrow files by order."""

    path: Path

    @cached_property
    def sha256(self) -> str:
        """Digest of the file, from which the ids of its rows are derived. The first access reads the file."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows in order.

        Raises:
            UsageError: the file does not have the format of its suffix.
        """
        if self.path.suffix not in _READERS:
            raise UsageError(f"{self.path}: unsupported suffix {self.path.suffix or '(none)'}; {_supported_suffixes()}")
        return _READERS[self.path.suffix](self.path)


def find_files(source: Path, split: str | None) -> tuple[RowFile, ...]:
    """Return the files of a path in a fixed order.

    Args:
        source: a file or a folder.
        split: split of the folder to use; None if it has only one.

    Raises:
        UsageError: there is no file, or the folder has several splits and `split` is None.
    """
    if source.is_file():
        if source.suffix not in _READERS:
            raise UsageError(f"{source}: unsupported suffix {source.suffix or '(none)'}; {_supported_suffixes()}")
        return (RowFile(source),)
    if not source.is_dir():
        raise UsageError(f"{source}: does not exist")
    paths = sorted(path for path in source.rglob("*") if path.suffix in _READERS and not _is_metadata(path))
    if not paths:
        raise UsageError(f"{source}: contains no data; {_supported_suffixes()}")
    by_split: dict[str, list[Path]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path, source), []).append(path)
    if split is not None and split not in by_split:
        raise UsageError(f"{source}: has no split {split!r}; it has {', '.join(sorted(by_split))}")
    if split is None and len(by_split) > 1:
        raise UsageError(f"{source}: has the splits {', '.join(sorted(by_split))}; choose one with --split")
    return tuple(RowFile(path) for path in by_split[split or next(iter(by_split))])


def _supported_suffixes() -> str:
    return f"name a file or a folder with files that end in {', '.join(_READERS)}"


def _is_metadata(path: Path) -> bool:
    """Return whether `path` is metadata or a cache of `datasets`."""
    return path.name in ("dataset_info.json", "state.json", "dataset_dict.json") or path.name.startswith("cache-")


def _split_of(path: Path, folder: Path) -> str:
    """Return the split of a file.

    `train/data-00000-of-00001.arrow` and `data/train-00000-of-00001.parquet` are both of the split train.
    """
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
                raise UsageError(f"{path}, line {number}: is longer than {_LINE_BYTES_MAX} bytes")
            if number == 1 and is_utf_16(line):
                raise UsageError(f"{path} is in UTF-16; save it as UTF-8")
            if line.strip():
                yield number, _parse_line(line, number)


def _parse_line(line: bytes, number: int) -> dict[str, Any] | BadRow:
    try:
        text = decode_text(line, number)
    except ValueError as error:
        return BadRow("json", f"the line {error}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow("json", f"the line is not JSON: {error}")
    return value if isinstance(value, dict) else BadRow("json", "the line is not a JSON object")


def _json_list(path: Path) -> Iterator[RawRow]:
    if path.stat().st_size > _LIST_BYTES_MAX:
        raise UsageError(f"{path}: is larger than {_LIST_BYTES_MAX} bytes; write it as JSON lines")
    try:
        text = read_user_text(path)
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}; a file of JSON lines must end in .jsonl") from None
    if not isinstance(values, list):
        raise UsageError(f"{path}: is not a JSON list of rows")
    for number, row in enumerate(values, 1):
        yield number, row if isinstance(row, dict) else BadRow("json", "the row is not a JSON object")


def _parquet(path: Path) -> Iterator[RawRow]:
    from headrace_operations.jobs import columnar

    return columnar.read_parquet(path)


def _arrow(path: Path) -> Iterator[RawRow]:
    from headrace_operations.jobs import columnar

    return columnar.read_arrow(path)


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
    ".arrow": _arrow,
}

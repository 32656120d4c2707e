"""Rows and the files that contain them: JSON lines, a JSON list, Parquet, Arrow, or a folder of Hugging Face
`datasets`.

Parquet and Arrow files need `pyarrow`, which is imported only for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace_schemas import Message, Tool
from headrace_schemas.values.bounds import JSON_DEPTH_MAX
from headrace_schemas.values.text import decode_text, has_surrogates, is_utf_16, read_user_text

_CHUNK_BYTES = 1 << 20
_LINE_BYTES_MAX = 64 << 20
_LIST_BYTES_MAX = 2 << 30
_SPLIT_MARKS = ("-", "_", ".")
_BATCH_ROWS = 256


class BadRow(HeadraceError):
    """Error of a row that cannot be trained. `kind` is a stable name of the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class DataRow:
    """Row of a data set. Each of `answers` continues `prompt`; the first of two answers is the preferred one."""

    prompt: tuple[Message, ...]
    answers: tuple[tuple[Message, ...], ...]
    tools: tuple[Tool, ...] = ()
    untrained: tuple[int, ...] = ()
    """Positions of answers that are context only, counted from the first message of the prompt."""
    label: bool | None = None
    """Whether the answer is good; None if the row has no label."""
    reward: float | None = None

    @property
    def digest(self) -> str:
        """Digest of the row's prompt, answers and tools, by which duplicates are recognized."""
        return _digest(self.prompt, *self.answers, self.tools)

    @property
    def prompt_digest(self) -> str:
        """Digest of the row's prompt and tools, by which rows with the same prompt are recognized.

        If the row has no prompt, the messages before its first answer count as the prompt.
        """
        first = self.answers[0]
        question = first if self.prompt else first[: next((n for n, m in enumerate(first) if m.role == "assistant"), 0)]
        return _digest(self.prompt or question, self.tools)


def _digest(*parts: tuple[Message, ...] | tuple[Tool, ...]) -> str:
    plain = [[entry.model_dump(mode="json", exclude_none=True) for entry in part] for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


RawRow = tuple[int, dict[str, Any] | BadRow]
"""Row number, starting at 1, and the columns of the row or the reason why it is invalid."""


@dataclass(frozen=True)
class RowFile:
    """File of rows. Rows are numbered by line, or by their order in Parquet and Arrow files."""

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
    """Return the name of the split that a file belongs to, from its folder or its name.

    `train/data-00000-of-00001.arrow` and `data/train-00000-of-00001.parquet` both belong to the split `train`.
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
    return _check_row(value, "line")


def _check_row(value: object, noun: str) -> dict[str, Any] | BadRow:
    """Return a parsed row, or the reason why it cannot be used, in which it is called `noun`."""
    if not isinstance(value, dict):
        return BadRow("json", f"the {noun} is not a JSON object")
    level: list[Any] = [value]
    for _ in range(JSON_DEPTH_MAX + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str) and has_surrogates(item):
                return BadRow("json", f"the {noun} has half of a surrogate pair in a text; write the whole character")
            if isinstance(item, dict):
                inner += item
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return value
        level = inner
    return BadRow("json", f"the {noun} has more than {JSON_DEPTH_MAX} levels of objects and lists")


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
        yield number, _check_row(row, "row")


def _parquet(path: Path) -> Iterator[RawRow]:

    return read_parquet(path)


def _arrow(path: Path) -> Iterator[RawRow]:

    return read_arrow(path)


_READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield the rows of a Parquet file.

    Raises:
        UsageError: `pyarrow` is not installed, or the file is not Parquet.
    """
    library, tables = _library(path), _library(path, "pyarrow.parquet")
    try:
        yield from _enumerate_rows(tables.ParquetFile(path).iter_batches(batch_size=_BATCH_ROWS))
    except (library.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is not a Parquet file: {error}") from None


def read_arrow(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield the rows of an Arrow file or of an Arrow stream, which `datasets` writes.

    Raises:
        UsageError: `pyarrow` is not installed, or the file is not Arrow.
    """
    library, ipc = _library(path), _library(path, "pyarrow.ipc")
    try:
        with library.memory_map(str(path)) as mapped:
            try:
                batches: Iterable[Any] = ipc.open_stream(mapped)
            except library.ArrowInvalid:
                file = ipc.open_file(mapped)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            yield from _enumerate_rows(batches)
    except (library.ArrowException, OSError) as error:
        raise UsageError(f"{path}: is not an Arrow file: {error}") from None


def _enumerate_rows(batches: Iterable[Any]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    number = 0
    for batch in batches:
        for row in _batch_rows(batch):
            number += 1
            yield number, row


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    """Yield the rows of an Arrow batch.

    A row with a value that Python cannot represent, such as a date in the year 20000, becomes a `BadRow`; the other
    rows are not affected.
    """
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            yield BadRow("format", f"a column cannot be read: {error}; change the value, or leave the column out")
            return
    else:
        yield from rows
        return
    for position in range(batch.num_rows):
        yield from _batch_rows(batch.slice(position, 1))


def _library(path: Path, name: str = "pyarrow") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"{path}: requires pyarrow; install it with pip install pyarrow, or write the data as JSON lines"
        ) from None

"""Parquet and Arrow, as Hugging Face's `datasets` and hub keep them. Needs `pyarrow`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.jobs.rows import BadRow

_ROWS_AT_ONCE = 256


def parquet(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Raises `UsageError` without `pyarrow`, and for a file that is no Parquet."""
    library, tables = _library(path), _library(path, "pyarrow.parquet")
    try:
        yield from _numbered(tables.ParquetFile(path).iter_batches(batch_size=_ROWS_AT_ONCE))
    except (library.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no Parquet file: {error}") from None


def arrow(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """A stream, as `datasets` writes it, or a file. Raises `UsageError` likewise."""
    library, ipc = _library(path), _library(path, "pyarrow.ipc")
    try:
        with library.memory_map(str(path)) as mapped:
            try:
                batches: Iterable[Any] = ipc.open_stream(mapped)
            except library.ArrowInvalid:
                file = ipc.open_file(mapped)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            yield from _numbered(batches)
    except (library.ArrowException, OSError) as error:
        raise UsageError(f"{path} is no Arrow file: {error}") from None


def _numbered(batches: Iterable[Any]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _library(path: Path, name: str = "pyarrow") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"{path}: reading it needs pyarrow: pip install pyarrow; or write the data as JSON lines"
        ) from None

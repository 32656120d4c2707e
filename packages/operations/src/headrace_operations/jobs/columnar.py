"""Readers of Parquet and Arrow files, the formats of Hugging Face `datasets`. They need `pyarrow`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.jobs.rows import BadRow

_BATCH_ROWS = 256


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
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _library(path: Path, name: str = "pyarrow") -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(
            f"{path}: requires pyarrow; install it with pip install pyarrow, or write the data as JSON lines"
        ) from None

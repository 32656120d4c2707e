"""Atomic replacement of small files: readers see either the old or the new content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def replace(path: Path, data: bytes, *, opener: Callable[[str, int], int] | None = None) -> None:
    """Replace the content of `path` by `data` atomically. Only one process may write a path.

    A power failure may undo the replacement. If the write fails, the temporary file is removed.

    Args:
        path: the file.
        data: the new content.
        opener: as in `open`, for example `private_files.owner_alone`.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb", opener=opener) as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

"""Replaces a small file atomically: readers see the old content or the new one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def replace(path: Path, data: bytes, *, opener: Callable[[str, int], int] | None = None) -> None:
    """Whoever reads sees all of `data` or none. One process writes a path. A power cut may take it back.

    `opener` as in `open`: see `private_files.owner_alone`. Raises `OSError`, and leaves no half of a draft.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb", opener=opener) as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

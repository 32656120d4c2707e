"""A small file that is there as it was or as it is now, never half written."""

from __future__ import annotations

from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Whoever reads sees all of `data` or none. One process writes a path. A power cut may take
    it back."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(data)
    draft.replace(path)

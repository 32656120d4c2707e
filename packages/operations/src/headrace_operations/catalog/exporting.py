"""Writes a version's files where transformers, PEFT or vLLM load them, each checked against its digest."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import UsageError
from headrace.topics import fetch
from headrace_schemas.blobs import BlobRef
from headrace_schemas.importing import MANIFEST_FILE
from headrace_schemas.manifest import Manifest


def manifest_of(ref: BlobRef) -> Manifest:
    """Raises `HeadraceError` when the blob does not hash to its name."""
    return Manifest.model_validate_json(fetch(ref), extra="ignore")


def file_of(manifest: Manifest, path: str) -> bytes:
    """One file of a version. Raises `HeadraceError` when it does not hash to its name."""
    return fetch(next(file.blob for file in manifest.files if file.path == path))


def check_empty(folder: Path) -> None:
    """Raises `UsageError` for a folder that holds something: what is there would be part of the model."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty; name a new folder")


def export(manifest: Manifest, folder: Path) -> int:
    """The version's own files, and its manifest, with which `import` makes the very same version of them. Returns how
    many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    size_bytes = 0
    for file in manifest.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        size_bytes += path.write_bytes(fetch(file.blob))
    (folder / MANIFEST_FILE).write_bytes(manifest.canonical_json())
    return size_bytes

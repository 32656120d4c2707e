"""Export of a version's files to a folder that transformers, PEFT or vLLM can load; each digest is checked."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import UsageError
from headrace.topics import fetch
from headrace_schemas.programs.models import MANIFEST_FILE
from headrace_schemas.values.blobs import BlobRef, Manifest


def fetch_manifest(ref: BlobRef) -> Manifest:
    """Fetch a manifest.

    Raises:
        HeadraceError: the digest of the blob differs.
    """
    return Manifest.model_validate_json(fetch(ref), extra="ignore")


def fetch_file(manifest: Manifest, path: str) -> bytes:
    """Fetch one file of a version.

    Raises:
        HeadraceError: the digest of the file differs.
    """
    return fetch(next(file.blob for file in manifest.files if file.path == path))


def check_empty(folder: Path) -> None:
    """Check that the folder is empty or missing, because other files in it would become part of the model.

    Raises:
        UsageError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is not empty; name a new folder")


def export(manifest: Manifest, folder: Path) -> int:
    """Write the files of the version and its manifest, from which `import` creates the same version again.

    Returns:
        The size of the files in bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size_bytes = 0
    for file in manifest.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        size_bytes += path.write_bytes(fetch(file.blob))
    (folder / MANIFEST_FILE).write_bytes(manifest.canonical_json())
    return size_bytes

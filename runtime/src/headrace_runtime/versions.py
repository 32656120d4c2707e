"""Versions in and out of the blob store: a folder of model files becomes an immutable version and the other way round.

No torch here: what the weights answer (the fingerprint) is computed by the caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from headrace_runtime import disk
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import CorruptBlob
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Fingerprint, Manifest

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def model_files(folder: Path) -> list[Path]:
    """What of `folder` belongs in a version: weights, configuration, tokenizer, template; sorted by name."""
    found = {path for pattern in _WANTED for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, of nothing when it does not exist (a model without a chat template)."""
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()


def store(
    blobs: BlobStore,
    folder: Path,
    *,
    name: str,
    lineage: str,
    step: int,
    fingerprint: Fingerprint,
    parent: str | None = None,
    base: str | None = None,
    tokenizer: Path | None = None,
) -> tuple[Manifest, BlobRef]:
    """Put every file of `folder` and the manifest into the store. Blocks; equal content gives the same version.

    `base` makes it a LoRA version; `tokenizer` is then the folder with the tokenizer, which an adapter lacks.
    Raises `ValueError` when a file may hold a pickle.
    """
    source = tokenizer or folder
    manifest = Manifest(
        name=name,
        lineage=lineage,
        step=step,
        parent=parent,
        kind="lora" if base else "full",
        base=base,
        files=tuple(File(path=path.name, blob=blobs.put(path.read_bytes())) for path in model_files(folder)),
        fingerprint=fingerprint,
        tokenizer_sha256=file_digest(source / TOKENIZER_FILE),
        template_sha256=file_digest(source / TEMPLATE_FILE),
    )
    return manifest, blobs.put(manifest.canonical_json())


def read_manifest(blobs: BlobStore, ref: BlobRef) -> Manifest:
    """Raises `CorruptBlob` when the bytes are not the manifest that `ref` names."""
    try:
        return Manifest.model_validate_json(blobs.get(ref), extra="ignore")
    except ValidationError as error:
        raise CorruptBlob(f"blob {ref.sha256} is no manifest: {error.error_count()} errors") from None


class VersionCache:
    """Versions as folders on this machine, each file checked against its digest on the way in (P7)."""

    def __init__(self, blobs: BlobStore, folder: Path) -> None:
        self._blobs = blobs
        self._folder = folder

    async def fetch(self, ref: BlobRef) -> tuple[Manifest, Path]:
        """The manifest and a folder with all its files, or `CorruptBlob` or `Unavailable` and nothing half done."""
        return await asyncio.to_thread(self._fetch, ref)

    def keep_only(self, versions: Iterable[str]) -> None:
        """Remove the folders of all other versions."""
        wanted = set(versions)
        for path in self._folder.glob("*@*"):
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, ref: BlobRef) -> tuple[Manifest, Path]:
        manifest = read_manifest(self._blobs, ref)
        target = self._folder / manifest.version
        if not target.exists():
            draft = self._folder / f".{uuid.uuid4().hex}"
            try:
                for file in manifest.files:
                    path = draft / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self._blobs.get(file.blob))
                draft.rename(target)
            except OSError as error:
                if disk.is_full(error):
                    raise disk.no_room(self._folder) from error
                if not target.exists():  # another process may have been faster
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self._verify(manifest, target)
        return manifest, target

    @staticmethod
    def _verify(manifest: Manifest, folder: Path) -> None:
        for file in manifest.files:
            if file_digest(folder / file.path) != file.blob.sha256:
                shutil.rmtree(folder, ignore_errors=True)
                raise CorruptBlob(
                    f"{manifest.version}: {file.path} in the local cache differs from its digest; removed"
                )

"""Immutable versions of models: stores a folder of model files as a version in the blob store, and copies a version
into a folder.

This module does not import torch. The caller computes the fingerprint of the weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Mapping
from math import gcd
from pathlib import Path

from pydantic import ValidationError

from headrace_runtime.errors import CorruptBlob
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore, digest_of
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest

FINGERPRINT_TOKENS = 48
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_PROCESSOR_TEMPLATE = "chat_template.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
FILE_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", f"{_MORE_TEMPLATES}/*.jinja")


def fingerprint_tokens(vocabulary: int) -> tuple[int, ...]:
    """Return the token ids with which a fingerprint is computed. They depend only on the size of the vocabulary.

    The ids are a walk through the vocabulary with a stride that is coprime to its size.
    """
    stride = next(candidate for candidate in range(vocabulary * 5 // 8, 0, -1) if gcd(candidate, vocabulary) == 1)
    return tuple((17 + index * stride) % vocabulary for index in range(FINGERPRINT_TOKENS))


def model_files(folder: Path) -> list[Path]:
    """Return the sorted files in `folder` that belong to a version: weights, configuration, tokenizer and templates."""
    return sorted({path for pattern in FILE_PATTERNS for path in folder.glob(pattern) if path.is_file()})


def is_weights(path: str) -> bool:
    """Return whether the file `path` of a version contains weights or their index."""
    return path.endswith((".safetensors", ".safetensors.index.json"))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. For a missing file return the SHA-256 of an empty one."""
    return digest_of(path)[0] if path.exists() else hashlib.sha256(b"").hexdigest()


def template_digest(folder: Path) -> str:
    """Return the SHA-256 of all chat templates in a model's folder. All folders without a template have the same
    digest."""
    names = [path.relative_to(folder).as_posix() for path in model_files(folder)]
    return _template_sha256({name: (folder / name).read_bytes() for name in names if _may_contain_template(name)})


def store_files(blobs: BlobStore, folder: Path, *, move: bool = False) -> tuple[File, ...]:
    """Store all files of a model's folder as blobs. Return the files with their references. Blocks.

    Args:
        blobs: the store.
        folder: the model's folder.
        move: whether to remove the files from the folder.

    Raises:
        ValueError: a file may contain a pickle.
    """
    paths = model_files(folder)
    return tuple(File(path=p.relative_to(folder).as_posix(), blob=blobs.put_file(p, move=move)) for p in paths)


def prompt_digests(blobs: BlobStore, files: Iterable[File]) -> tuple[str, str]:
    """Return the digests `tokenizer_sha256` and `template_sha256` of a model whose files are in the blob store.
    Blocks."""
    blob_of = {file.path: file.blob for file in files}
    tokenizer = blob_of[TOKENIZER_FILE].sha256 if TOKENIZER_FILE in blob_of else hashlib.sha256(b"").hexdigest()
    contents = {path: blobs.get(blob) for path, blob in blob_of.items() if _may_contain_template(path)}
    return tokenizer, _template_sha256(contents)


def _may_contain_template(path: str) -> bool:
    return path.endswith(".jinja") or path in {_PROCESSOR_TEMPLATE, _TOKENIZER_CONFIG}


def _template_sha256(contents: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of all chat templates in files, which are passed as contents by path.

    If there is only the template in `chat_template.jinja`, the form that transformers writes today, it is the digest of
    that file.
    """
    templates = {path: content for path, content in contents.items() if path != _TOKENIZER_CONFIG}
    inside = _template_inside(contents.get(_TOKENIZER_CONFIG, b"{}"))
    if inside is not None:
        templates[_TOKENIZER_CONFIG] = inside
    if not templates.keys() - {TEMPLATE_FILE}:
        return hashlib.sha256(templates.get(TEMPLATE_FILE, b"")).hexdigest()
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in templates.items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _template_inside(config: bytes) -> bytes | None:
    """Return the template, or the list of templates, in the content of `tokenizer_config.json`, as JSON; None without
    one."""
    try:
        value = json.loads(config).get("chat_template")
    except (ValueError, AttributeError, RecursionError):
        return config  # the file is unreadable here, so all of it may affect the prompt
    return None if value is None else json.dumps(value, sort_keys=True).encode()


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
    """Store all files of `folder` and a manifest of them as a version. Return the manifest and its reference. Equal
    content gives the same version. Blocks.

    Args:
        blobs: the store.
        folder: the folder with the model's files.
        name: the name of the model.
        lineage: the lineage of the version.
        step: the number of the version in its lineage.
        fingerprint: the fingerprint of the weights.
        parent: the version from which this one was trained.
        base: the full version to which this version, a LoRA adapter, applies.
        tokenizer: the folder with the tokenizer, which an adapter's folder lacks.

    Raises:
        ValueError: a file may contain a pickle.
    """
    source = tokenizer or folder
    manifest = Manifest(
        name=name,
        lineage=lineage,
        step=step,
        parent=parent,
        kind="lora" if base else "full",
        base=base,
        files=store_files(blobs, folder),
        fingerprint=fingerprint,
        tokenizer_sha256=file_digest(source / TOKENIZER_FILE),
        template_sha256=template_digest(source),
    )
    return store_manifest(blobs, manifest)


def store_manifest(blobs: BlobStore, manifest: Manifest) -> tuple[Manifest, BlobRef]:
    """Store the manifest of a version whose files are already in the blob store. Return it with its reference.
    Blocks."""
    return manifest, blobs.put(manifest.canonical_json())


def read_manifest(blobs: BlobStore, ref: BlobRef) -> Manifest:
    """Read the manifest at `ref`. Raises `CorruptBlob` if the content is not a manifest or does not match the
    digest."""
    try:
        return Manifest.model_validate_json(blobs.get(ref), extra="ignore")
    except ValidationError as error:
        raise CorruptBlob(f"blob {ref.sha256} is not a manifest: {error.error_count()} errors") from None


def fetch_version(blobs: BlobStore, manifest: Manifest, folder: Path) -> Path:
    """Copy the files of the version that `manifest` describes from the blob store into `folder`, and return
    `folder`."""
    return fetch_files(blobs, manifest.files, folder)


def fetch_files(blobs: BlobStore, files: Iterable[File], folder: Path) -> Path:
    """Copy `files` from the blob store into `folder`, check their digests, and return `folder`. Blocks. The caller must
    not change the files.

    Raises as `BlobStore.get` does.
    """
    for file in files:
        blobs.get_file(file.blob, folder / file.path)
    return folder


class VersionCache:
    """Cache of versions on this machine: one folder per version, with files whose digests were checked.

    If the blob store is a folder on the same disk, the files are hard links to the blobs.
    """

    def __init__(self, blobs: BlobStore, folder: Path, free_bytes_min: int | None = None) -> None:
        """Create the cache in `folder`. `free_bytes_min` bytes must stay free on its disk (see `disk.problem`)."""
        self._blobs = blobs
        self._folder = folder
        self._free_bytes_min = free_bytes_min

    async def fetch(self, ref: BlobRef) -> tuple[Manifest, Path]:
        """Return the manifest of a version, and a folder with all its files, which are copied if they are not in the
        cache.

        Raises:
            CorruptBlob: a file has another digest. The folder is removed.
            Unavailable: the blob store does not respond.
        """
        return await asyncio.to_thread(self._fetch, ref)

    def keep_only(self, versions: Iterable[str]) -> None:
        """Remove the folders of all versions except `versions`."""
        names = set(versions)
        for path in self._folder.glob("*@*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def _fetch(self, ref: BlobRef) -> tuple[Manifest, Path]:
        manifest = read_manifest(self._blobs, ref)
        target = self._folder / manifest.version
        if not target.exists():
            draft = self._folder / f".{uuid.uuid4().hex}"
            self._folder.mkdir(parents=True, exist_ok=True)
            shared = self._blobs.shares_disk_with(self._folder)
            new_bytes = 0 if shared else sum(file.blob.size for file in manifest.files)
            disk.check_room(self._folder, new_bytes, self._free_bytes_min)
            try:
                fetch_version(self._blobs, manifest, draft)
                draft.rename(target)
            except OSError as error:
                if disk.is_full(error):
                    raise disk.full_error(self._folder) from error
                if not target.exists():  # another process may have copied it at the same time
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

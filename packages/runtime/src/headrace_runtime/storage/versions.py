"""Stores a folder of model files as an immutable version in the blob store, and fetches a version into a folder.

This module does not use torch; the caller computes the fingerprint of the weights.
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
    """Return the token ids of a fingerprint, which depend on the size of the vocabulary alone.

    The ids are a walk through the vocabulary with a stride that is coprime to its size.
    """
    stride = next(candidate for candidate in range(vocabulary * 5 // 8, 0, -1) if gcd(candidate, vocabulary) == 1)
    return tuple((17 + index * stride) % vocabulary for index in range(FINGERPRINT_TOKENS))


def model_files(folder: Path) -> list[Path]:
    """Return the files in `folder` that belong to a version, sorted: weights, configuration, tokenizer, templates."""
    return sorted({path for pattern in FILE_PATTERNS for path in folder.glob(pattern) if path.is_file()})


def is_weights(path: str) -> bool:
    """Return whether a file of a version contains weights or their index."""
    return path.endswith((".safetensors", ".safetensors.index.json"))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or that of no bytes if it does not exist."""
    return digest_of(path)[0] if path.exists() else hashlib.sha256(b"").hexdigest()


def template_digest(folder: Path) -> str:
    """Return a SHA-256 that identifies the chat templates in a model's folder. Folders without a template share one
    digest.
    """
    names = [path.relative_to(folder).as_posix() for path in model_files(folder)]
    return _template_sha256({name: (folder / name).read_bytes() for name in names if _may_contain_template(name)})


def store_files(blobs: BlobStore, folder: Path, *, move: bool = False) -> tuple[File, ...]:
    """Store all files of a model's folder. Blocks.

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
    """Return `tokenizer_sha256` and `template_sha256` of a model whose files are in the store. Blocks."""
    blob_of = {file.path: file.blob for file in files}
    tokenizer = blob_of[TOKENIZER_FILE].sha256 if TOKENIZER_FILE in blob_of else hashlib.sha256(b"").hexdigest()
    contents = {path: blobs.get(blob) for path, blob in blob_of.items() if _may_contain_template(path)}
    return tokenizer, _template_sha256(contents)


def _may_contain_template(path: str) -> bool:
    return path.endswith(".jinja") or path in {_PROCESSOR_TEMPLATE, _TOKENIZER_CONFIG}


def _template_sha256(contents: Mapping[str, bytes]) -> str:
    """Return the digest of all templates in the files with these contents.

    For a single template in `chat_template.jinja`, as transformers writes it today, it is the digest of that file.
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
    """Return the template or the list of templates in `tokenizer_config.json`."""
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
    """Store all files of `folder` and their manifest. Blocks. Equal content gives the same version.

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
    """Store the manifest of a version whose files are in the store. Blocks."""
    return manifest, blobs.put(manifest.canonical_json())


def read_manifest(blobs: BlobStore, ref: BlobRef) -> Manifest:
    """Read the manifest at `ref`. Raises `CorruptBlob` if the content is no manifest or has another digest."""
    try:
        return Manifest.model_validate_json(blobs.get(ref), extra="ignore")
    except ValidationError as error:
        raise CorruptBlob(f"blob {ref.sha256} is not a manifest: {error.error_count()} errors") from None


def unpack(blobs: BlobStore, manifest: Manifest, folder: Path) -> Path:
    """Download the files of the version that `manifest` describes from the blob store into `folder`."""
    return fetch_files(blobs, manifest.files, folder)


def fetch_files(blobs: BlobStore, files: Iterable[File], folder: Path) -> Path:
    """Write files into `folder` and check their digests. Blocks. The caller must not change the files.

    Raises as `BlobStore.get` does.
    """
    for file in files:
        blobs.get_file(file.blob, folder / file.path)
    return folder


class VersionCache:
    """Cache of versions as folders on this machine, with files whose digests were checked.

    On the disk of the blob store its files are those of the store, under second names.
    """

    def __init__(self, blobs: BlobStore, folder: Path, free_bytes_min: int | None = None) -> None:
        """Use the cache in `folder`. `free_bytes_min` must stay free on its disk (`disk.problem`)."""
        self._blobs = blobs
        self._folder = folder
        self._free_bytes_min = free_bytes_min

    async def fetch(self, ref: BlobRef) -> tuple[Manifest, Path]:
        """Return the manifest of a version and a folder with all its files.

        Raises:
            CorruptBlob: a file has another digest. The folder is removed.
            Unavailable: the blob store does not respond.
        """
        return await asyncio.to_thread(self._fetch, ref)

    def keep_only(self, versions: Iterable[str]) -> None:
        """Remove the folders of all other versions."""
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
                unpack(self._blobs, manifest, draft)
                draft.rename(target)
            except OSError as error:
                if disk.is_full(error):
                    raise disk.full_error(self._folder) from error
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

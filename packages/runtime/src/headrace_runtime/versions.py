"""Stores a folder of model files as an immutable version in the blob store, and unpacks a version into a folder.

No torch here: what the weights answer (the fingerprint) is computed by the caller.
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

from headrace_runtime import disk
from headrace_runtime.blobs import BlobStore, digest_of
from headrace_runtime.errors import CorruptBlob
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Fingerprint, Manifest

FINGERPRINT_TOKENS = 48
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_PROCESSOR_TEMPLATE = "chat_template.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", f"{_MORE_TEMPLATES}/*.jinja")


def fingerprint_tokens(vocabulary: int) -> tuple[int, ...]:
    """A fingerprint's tokens, the same for every model with this vocabulary: a full-period walk through the ids."""
    stride = next(candidate for candidate in range(vocabulary * 5 // 8, 0, -1) if gcd(candidate, vocabulary) == 1)
    return tuple((17 + index * stride) % vocabulary for index in range(FINGERPRINT_TOKENS))


def model_files(folder: Path) -> list[Path]:
    """What of `folder` belongs in a version: weights, configuration, tokenizer, templates; sorted by name."""
    found = {path for pattern in _WANTED for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def is_weights(path: str) -> bool:
    """Whether a version's file holds weights, or says which file holds which."""
    return path.endswith((".safetensors", ".safetensors.index.json"))


def file_digest(path: Path) -> str:
    """SHA-256 of a file, of nothing when it does not exist."""
    return digest_of(path)[0] if path.exists() else hashlib.sha256(b"").hexdigest()


def template_digest(folder: Path) -> str:
    """Of every chat template in a model's folder, wherever it stands; of nothing when there is none."""
    names = [path.relative_to(folder).as_posix() for path in model_files(folder)]
    return _template_sha256({name: (folder / name).read_bytes() for name in names if _may_hold_a_template(name)})


def store_files(blobs: BlobStore, folder: Path, *, move: bool = False) -> tuple[File, ...]:
    """Put every file of a model's folder into the store. Blocks. `move`: the files are gone afterwards.

    Raises `ValueError` when a file may hold a pickle.
    """
    paths = model_files(folder)
    return tuple(File(path=p.relative_to(folder).as_posix(), blob=blobs.put_file(p, move=move)) for p in paths)


def prompt_digests(blobs: BlobStore, files: Iterable[File]) -> tuple[str, str]:
    """`tokenizer_sha256` and `template_sha256` of a model whose files are in the store. Blocks."""
    known = {file.path: file.blob for file in files}
    tokenizer = known[TOKENIZER_FILE].sha256 if TOKENIZER_FILE in known else hashlib.sha256(b"").hexdigest()
    holders = {path: blobs.get(blob) for path, blob in known.items() if _may_hold_a_template(path)}
    return tokenizer, _template_sha256(holders)


def _may_hold_a_template(path: str) -> bool:
    return path.endswith(".jinja") or path in {_PROCESSOR_TEMPLATE, _TOKENIZER_CONFIG}


def _template_sha256(holders: Mapping[str, bytes]) -> str:
    """One template in its own file, as transformers writes it today, is hashed as it is."""
    found = {path: content for path, content in holders.items() if path != _TOKENIZER_CONFIG}
    inside = _template_inside(holders.get(_TOKENIZER_CONFIG, b"{}"))
    if inside is not None:
        found[_TOKENIZER_CONFIG] = inside
    if not found.keys() - {TEMPLATE_FILE}:
        return hashlib.sha256(found.get(TEMPLATE_FILE, b"")).hexdigest()
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in found.items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _template_inside(config: bytes) -> bytes | None:
    """The template, or the list of them, in `tokenizer_config.json`."""
    try:
        value = json.loads(config).get("chat_template")
    except (ValueError, AttributeError, RecursionError):
        return config  # no configuration that we understand: all of it may act
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
        files=store_files(blobs, folder),
        fingerprint=fingerprint,
        tokenizer_sha256=file_digest(source / TOKENIZER_FILE),
        template_sha256=template_digest(source),
    )
    return store_manifest(blobs, manifest)


def store_manifest(blobs: BlobStore, manifest: Manifest) -> tuple[Manifest, BlobRef]:
    """What makes a version of files that are in the store. Blocks."""
    return manifest, blobs.put(manifest.canonical_json())


def read_manifest(blobs: BlobStore, ref: BlobRef) -> Manifest:
    """Raises `CorruptBlob` when the bytes are not the manifest that `ref` names."""
    try:
        return Manifest.model_validate_json(blobs.get(ref), extra="ignore")
    except ValidationError as error:
        raise CorruptBlob(f"blob {ref.sha256} is no manifest: {error.error_count()} errors") from None


def unpack(blobs: BlobStore, manifest: Manifest, folder: Path) -> Path:
    """`fetch_files` of a version."""
    return fetch_files(blobs, manifest.files, folder)


def fetch_files(blobs: BlobStore, files: Iterable[File], folder: Path) -> Path:
    """Write a model's files into `folder`, each checked against its digest. Blocks. Raises as `BlobStore.get` does."""
    for file in files:
        blobs.get_file(file.blob, folder / file.path)
    return folder


class VersionCache:
    """Versions as folders on this machine, each file checked against its digest on the way in (P7)."""

    def __init__(self, blobs: BlobStore, folder: Path, free_bytes_min: int | None = None) -> None:
        """`free_bytes_min` stay free on the disk of `folder` (`disk.trouble`)."""
        self._blobs = blobs
        self._folder = folder
        self._free_bytes_min = free_bytes_min

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
            self._folder.mkdir(parents=True, exist_ok=True)
            disk.check_room(self._folder, sum(file.blob.size for file in manifest.files), self._free_bytes_min)
            try:
                unpack(self._blobs, manifest, draft)
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

"""Publishes the weights in training as an immutable version in the blob store, and loads a version. The learner writes
and reads the weights' files; this module adds the base's other files, a manifest and with it a name."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from headrace_runtime.errors import SettingError
from headrace_runtime.storage import versions as store
from headrace_runtime.storage.base_models import FORMS
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from headrace_trainer.learner import Learner


def check_base(folder: Path) -> None:
    """Raise `SettingError` when `folder` cannot be the base of a lineage (P7)."""
    if not folder.is_dir():
        raise SettingError("trainer.base", str(folder), f"is not a folder; {FORMS}")
    for pattern, content in (("*.safetensors", "weights in safetensors"), ("config.json", "config.json")):
        if not any(folder.glob(pattern)):
            raise SettingError("trainer.base", str(folder), f"has no {content}; convert the model first")
    if not (folder / store.TOKENIZER_FILE).exists():
        raise SettingError("trainer.base", str(folder), f"has no {store.TOKENIZER_FILE}; save a fast tokenizer there")


@contextlib.contextmanager
def open_files(blobs: BlobStore, files: Iterable[File]) -> Iterator[Path]:
    """Yield a temporary folder with these files. Raise `CorruptBlob` or `Unavailable`."""
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        yield store.fetch_files(blobs, files, Path(name))


def base_files(blobs: BlobStore, folder: Path) -> tuple[File, ...]:
    """Store the files of a lineage's base by their digests. Each file is read once, so later changes of the folder have
    no effect. Blocks."""
    return store.store_files(blobs, folder)


def publish_base(
    blobs: BlobStore, files: tuple[File, ...], learner: Learner, *, name: str, lineage: str
) -> tuple[Manifest, BlobRef]:
    """Publish the base's own files, byte for byte, as step 0. Blocks."""
    fingerprint = learner.fingerprint_of_base()
    tokenizer, template = store.prompt_digests(blobs, files)
    manifest = Manifest(
        name=name,
        lineage=lineage,
        step=0,
        files=files,
        fingerprint=fingerprint,
        tokenizer_sha256=tokenizer,
        template_sha256=template,
    )
    return store.store_manifest(blobs, manifest)


def publish(
    blobs: BlobStore,
    folder: Path,
    fingerprint: Fingerprint,
    *,
    first: Manifest,
    lineage: str,
    step: int,
    parent: str,
    kind: Literal["full", "lora"],
) -> tuple[Manifest, BlobRef]:
    """Publish the files that a copy has written into `folder` as a new version. Blocks.

    The version is a whole model, or an adapter on the lineage's first version. Everything but the weights
    (configuration, tokenizer, templates) comes from the first version in the store. The folder is empty afterwards.
    """
    files = store.store_files(blobs, folder, move=True)
    if kind == "full":
        other_files = (file for file in first.files if not store.is_weights(file.path))
        files = tuple(sorted((*files, *other_files), key=lambda file: file.path))
    manifest = Manifest(
        name=first.name,
        lineage=lineage,
        step=step,
        parent=parent,
        kind=kind,
        base=first.version if kind == "lora" else None,
        files=files,
        fingerprint=fingerprint,
        tokenizer_sha256=first.tokenizer_sha256,
        template_sha256=first.template_sha256,
    )
    return store.store_manifest(blobs, manifest)


def check_same(folder: Path, first: Manifest, lineage: str) -> None:
    """Raise `SettingError` when `folder` differs from the base that the lineage started from."""
    present = {path.relative_to(folder).as_posix(): store.file_digest(path) for path in store.model_files(folder)}
    original = {file.path: file.blob.sha256 for file in first.files}
    differing = sorted(name for name in present.keys() | original.keys() if present.get(name) != original.get(name))
    if differing:
        raise SettingError(
            "trainer.base",
            str(folder),
            f"{', '.join(differing)} differ from what lineage {lineage} started from; choose another trainer.lineage",
        )


def load(blobs: BlobStore, manifest: Manifest, learner: Learner) -> None:
    """Load the weights of a version into `learner`. Blocks. Raise `CorruptBlob` or `Unavailable`."""
    with open_files(blobs, manifest.files) as folder:
        learner.load(folder)


def fetch_weights(blobs: BlobStore, manifest: Manifest, folder: Path) -> None:
    """Fetch the weights of a version into `folder`. Blocks. Raise `CorruptBlob` or `Unavailable`."""
    weights = (file for file in manifest.files if file.path.endswith(".safetensors"))
    store.fetch_files(blobs, weights, folder)


def weight_digests(manifest: Manifest) -> frozenset[str]:
    """Return the digests of the weights, by which two versions of one lineage differ."""
    return frozenset(file.blob.sha256 for file in manifest.files if file.path.endswith(".safetensors"))

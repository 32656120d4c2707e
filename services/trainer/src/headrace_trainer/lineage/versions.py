"""From the weights in training to an immutable version in the blob store, and back. The learner writes and reads the
weights' files; here they get the base's other files, a manifest and with it a name."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from headrace_runtime import versions as store
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import SettingError
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Fingerprint, Manifest
from headrace_trainer.learner import Learner


def check_base(folder: Path) -> None:
    """Raises `SettingError` when `folder` cannot be the start of a lineage (P7)."""
    if not folder.is_dir():
        raise SettingError("trainer.base", str(folder), "is not a folder; name one in Hugging Face's layout")
    for pattern, what in (("*.safetensors", "weights in safetensors"), ("config.json", "config.json")):
        if not any(folder.glob(pattern)):
            raise SettingError("trainer.base", str(folder), f"has no {what}; convert the model first")
    if not (folder / store.TOKENIZER_FILE).exists():
        raise SettingError("trainer.base", str(folder), f"has no {store.TOKENIZER_FILE}; save a fast tokenizer there")


@contextlib.contextmanager
def unpacked(blobs: BlobStore, files: Iterable[File]) -> Iterator[Path]:
    """A folder with these files, for as long as the body runs. Raises `CorruptBlob` or `Unavailable`."""
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        yield store.fetch_files(blobs, files, Path(name))


def base_files(blobs: BlobStore, folder: Path) -> tuple[File, ...]:
    """What a lineage starts from, by digest: each file is read once, and whatever becomes of it then changes nothing.
    Blocks."""
    return store.store_files(blobs, folder)


def publish_base(
    blobs: BlobStore, files: tuple[File, ...], learner: Learner, *, name: str, lineage: str
) -> tuple[Manifest, BlobRef]:
    """The base's own files, byte for byte, as step 0. Blocks."""
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
    """What a copy has written into `folder` as a new version: a whole model, or an adapter on the lineage's first
    version. The files in it are gone afterwards. Blocks.

    Everything but the weights (configuration, tokenizer, templates) is the first version's, from the store.
    """
    files = store.store_files(blobs, folder, move=True)
    if kind == "full":
        kept = (file for file in first.files if not store.is_weights(file.path))
        files = tuple(sorted((*files, *kept), key=lambda file: file.path))
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
    """Raises `SettingError` when `folder` is not what the lineage started from."""
    there = {path.relative_to(folder).as_posix(): store.file_digest(path) for path in store.model_files(folder)}
    then = {file.path: file.blob.sha256 for file in first.files}
    differing = sorted(name for name in there.keys() | then.keys() if there.get(name) != then.get(name))
    if differing:
        raise SettingError(
            "trainer.base",
            str(folder),
            f"{', '.join(differing)} differ from what lineage {lineage} started from; choose another trainer.lineage",
        )


def load(blobs: BlobStore, manifest: Manifest, learner: Learner) -> None:
    """Make the weights of `learner` those in a version's files. Blocks. Raises `CorruptBlob` or `Unavailable`."""
    with unpacked(blobs, manifest.files) as folder:
        learner.load(folder)


def weight_digests(manifest: Manifest) -> frozenset[str]:
    """What tells two versions of one lineage apart."""
    return frozenset(file.blob.sha256 for file in manifest.files if file.path.endswith(".safetensors"))

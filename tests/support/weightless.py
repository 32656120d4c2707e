"""Versions whose weights no test reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest


def version(
    blobs: BlobStore,
    model: str,
    content: str,
    *,
    lineage: str = "main",
    step: int = 0,
    parent: str | None = None,
    base: str | None = None,
    tokenizer: str = "a",
    template: str = "b",
    files: Sequence[File] = (),
) -> tuple[Manifest, BlobRef]:
    """One with `content` for weights, stored. `tokenizer` and `template` are the digit of their digests."""
    weights = File(path="model.safetensors", blob=blobs.put(content.encode()))
    manifest = Manifest(
        name=model,
        lineage=lineage,
        step=step,
        parent=parent,
        kind="lora" if base else "full",
        base=base,
        files=(weights, *files),
        fingerprint=Fingerprint(token_ids=(1, 2), logprobs=(-1.0,)),
        tokenizer_sha256=tokenizer * 64,
        template_sha256=template * 64,
    )
    return manifest, blobs.put(manifest.canonical_json())


def checkpoint(manifest: Manifest, ref: BlobRef, time: datetime) -> Checkpoint:
    """Return the trainer's checkpoint event for it."""
    return Checkpoint(
        time=time,
        model=manifest.name,
        version=manifest.version,
        lineage=manifest.lineage,
        step=manifest.step,
        parent=manifest.parent,
        manifest=ref,
    )

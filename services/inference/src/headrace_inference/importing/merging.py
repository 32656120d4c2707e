"""An adapter and its base as one model with whole weights. Blocks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

from headrace_inference.errors import VersionUnusable
from headrace_inference.importing import native
from headrace_runtime import versions
from headrace_runtime.blobs import BlobStore
from headrace_schemas.blobs import BlobRef


def merge(blobs: BlobStore, adapter: BlobRef, base: BlobRef, target: Path) -> None:
    """Write a folder that transformers and vLLM load. The sum is made in float32, and rounded once to the base's type.

    Tokenizer, templates and generation settings are the base's own files, byte for byte. Raises `VersionUnusable`.
    """
    above, below = versions.read_manifest(blobs, adapter), versions.read_manifest(blobs, base)
    if above.base != below.version:
        raise VersionUnusable(f"{above.version} is an adapter of {above.base}, not of {below.version}")
    with tempfile.TemporaryDirectory(prefix="headrace-merge-") as name:
        folder = versions.unpack(blobs, below, Path(name) / "base")
        adapted = versions.unpack(blobs, above, Path(name) / "adapter")
        model = native.opened(folder, adapted, torch.float32).merge_and_unload(safe_merge=True)
        model.to(_stored_type(folder)).save_pretrained(target, safe_serialization=True)
        for path in versions.model_files(folder):
            relative = path.relative_to(folder)
            if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / relative)


def _stored_type(folder: Path) -> torch.dtype:
    found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = getattr(found, "dtype", None) or torch.float32
    return kind if isinstance(kind, torch.dtype) else getattr(torch, str(kind))

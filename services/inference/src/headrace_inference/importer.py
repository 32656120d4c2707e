"""`python -m headrace_inference.importer`: imports and merges models. It reads lines `folder` or `merge` and writes
lines `stored` or `merged`. Blocks.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig

from headrace_inference.errors import VersionUnusable
from headrace_inference.importing import Importer, load_model
from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import Service
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.programs.models import FolderLine, MergedLine, MergeLine
from headrace_schemas.values.blobs import BlobRef

SERVICE = Service(
    "inference",
    "Makes versions of folders, and folders of versions.",
    InferenceSettings,
    "headrace_inference.importer:run",
)


def merge_adapter(blobs: BlobStore, adapter: BlobRef, base: BlobRef, target: Path) -> None:
    """Write the merged model to a folder that transformers and vLLM can load.

    The weights are added in float32 and rounded once to the base's type. Tokenizer, templates and generation settings
    are copies of the base's files.

    Raises:
        VersionUnusable: `adapter` is not an adapter of `base`.
    """
    adapter_manifest, base_manifest = versions.read_manifest(blobs, adapter), versions.read_manifest(blobs, base)
    if adapter_manifest.base != base_manifest.version:
        raise VersionUnusable(
            f"{adapter_manifest.version} is an adapter of {adapter_manifest.base}, not of {base_manifest.version}"
        )
    with tempfile.TemporaryDirectory(prefix="headrace-merge-") as name:
        folder = versions.unpack(blobs, base_manifest, Path(name) / "base")
        adapter_folder = versions.unpack(blobs, adapter_manifest, Path(name) / "adapter")
        model = load_model(folder, adapter_folder, torch.float32).merge_and_unload(safe_merge=True)
        model.to(_stored_type(folder)).save_pretrained(target, safe_serialization=True)
        for path in versions.model_files(folder):
            relative = path.relative_to(folder)
            if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / relative)


def _stored_type(folder: Path) -> torch.dtype:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = getattr(config, "dtype", None) or torch.float32
    return kind if isinstance(kind, torch.dtype) else getattr(torch, str(kind))


async def run(common: Common, settings: InferenceSettings) -> None:
    """Run the filter on standard input and output. Raises `VersionUnusable` for a folder that cannot be imported."""
    lines = Lines()
    blobs = BlobStore.open(common)
    async for word, value in lines.read():
        if word == "folder":
            stored = Importer(blobs, settings).import_folder(FolderLine.model_validate_json(value))
            lines.write("stored", stored.model_dump_json().encode())
        elif word == "merge":
            line = MergeLine.model_validate_json(value)
            merge_adapter(blobs, line.adapter, line.base, Path(line.folder))
            lines.write("merged", MergedLine(folder=line.folder).model_dump_json().encode())
        else:
            raise ValueError(f"a line begins with {word!r}; it must begin with folder or merge")
        lines.flush()


if __name__ == "__main__":
    SERVICE.main()

"""Filter that imports and merges models: reads lines `folder` or `merge`, writes lines `stored` or `merged`."""

from __future__ import annotations

from pathlib import Path

from headrace_inference.importing.folder import Importer
from headrace_inference.importing.merging import merge
from headrace_inference.settings import InferenceSettings
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.programs.models import FolderLine, MergedLine, MergeLine


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
            merge(blobs, line.adapter, line.base, Path(line.folder))
            lines.write("merged", MergedLine(folder=line.folder).model_dump_json().encode())
        else:
            raise ValueError(f"a line begins with {word!r}; it must begin with folder or merge")
        lines.flush()

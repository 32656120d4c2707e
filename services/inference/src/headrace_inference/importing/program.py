"""The filter: a line `folder` or `merge` in, a line `stored` or `merged` out. One at a time, without a bus."""

from __future__ import annotations

from pathlib import Path

from headrace_inference.importing.folder import Importer
from headrace_inference.importing.merging import merge
from headrace_inference.settings import InferenceSettings
from headrace_runtime.blobs import BlobStore
from headrace_runtime.filters import Lines
from headrace_runtime.settings import Common
from headrace_schemas.importing import FolderLine, MergedLine, MergeLine


async def run(common: Common, settings: InferenceSettings) -> None:
    """Raises `VersionUnusable` with what is wrong with a folder."""
    lines = Lines()
    blobs = BlobStore.open(common)
    async for word, value in lines.read():
        if word == "folder":
            taken = Importer(blobs, settings).take(FolderLine.model_validate_json(value))
            lines.write("stored", taken.model_dump_json().encode())
        elif word == "merge":
            asked = MergeLine.model_validate_json(value)
            merge(blobs, asked.adapter, asked.base, Path(asked.folder))
            lines.write("merged", MergedLine(folder=asked.folder).model_dump_json().encode())
        else:
            raise ValueError(f"a line begins with {word!r}; the importer knows folder and merge")
        lines.flush()

"""The lines between `headrace models register`, `import` or `export` and the program that knows how weights are loaded.

See `headrace_schemas.replay` for what a line is.
"""

from __future__ import annotations

from headrace_schemas.base import Model, ModelName, Version
from headrace_schemas.blobs import BlobRef

MANIFEST_FILE = "headrace_manifest.json"
"""Lies in an exported folder: with it the folder becomes the very same version again."""


class FolderLine(Model):
    """A line `folder`: make it a version of this model. `base` is the manifest of what an adapter applies to.

    Without a name it is the version that was exported.
    """

    folder: str
    name: ModelName | None = None
    base: BlobRef | None = None


class StoredLine(Model):
    """A line `stored`."""

    version: Version
    manifest: BlobRef


class MergeLine(Model):
    """A line `merge`: write adapter and base as one model into a folder."""

    adapter: BlobRef
    base: BlobRef
    folder: str


class MergedLine(Model):
    """A line `merged`."""

    folder: str

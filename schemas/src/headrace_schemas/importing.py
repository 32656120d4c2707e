"""Line protocol between `headrace models register`, `import` or `export` and the program that can load weights.

`headrace_schemas.replay` describes the format of a line.
"""

from __future__ import annotations

from headrace_schemas.base import Model, ModelName, Version
from headrace_schemas.blobs import BlobRef

MANIFEST_FILE = "headrace_manifest.json"
"""Name of the manifest in an exported folder. With it, importing the folder restores the same version."""


class FolderLine(Model):
    """A line `folder`: the request to store a folder as a version."""

    folder: str
    name: ModelName | None = None
    """The model. Without it the folder must contain an exported version."""
    base: BlobRef | None = None
    """The manifest of the version that an adapter applies to."""


class StoredLine(Model):
    """A line `stored`: the stored version."""

    version: Version
    manifest: BlobRef


class MergeLine(Model):
    """A line `merge`: the request to write adapter and base as one model into a folder."""

    adapter: BlobRef
    base: BlobRef
    folder: str


class MergedLine(Model):
    """A line `merged`: the folder with the merged model."""

    folder: str

"""References to blobs, which hold content that is too large for a topic."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from headrace_schemas.base import Model, Sha256, Text
from headrace_schemas.bounds import INT64

PAYLOAD_BYTES_MAX = 262_144
"""Event values of more bytes are stored as blobs, and their records contain a `BlobRef`."""


class BlobRef(Model):
    """Location, size and digest of a blob. Readers check size and digest before they use the content."""

    uri: Text
    sha256: Sha256
    size: Annotated[int, Field(ge=0), INT64]

    def matches(self, data: bytes) -> bool:
        """Return whether `data` has the size and the digest of the blob."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256

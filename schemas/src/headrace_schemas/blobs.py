"""References to content that is too large for a topic."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field

from headrace_schemas.base import Model, Sha256, Text
from headrace_schemas.bounds import INT64

PAYLOAD_BYTES_MAX = 262_144
"""Larger event values go to the blob store and a `BlobRef` takes their place."""


class BlobRef(Model):
    """Where bytes lie and what they must hash to. Readers check `size` and `sha256` before use."""

    uri: Text
    sha256: Sha256
    size: Annotated[int, Field(ge=0), INT64]

    def matches(self, data: bytes) -> bool:
        """Whether these are the bytes that are meant."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256

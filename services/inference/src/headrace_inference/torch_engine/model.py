"""A loaded version."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from headrace_inference.torch_engine.kv import KVShape
from headrace_inference.torch_engine.program import Program
from headrace_schemas.values.blobs import Manifest


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded version. Immutable: new weights are another version and another `Model`."""

    manifest: Manifest
    module: nn.Module
    weights: list[Tensor]
    program: Program
    kv_shape: KVShape
    vocabulary: int
    context_tokens: int

    @property
    def version(self) -> str:
        """Name of the version."""
        return self.manifest.version

"""Names of the files in which a lineage's state passes to the ranks and back."""

from __future__ import annotations

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"

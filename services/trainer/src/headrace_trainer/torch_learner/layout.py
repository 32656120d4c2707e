"""Computes the position of each tensor in the safetensors file that a single process would write, without values.

So several processes can write one file together, each its own ranges, with the same result as one process
(https://huggingface.co/docs/safetensors: eight bytes with the size of the header, the header in JSON, the tensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

_SIZE_BYTES = 8


@dataclass(frozen=True)
class Layout:
    """Byte layout of one safetensors file."""

    header: bytes
    """The bytes before all tensors."""
    starts: Mapping[str, int]
    size: int


def layout(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> Layout:
    """Return the layout of a file with these tensors.

    Args:
        tensors: The tensors by name. Only their shapes and types are used: they may be `meta` tensors or sharded.
        about: The file's metadata: one entry, because the library writes several in random order.
    """
    # The library decides the order of tensors: by type and name.
    empty = save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata=dict(about))
    entries = json.loads(empty[_SIZE_BYTES:])
    starts, end = {}, 0
    for name, entry in entries.items():
        if name in tensors:
            starts[name], tensor = end, tensors[name]
            end += tensor.numel() * tensor.element_size()
            entry |= {"shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _SIZE_BYTES)
    header = len(text).to_bytes(_SIZE_BYTES, "little") + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)

"""Tensors that are not whole in memory: shards over a team of processes, and safetensors files read one by one.

With a file's layout, several processes can write it together, each its own ranges, with the same result as one
process (https://huggingface.co/docs/safetensors: eight bytes with the size of the header, the header in JSON, the
tensors).

An unsharded tensor is returned as it is, so a single process pays nothing for these functions. Functions that gather
a sharded tensor must be called by every member, in the same order, because the members exchange their parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether other processes hold parts of the tensor."""
    return hasattr(tensor, "full_tensor")


def gather(tensor: Tensor) -> Tensor:
    """Return the full tensor, assembled from the parts of all processes, in every process."""
    if not is_sharded(tensor):
        return tensor
    gathered: Tensor = _as_any(tensor).full_tensor()
    return gathered


def mean(tensor: Tensor) -> Tensor:
    """Return the mean of all elements of a tensor, including those that other processes hold."""
    return gather(tensor.sum()) / tensor.numel() if is_sharded(tensor) else tensor.mean()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, including the elements that other processes hold."""
    return [gather(norm) for norm in torch._foreach_norm(list(tensors))] if tensors else []


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor on the CPU in the first process of the team, an empty tensor in the others."""
    gathered = gather(tensor.detach())
    if is_sharded(tensor) and _as_any(tensor).device_mesh.get_rank() != 0:
        return torch.empty(0)
    return gathered.cpu().clone()


def copy_sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of `value` on the device and with the sharding of `parameter`.

    Every process must have the full `value`; the result holds only the part of this process.
    """
    if not is_sharded(parameter):
        return value.to(parameter.device).clone()
    from torch.distributed.tensor import distribute_tensor  # imported here, because it takes seconds

    layout = _as_any(parameter)
    part: Tensor = distribute_tensor(value.to(layout.device), layout.device_mesh, layout.placements, src_data_rank=None)
    return part.clone()


def _as_any(tensor: Tensor) -> Any:
    return tensor


_MAPPED_BYTES_MAX = 64 << 20
"""Bytes after which the file is mapped again: the pages that were read count as memory of the process until then."""
_SIZE_BYTES = 8


class StoredTensors(Mapping[str, Tensor]):
    """Mapping of the tensors of a safetensors file. Each access reads a tensor from the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = cast(Any, safe_open(path, "pt"))
        self._read_bytes = 0
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if self._read_bytes > _MAPPED_BYTES_MAX:
            self._file, self._read_bytes = cast(Any, safe_open(self._path, "pt")), 0
        tensor: Tensor = self._file.get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


class SelectedTensors(Mapping[str, Tensor]):
    """Mapping of some tensors of another mapping, by their names without `prefix`.

    Each access reads a tensor from there.
    """

    def __init__(self, inner: Mapping[str, Tensor], names: Iterable[str], prefix: str = "") -> None:
        self._inner = inner
        self._names = {name.removeprefix(prefix): name for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self._inner[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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

"""Tensors in a safetensors file that are read one by one, because a state may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import Tensor

_MAPPED_BYTES_MAX = 64 << 20
"""Bytes after which the file is mapped again: the pages that were read count as memory of the process until then."""


class StoredTensors(Mapping[str, Tensor]):
    """Mapping of a file's tensors. Each access reads the tensor from the file."""

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
    """Mapping of some tensors of another mapping, by their names without `prefix`. They are read when accessed."""

    def __init__(self, inner: Mapping[str, Tensor], names: Iterable[str], prefix: str = "") -> None:
        self._inner = inner
        self._names = {name.removeprefix(prefix): name for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self._inner[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

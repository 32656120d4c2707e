"""Tensors in a safetensors file that are read one by one, because a state may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import Tensor


class StoredTensors(Mapping[str, Tensor]):
    """Mapping of a file's tensors. Each access reads the tensor from the file."""

    def __init__(self, path: Path) -> None:
        self._file = cast(Any, safe_open(path, "pt"))
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
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

"""KV cache of one batch: one tensor for all layers, which grows on demand within a fixed budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_STEP = 32
"""Lengths are rounded up to a multiple of this, so that shapes change rarely."""


@dataclass(frozen=True)
class KVShape:
    """Shape of the KV of one token in one architecture."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Size of the KV of one token."""
        return 2 * self.layers * self.heads * self.size * self.dtype.itemsize

    def zeros(self, rows: int, length: int) -> Tensor:
        """Return zeroed KV `[2 * layers, rows, heads, length, size]`, with keys at even and values at odd indices.

        It must not be uninitialized: masked positions are multiplied by 0, and 0 x NaN is NaN.
        """
        shape = (2 * self.layers, rows, self.heads, length, self.size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class KV:
    """Rows of KV. Each row has the KV of the first tokens of the sequence in this row of the batch."""

    def __init__(self, shape: KVShape, bytes_max: int) -> None:
        self.shape = shape
        self._bytes_max = bytes_max
        self._tensor = shape.zeros(0, 0)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._tensor.shape[1]

    @property
    def length(self) -> int:
        """Number of tokens that each row can hold."""
        return self._tensor.shape[3]

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return self._tensor.numel() * self._tensor.element_size()

    @property
    def length_max(self) -> int:
        """Length of the longest sequence that fits into the budget alone."""
        return self._bytes_max // self.shape.token_bytes

    def reserve(self, rows: int, length: int) -> bool:
        """Grow the tensor to at least `rows` rows of `length` tokens, and return whether the budget allows it.

        Both must cover the part in use, which is preserved. The tensor doubles if that fits, so that a growing batch is
        copied rarely. It shrinks in one dimension if it can grow in the other only then. During the copy, the old and
        the new tensor exist at once.
        """
        if rows <= self.rows and length <= self.length:
            return True
        rounded = -(-length // LENGTH_STEP) * LENGTH_STEP
        rows_doubled = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        length_doubled = self.length if length <= self.length else max(rounded, 2 * self.length)
        candidates = (
            (rows_doubled, length_doubled),
            (rows, self.length_max // rows),  # the whole budget, because growing in small steps would copy each time
        )
        for new_rows, new_length in candidates:
            if new_length >= length and new_rows * new_length <= self.length_max:
                self._resize(new_rows, new_length)
                return True
        return False

    def view(self, first: int, count: int) -> Tensor:
        """Return a view of `count` rows from `first` on, for a forward pass to write."""
        return self._tensor[:, first : first + count]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row to another row."""
        self._tensor[:, target, :, :length] = self._tensor[:, source, :, :length]

    def swap(self, left: int, right: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows."""
        saved = self.snapshot(left, length)
        self.move(right, left, length)
        self.restore(right, saved)

    def snapshot(self, row: int, length: int) -> Tensor:
        """Return a copy of a row's first `length` tokens: `[2 * layers, heads, length, size]`."""
        return self._tensor[:, row, :, :length].clone()

    def restore(self, row: int, snapshot: Tensor, length: int | None = None) -> None:
        """Copy a snapshot, or its first `length` tokens, to a row."""
        count = snapshot.shape[2] if length is None else length
        self._tensor[:, row, :, :count] = snapshot[:, :, :count]

    def release(self) -> None:
        """Release the memory."""
        self._tensor = self.shape.zeros(0, 0)

    def _resize(self, rows: int, length: int) -> None:
        old = self._tensor
        self._tensor = self.shape.zeros(rows, length)
        shared_rows, shared_length = min(rows, old.shape[1]), min(length, old.shape[3])
        self._tensor[:, :shared_rows, :, :shared_length] = old[:, :shared_rows, :, :shared_length]

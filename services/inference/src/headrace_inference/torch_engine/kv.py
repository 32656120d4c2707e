"""The KV cache of one batch: one tensor for all layers, which grows on demand within a fixed budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_STEP = 32
"""Attention sees lengths rounded up to this, so that views change rarely."""


@dataclass(frozen=True)
class KVShape:
    """What one token's KV looks like in one architecture."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.size * self.dtype.itemsize

    def zeros(self, rows: int, length: int) -> Tensor:
        """`[2 * layers, rows, heads, length, size]`, keys at even and values at odd places.

        Zeros and not garbage: masked positions still take part in a product, and 0 x NaN is NaN.
        """
        shape = (2 * self.layers, rows, self.heads, length, self.size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class KV:
    """Rows of KV. Row `r` holds the first tokens of whatever sequence the batch put there."""

    def __init__(self, shape: KVShape, bytes_max: int) -> None:
        self.shape = shape
        self._bytes_max = bytes_max
        self._tensor = shape.zeros(0, 0)

    @property
    def rows(self) -> int:
        return self._tensor.shape[1]

    @property
    def length(self) -> int:
        return self._tensor.shape[3]

    @property
    def bytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    @property
    def length_max(self) -> int:
        """The longest sequence that fits when it is alone."""
        return self._bytes_max // self.shape.token_bytes

    def reserve(self, rows: int, length: int) -> bool:
        """Make room for `rows` rows of `length` tokens; False when the budget forbids it.

        Both must cover what is in use, which is kept. Grows by doubling where that fits, so that a growing batch is
        copied rarely, and shrinks in one direction where only that lets it grow in the other. While it copies, old
        and new exist at once.
        """
        if rows <= self.rows and length <= self.length:
            return True
        rounded = -(-length // LENGTH_STEP) * LENGTH_STEP
        rows_doubled = self.rows if rows <= self.rows else max(rows, 2 * self.rows)
        length_doubled = self.length if length <= self.length else max(rounded, 2 * self.length)
        wanted = (
            (rows_doubled, length_doubled),
            (rows, self.length_max // rows),  # everything, once: growing by little would copy it all each time
        )
        for new_rows, new_length in wanted:
            if new_length >= length and new_rows * new_length <= self.length_max:
                self._resize(new_rows, new_length)
                return True
        return False

    def view(self, first: int, count: int) -> Tensor:
        """Rows `first .. first + count`, to be written by a forward."""
        return self._tensor[:, first : first + count]

    def move(self, source: int, target: int, length: int) -> None:
        self._tensor[:, target, :, :length] = self._tensor[:, source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        kept = self.snapshot(one, length)
        self.move(other, one, length)
        self.restore(other, kept)

    def snapshot(self, row: int, length: int) -> Tensor:
        """A copy of a row's first `length` tokens: `[2 * layers, heads, length, size]`."""
        return self._tensor[:, row, :, :length].clone()

    def restore(self, row: int, snapshot: Tensor, length: int | None = None) -> None:
        count = snapshot.shape[2] if length is None else length
        self._tensor[:, row, :, :count] = snapshot[:, :, :count]

    def release(self) -> None:
        """Forget everything."""
        self._tensor = self.shape.zeros(0, 0)

    def _resize(self, rows: int, length: int) -> None:
        old = self._tensor
        self._tensor = self.shape.zeros(rows, length)
        both_rows, both_length = min(rows, old.shape[1]), min(length, old.shape[3])
        self._tensor[:, :both_rows, :, :both_length] = old[:, :both_rows, :, :both_length]

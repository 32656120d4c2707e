"""KV cache of one batch, one tensor for all layers that grows within a fixed budget, and the KV of finished sequences,
indexed by their tokens.

Entries are only found with their own salt. Otherwise a tenant could find out other tenants' prompts from
`cached_tokens` or from the time that a prompt takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_runtime.storage.tenant_memory import TenantMemory

LENGTH_STEP = 32
"""Lengths are rounded up to a multiple of this, so that shapes change rarely."""
BLOCK = 16
"""Prefixes are indexed at multiples of this number of tokens. The rest of a match is found by comparison."""


@dataclass(frozen=True)
class KVShape:
    """Layers, heads, head size, type and device of the cached keys and values (KV) of one model architecture."""

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
    """Growing tensor with the keys and values of a batch: row `r` has those of the sequence in row `r` of the batch."""

    def __init__(self, shape: KVShape, bytes_max: int) -> None:
        self.shape = shape
        self._bytes_max = bytes_max
        self._tensor = shape.zeros(0, 0)

    @property
    def rows(self) -> int:
        """Number of rows that the tensor has."""
        return self._tensor.shape[1]

    @property
    def length(self) -> int:
        """Number of tokens that each row can hold."""
        return self._tensor.shape[3]

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self._tensor.numel() * self._tensor.element_size()

    @property
    def length_max(self) -> int:
        """Length of the longest sequence that fits into the budget alone."""
        return self._bytes_max // self.shape.token_bytes

    def reserve(self, rows: int, length: int) -> bool:
        """Grow the tensor to at least `rows` rows of `length` tokens. Return False if the budget does not allow it.

        Both numbers must cover the part in use, whose content stays. The tensor doubles if that fits, so that a growing
        batch is copied rarely. It shrinks in one dimension if it can only then grow in the other. During the copy, the
        old and the new tensor exist at once.
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
        """Return `count` rows of the cache of keys and values, from row `first` on, as a view into which a forward pass
        writes.
        """
        return self._tensor[:, first : first + count]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of the row `source` to the row `target`."""
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
        """Release the memory of the tensor."""
        self._tensor = self.shape.zeros(0, 0)

    def _resize(self, rows: int, length: int) -> None:
        old = self._tensor
        self._tensor = self.shape.zeros(rows, length)
        shared_rows, shared_length = min(rows, old.shape[1]), min(length, old.shape[3])
        self._tensor[:, :shared_rows, :, :shared_length] = old[:, :shared_rows, :, :shared_length]


@dataclass(slots=True, eq=False)
class Entry:
    """KV of a token sequence in the prefix cache, with the keys under which it is indexed."""

    salt: str
    tokens: Sequence[int]
    kv: Tensor
    keys: list[int]

    @property
    def bytes(self) -> int:
        """Size of the entry's KV in bytes."""
        return self.kv.numel() * self.kv.element_size()


class PrefixCache:
    """Cache of the KV of finished sequences with bounded memory.

    The tenant with the most bytes loses its least recently used entries first. Any prefix of an entry can be used,
    because the KV of a token depends only on the tokens before it. So sequences with the same system prompt share its
    KV.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: TenantMemory[int, Entry] = TenantMemory(bytes_max)
        self._index: dict[int, dict[int, Entry]] = {}

    @property
    def bytes(self) -> int:
        """Size of the KV of all entries in bytes."""
        return self._entries.size

    def find_longest(self, tokens: Sequence[int], salt: str = "") -> tuple[Entry | None, int]:
        """Return the entry that shares the longest prefix with `tokens`, and the number of shared tokens.

        The search compares complete blocks, so another entry may share up to `BLOCK - 1` tokens more. Of several
        entries with equally many blocks, the newest is returned. Only entries with the same `salt` are used.
        """
        if not self._index:
            return None, 0
        keys = _keys(tokens, salt)
        for count in range(len(keys), 0, -1):
            matched = count * BLOCK
            for entry in reversed(self._index.get(keys[count - 1], {}).values()):
                if entry.salt == salt and entry.tokens[:matched] == tokens[:matched]:  # keys may collide, tokens do not
                    self._entries.get(salt, id(entry))
                    return entry, _shared_length(entry.tokens, tokens, matched)
        return None, 0

    def add(self, tokens: Sequence[int], kv: Tensor, salt: str = "") -> None:
        """Store the keys and values of a finished sequence, so that later prompts with the same beginning reuse them.

        A sequence that is larger than the whole cache or shorter than a block is not stored.
        """
        entry = Entry(salt, tokens, kv, _keys(tokens, salt))
        if not entry.keys or entry.bytes > self._bytes_max:
            return
        for key in entry.keys:
            self._index.setdefault(key, {})[id(entry)] = entry
        for evicted in self._entries.set(salt, id(entry), entry, entry.bytes):
            self._remove_keys(evicted)

    def discard(self, entry: Entry) -> None:
        """Remove an entry, for example because a longer one contains it. Repeated calls have no effect."""
        if self._entries.pop(entry.salt, id(entry)) is not None:
            self._remove_keys(entry)

    def _remove_keys(self, entry: Entry) -> None:
        for key in entry.keys:
            holders = self._index[key]
            holders.pop(id(entry), None)
            if not holders:
                del self._index[key]


def _keys(tokens: Sequence[int], salt: str) -> list[int]:
    """Return for each complete block of `tokens` the hash of all tokens up to its end and of `salt`."""
    keys = []
    key = hash(salt)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        keys.append(key)
    return keys


def _shared_length(left: Sequence[int], right: Sequence[int], start: int) -> int:
    """Return the length of the common prefix of two sequences, whose first `start` tokens are equal."""
    end = min(len(left), len(right))
    return next((position for position in range(start, end) if left[position] != right[position]), end)

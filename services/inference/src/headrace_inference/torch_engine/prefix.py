"""Cache of the KV of finished sequences, indexed by their tokens. Each version has its own cache.

Entries are only found with their own salt. Otherwise a tenant could find out other tenants' prompts from
`cached_tokens` or from the time that a prompt takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace_runtime.storage.tenant_memory import TenantMemory

BLOCK = 16
"""Prefixes are indexed at multiples of this number of tokens. The rest of a match is found by comparison."""


@dataclass(slots=True, eq=False)
class Entry:
    """KV of a sequence of tokens, with the keys under which it is indexed."""

    salt: str
    tokens: Sequence[int]
    kv: Tensor
    keys: list[int]

    @property
    def bytes(self) -> int:
        """Size of the KV."""
        return self.kv.numel() * self.kv.element_size()


class PrefixCache:
    """Cache with bounded memory. The tenant with the most bytes loses its least recently used entries first.

    Any prefix of an entry can be used, because the KV of a token depends only on the tokens before it. So sequences
    with the same system prompt share its KV.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: TenantMemory[int, Entry] = TenantMemory(bytes_max)
        self._index: dict[int, dict[int, Entry]] = {}

    @property
    def bytes(self) -> int:
        """Size of the KV of all entries."""
        return self._entries.size

    def longest(self, tokens: Sequence[int], salt: str = "") -> tuple[Entry | None, int]:
        """Return the entry that shares the most blocks with the start of `tokens`, and the number of shared tokens.

        Among equal entries, the newest is returned. Another one may share up to `BLOCK - 1` tokens more.
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
        """Add the KV of `tokens`, unless it is larger than the whole cache or shorter than a block."""
        entry = Entry(salt, tokens, kv, _keys(tokens, salt))
        if not entry.keys or entry.bytes > self._bytes_max:
            return
        for key in entry.keys:
            self._index.setdefault(key, {})[id(entry)] = entry
        for evicted in self._entries.set(salt, id(entry), entry, entry.bytes):
            self._remove_keys(evicted)

    def discard(self, entry: Entry) -> None:
        """Remove an entry, for example because a longer one contains it. It may have been removed before."""
        if self._entries.pop(entry.salt, id(entry)) is not None:
            self._remove_keys(entry)

    def _remove_keys(self, entry: Entry) -> None:
        for key in entry.keys:
            holders = self._index[key]
            holders.pop(id(entry), None)
            if not holders:
                del self._index[key]


def _keys(tokens: Sequence[int], salt: str) -> list[int]:
    """Return one chained hash per complete block."""
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

"""Keeps the KV of finished sequences and finds it by their tokens. Each version has a cache of its own.

Entries of one salt are not found with another, so that nobody can ask what others have asked (`cached_tokens`, or the
time that a prompt takes, would tell).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK = 16
"""Prefixes are indexed at multiples of this many tokens; the rest of a match is found by comparing."""


@dataclass(slots=True, eq=False)
class Entry:
    """The KV of `tokens`, and under which keys it is indexed."""

    salt: str
    tokens: Sequence[int]
    kv: Tensor
    keys: list[int]

    @property
    def bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


class PrefixCache:
    """The least recently used entries go when memory runs out.

    Any prefix of an entry can be used, because a token's KV depends only on what precedes it; so sequences that share
    a system prompt share its KV, whatever they say afterwards.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._index: dict[int, dict[int, Entry]] = {}
        self.bytes = 0

    def longest(self, tokens: Sequence[int], salt: str = "") -> tuple[Entry | None, int]:
        """Of the salt's entries that share most whole blocks with the start of `tokens` the newest, and what it shares.

        Another entry may share up to `BLOCK - 1` tokens more.
        """
        if not self._entries:
            return None, 0
        keys = _keys(tokens, salt)
        for count in range(len(keys), 0, -1):
            sure = count * BLOCK
            for entry in reversed(self._index.get(keys[count - 1], {}).values()):
                if entry.salt == salt and entry.tokens[:sure] == tokens[:sure]:  # keys may collide, tokens do not
                    self._entries.move_to_end(id(entry))
                    return entry, _shared(entry.tokens, tokens, sure)
        return None, 0

    def add(self, tokens: Sequence[int], kv: Tensor, salt: str = "") -> None:
        """Keep `kv` for `tokens`, unless it is larger than the whole cache or shorter than a block."""
        entry = Entry(salt, tokens, kv, _keys(tokens, salt))
        if not entry.keys or entry.bytes > self._bytes_max:
            return
        self._entries[id(entry)] = entry
        self.bytes += entry.bytes
        for key in entry.keys:
            self._index.setdefault(key, {})[id(entry)] = entry
        while self.bytes > self._bytes_max:
            self.discard(next(iter(self._entries.values())))

    def discard(self, entry: Entry) -> None:
        """Remove an entry, for example because a longer one contains it. Removing it twice is fine."""
        if self._entries.pop(id(entry), None) is None:
            return
        self.bytes -= entry.bytes
        for key in entry.keys:
            holders = self._index[key]
            holders.pop(id(entry), None)
            if not holders:
                del self._index[key]


def _keys(tokens: Sequence[int], salt: str) -> list[int]:
    """One chained hash per whole block."""
    keys = []
    key = hash(salt)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        keys.append(key)
    return keys


def _shared(one: Sequence[int], other: Sequence[int], start: int) -> int:
    """How many tokens both begin with, of which `start` are known."""
    end = min(len(one), len(other))
    return next((place for place in range(start, end) if one[place] != other[place]), end)

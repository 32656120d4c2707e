"""Assigns passes to ranks. Pure, and equal in every rank, so that no communication is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def budget(lengths: Sequence[int], pack_tokens: int, ranks: int) -> int:
    """Return the number of tokens of a pass, so that a small batch is divided among all ranks."""
    return max(1, min(pack_tokens, math.ceil(sum(lengths) / ranks)))


def deal(packs: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's passes, in order.

    The longest pass comes first. Each goes to the rank with the fewest tokens so far, the first one of several.
    """
    tokens = [sum(lengths[row] for row in rows) for rows in packs]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    assigned = [0] * ranks
    for number in sorted(range(len(packs)), key=lambda pack: (-tokens[pack], pack)):
        rank = min(range(ranks), key=lambda candidate: (assigned[candidate], candidate))
        hands[rank].append(number)
        assigned[rank] += tokens[number]
    return [sorted(hand) for hand in hands]

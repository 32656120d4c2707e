"""Which rank makes which pass. Pure, and the same in every rank: nobody tells the others."""

from __future__ import annotations

import math
from collections.abc import Sequence


def budget(lengths: Sequence[int], pack_tokens: int, ranks: int) -> int:
    """Tokens of a pass, so that a small batch does not become the one pass of one rank."""
    return max(1, min(pack_tokens, math.ceil(sum(lengths) / ranks)))


def deal(packs: Sequence[Sequence[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the numbers of its passes, in order: the longest pass first, each to the rank that has the fewest
    tokens by then, and of several to the first."""
    tokens = [sum(lengths[row] for row in rows) for rows in packs]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for number in sorted(range(len(packs)), key=lambda one: (-tokens[one], one)):
        rank = min(range(ranks), key=lambda one: (held[one], one))
        hands[rank].append(number)
        held[rank] += tokens[number]
    return [sorted(hand) for hand in hands]

"""Sets of tokens that positions of a sequence were sampled from, and additions to their logits. Pure.

The policy at such a position is softmax(logits / T) restricted to the set. The engine's logprob, the present logprob,
the reference's and the entropy are all those of the restricted distribution (docs/decisions/0023).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_schemas.events.chat import LogitShift

TokenSet = NDArray[np.int32] | NDArray[np.uint8]
"""Either ascending token ids (int32), or the bits of all tokens (uint8): token `t` is bit `t % 8` of byte `t // 8`.

Bits take less memory for more than one token in 32. Equal large sets of a process are one array.
"""


@dataclass(frozen=True)
class SpanShift:
    """Penalties and bias of the tokens from `start` up to `stop`, which are one answer."""

    start: int
    stop: int
    shift: LogitShift


@dataclass(frozen=True, eq=False)
class TokenSets:
    """Sets of some positions of a sequence. All other positions allow every token."""

    positions_P: NDArray[np.int32]
    """Ascending."""
    sets: tuple[TokenSet, ...]
    shifts: tuple[SpanShift, ...] = ()
    """Ascending."""

    @classmethod
    def join(cls, parts: Iterable[tuple[int, TokenSets]], shifts: Iterable[SpanShift] = ()) -> TokenSets | None:
        """Return the sets of several spans, each with its start, and the shifts; None without any."""
        parts, shifts = list(parts), tuple(shifts)
        positions = [sets.positions_P + start for start, sets in parts]
        joined = tuple(each for _, sets in parts for each in sets.sets)
        return cls(_join(positions), joined, shifts) if joined or shifts else None

    def between(self, start: int, stop: int) -> TokenSets | None:
        """Return the sets and shifts of the positions from `start` up to `stop`, at the same positions."""
        first, last = np.searchsorted(self.positions_P, (start, stop))
        shifts = tuple(each for each in self.shifts if start <= each.start and each.stop <= stop)
        return (
            TokenSets(self.positions_P[first:last], self.sets[first:last], shifts) if first < last or shifts else None
        )

    def digest(self) -> bytes:
        """Return the SHA-256 of all positions, sets and shifts."""
        digest = hashlib.sha256(self.positions_P.astype("<i4").tobytes())
        digest_of: dict[int, bytes] = {}
        for each in self.sets:
            if id(each) not in digest_of:
                digest_of[id(each)] = hashlib.sha256(each.dtype.str.encode() + each.tobytes()).digest()
            digest.update(digest_of[id(each)])
        for shift in self.shifts:
            digest.update(f"{shift.start} {shift.stop} {shift.shift.model_dump_json()}".encode())
        return digest.digest()


def _join(positions: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(positions).astype(np.int32) if positions else np.zeros(0, np.int32)


def set_of_ids(ids: Sequence[int], vocabulary: int) -> TokenSet:
    """Return the set of these token ids in its smaller form."""
    array = np.array(sorted(ids), np.int32)
    if len(array) * 32 <= vocabulary:
        return array
    bits = np.zeros((vocabulary + 7) // 8 * 8, np.bool_)
    bits[array] = True
    return np.packbits(bits, bitorder="little")


def set_of_bits(words: NDArray[np.int32], vocabulary: int) -> TokenSet | None:
    """Return the set of a grammar's mask, token `t` being bit `t % 32` of word `t // 32`; None if all are allowed."""
    octets = words.astype("<i4", copy=False).view(np.uint8)[: (vocabulary + 7) // 8].copy()
    if vocabulary % 8:
        octets[-1] &= (1 << vocabulary % 8) - 1
    count = int(np.bitwise_count(octets).sum())
    if count == vocabulary:
        return None
    if count * 32 > vocabulary:
        return octets
    occupied = np.flatnonzero(octets)
    bits = np.unpackbits(octets[occupied], bitorder="little").reshape(-1, 8)
    rows, columns = np.nonzero(bits)
    return (occupied[rows] * 8 + columns).astype(np.int32)

"""Restriction of logits to the tokens that positions were sampled from (`headrace_trainer.experiences.token_sets`).

The head computes logits chunk by chunk, and restricts each chunk in place before the softmax. Bits are unpacked for one
chunk at a time, so no tensor of loss tokens x vocabulary is made. Excluded tokens get a finite logit: their probability
and their gradient are exactly 0, and products with their logprobs are finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_trainer.batches.batch import Row

EXCLUDED = -1e30
"""Logit of an excluded token. It fits bfloat16, and stays finite after division by the lowest temperature."""
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class PackSets:
    """Token sets of a pass. Tensors are on the device, arrays on the host, so that no call waits for the device."""

    restricted_N: Tensor
    """Whether the loss token has a set."""
    bits_UW: Tensor
    """The different large sets as bits (uint8), token `t` being bit `t % 8` of byte `t // 8`."""
    large_N: NDArray[np.int64]
    """Index in `bits_UW` for each loss token, -1 where it has no large set."""
    ids_K: Tensor
    """Ids of all small sets, one after the other."""
    row_K: NDArray[np.int64]
    """Loss token of each of these ids, ascending."""
    small_M: NDArray[np.int64]
    """Loss tokens with a small set, ascending."""

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> PackSets | None:
        """Return the sets of the loss tokens of these rows, in order; None where no row has any."""
        if not any(row.sets is not None for row in rows):
            return None
        index_of: dict[int, int] = {}
        distinct: list[Any] = []
        large_N = np.full(sum(row.tokens for row in rows), -1, np.int64)
        small: list[tuple[int, Any]] = []
        before = 0
        for row in rows:
            numbers_T = np.cumsum(row.loss_mask_T) - 1 + before
            before += row.tokens
            for position, each in () if row.sets is None else zip(row.sets.positions_P, row.sets.sets, strict=True):
                number = int(numbers_T[position])
                if not row.loss_mask_T[position]:
                    continue
                if each.dtype == np.uint8:
                    if id(each) not in index_of:
                        index_of[id(each)] = len(distinct)
                        distinct.append(each)
                    large_N[number] = index_of[id(each)]
                else:
                    small.append((number, each))
        small_M = np.array([number for number, _ in small], np.int64)
        ids_K = np.concatenate([each for _, each in small]).astype(np.int64) if small else _NONE
        row_K = np.repeat(small_M, [len(each) for _, each in small]) if small else _NONE
        bits_UW = np.stack(distinct) if distinct else np.zeros((0, 0), np.uint8)
        restricted_N = large_N >= 0
        restricted_N[small_M] = True
        on_device = (torch.from_numpy(array).to(device) for array in (restricted_N, bits_UW, ids_K))
        restricted, bits, ids = on_device
        return cls(restricted, bits, large_N, ids, row_K, small_M)

    def restrict(self, logits_nV: Tensor, part: slice) -> Tensor:
        """Exclude in place the tokens outside the sets of the loss tokens `part`, and return the logits.

        The logits may have further rows, which do not change.
        """
        count = part.stop - part.start
        large_n = self.large_N[part]
        for first, last in _runs(np.flatnonzero(large_n >= 0)):
            index_m = torch.from_numpy(large_n[first:last]).to(logits_nV.device, non_blocking=True)
            logits_nV[first:last].masked_fill_(self._excluded(index_m, logits_nV.shape[1]), EXCLUDED)
        small_m = self.small_M[slice(*np.searchsorted(self.small_M, (part.start, part.stop)))] - part.start
        if len(small_m):
            assert int(small_m[-1]) < count
            begin, end = np.searchsorted(self.row_K, (part.start, part.stop))
            row_k = torch.from_numpy(self.row_K[begin:end] - part.start).to(logits_nV.device, non_blocking=True)
            ids_k = self.ids_K[begin:end]
            kept_k = logits_nV[row_k, ids_k]
            for first, last in _runs(small_m):
                logits_nV[first:last] = EXCLUDED
            logits_nV[row_k, ids_k] = kept_k
        return logits_nV

    def _excluded(self, index_m: Tensor, vocabulary: int) -> Tensor:
        """Return which tokens the large sets with these indices exclude."""
        powers = 2 ** torch.arange(8, device=index_m.device, dtype=torch.uint8)
        octets_mW8 = self.bits_UW[index_m][:, :, None] & powers
        return (octets_mW8 == 0).flatten(1)[:, :vocabulary]


def _runs(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each run of consecutive ascending numbers, and the number after its last."""
    if not len(numbers):
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = [0, *breaks.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        yield int(numbers[start]), int(numbers[stop - 1]) + 1

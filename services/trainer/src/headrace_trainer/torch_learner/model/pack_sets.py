"""Restriction of logits to the tokens that positions were sampled from, and the penalties and biases of their answers.

`headrace_trainer.experiences.restrictions` has the sets.

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

from headrace_schemas.events.chat import LogitShift
from headrace_trainer.batches.batch import Row
from headrace_trainer.experiences.restrictions import TokenSets

EXCLUDED = -1e30
"""Logit of an excluded token. It fits bfloat16, and stays finite after division by the lowest temperature."""
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class AnswerShift:
    """Values to add to the logits of one answer, since it was sampled with a logit bias or with presence or frequency
    penalties.

    The values depend only on the answer's sampled tokens and its sampling parameters. So no gradient flows through
    them.
    """

    first: int
    """Index of the answer's first token among the loss tokens of the forward pass."""
    words_W: NDArray[np.int64]
    """The words whose logits change: those of the answer, where it has penalties, and those of the bias."""
    word_T: NDArray[np.int64]
    """Index in `words_W` of each token of the answer; empty without penalties."""
    bias_W: NDArray[np.float32]
    presence: float
    frequency: float
    tokens: int
    """Number of tokens of the answer."""

    @classmethod
    def of(cls, first: int, token_ids_T: NDArray[np.int32], shift: LogitShift) -> AnswerShift:
        penalised = bool(shift.presence_penalty or shift.frequency_penalty)
        counted = token_ids_T.astype(np.int64) if penalised else _NONE
        words = np.union1d(counted, np.array(list(shift.logit_bias), np.int64))
        bias = np.zeros(len(words), np.float32)
        bias[np.searchsorted(words, list(shift.logit_bias))] = list(shift.logit_bias.values())
        word_T = np.searchsorted(words, counted)
        return cls(first, words, word_T, bias, shift.presence_penalty, shift.frequency_penalty, len(token_ids_T))

    def values(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return what is added to the logits of `words_W` at the tokens `start .. stop` of the answer."""
        values_TW = np.tile(self.bias_W, (stop - start, 1))
        if len(self.word_T):
            counts_TW = np.zeros_like(values_TW)
            counts_TW[0] = np.bincount(self.word_T[:start], minlength=len(self.words_W))
            counts_TW[np.arange(1, stop - start), self.word_T[start : stop - 1]] = 1
            np.cumsum(counts_TW, axis=0, out=counts_TW)
            values_TW -= np.float32(self.frequency) * counts_TW + np.float32(self.presence) * (counts_TW > 0)
        return values_TW


@dataclass(frozen=True)
class PackSets:
    """Sets of allowed tokens and logit shifts of the loss tokens of one forward pass, by which the head restricts
    logits.

    A loss token has a set if a grammar or a truncation such as `top_p` excluded tokens. Tensors are on the device and
    arrays on the host, so that no call waits for the device.
    """

    restricted_N: Tensor
    """Whether the loss token has a set or a shift."""
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
    shifts: tuple[AnswerShift, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> PackSets | None:
        """Return the token sets of the loss tokens of these rows, in order, or None if no row has any."""
        if not any(row.sets is not None for row in rows):
            return None
        index_of: dict[int, int] = {}
        distinct: list[Any] = []
        large_N = np.full(sum(row.tokens for row in rows), -1, np.int64)
        small: list[tuple[int, Any]] = []
        shifts: list[AnswerShift] = []
        before = 0
        for row in rows:
            numbers_T = np.cumsum(row.loss_mask_T) - 1 + before
            before += row.tokens
            if row.sets is None:
                continue
            shifts += _shifts(row, row.sets, numbers_T)
            for position, each in zip(row.sets.positions_P, row.sets.sets, strict=True):
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
        for shift in shifts:
            restricted_N[shift.first : shift.first + shift.tokens] = True
        on_device = (torch.from_numpy(array).to(device) for array in (restricted_N, bits_UW, ids_K))
        restricted, bits, ids = on_device
        return cls(restricted, bits, large_N, ids, row_K, small_M, tuple(shifts))

    def restrict(self, logits_nV: Tensor, part: slice) -> Tensor:
        """Restrict the logits of the loss tokens `part` in place: add shifts, and exclude tokens outside of the sets.

        The logits may have further rows, which do not change.
        """
        count = part.stop - part.start
        for shift in self.shifts:
            first, last = max(part.start, shift.first), min(part.stop, shift.first + shift.tokens)
            if first < last:
                values_mW = torch.from_numpy(shift.values(first - shift.first, last - shift.first))
                words_W = torch.from_numpy(shift.words_W).to(logits_nV.device, non_blocking=True)
                rows = logits_nV[first - part.start : last - part.start]
                rows.index_add_(1, words_W, values_mW.to(logits_nV.device, logits_nV.dtype, non_blocking=True))
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
        """Return for each large set in `index_m` a mask over the vocabulary that is true for excluded tokens."""
        powers = 2 ** torch.arange(8, device=index_m.device, dtype=torch.uint8)
        octets_mW8 = self.bits_UW[index_m][:, :, None] & powers
        return (octets_mW8 == 0).flatten(1)[:, :vocabulary]


def _shifts(row: Row, sets: TokenSets, numbers_T: NDArray[np.int64]) -> Iterator[AnswerShift]:
    """Yield the shifts of the answers in the loss. `numbers_T` has the loss token of each position."""
    for span in sets.shifts:
        if row.loss_mask_T[span.start]:
            yield AnswerShift.of(int(numbers_T[span.start]), row.token_ids_T[span.start : span.stop], span.shift)


def _runs(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the end (exclusive) of each run of consecutive numbers in an ascending array."""
    if not len(numbers):
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = [0, *breaks.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        yield int(numbers[start]), int(numbers[stop - 1]) + 1

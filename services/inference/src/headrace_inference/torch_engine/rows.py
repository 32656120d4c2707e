"""What a decode step needs to know about each row, as arrays, so that no step loops over rows in Python."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_inference.torch_engine.sampler import uniform
from headrace_inference.torch_engine.sequence import Sequence

PENALISED, TRUNCATED, TOP, HELD = 1, 2, 4, 8
"""Bits of `special`: what makes a row leave the plain path."""


class Rows:
    """Arrays with one place per row. They live on the host; `tensor` hands a column to the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self.last = np.zeros(capacity, np.int64)
        """The newest token, whose KV is not there yet."""
        self.position = np.zeros(capacity, np.int64)
        """Its position."""
        self.temperature = np.ones(capacity, np.float32)
        self.seed = np.zeros(capacity, np.uint64)
        self.drawn = np.zeros(capacity, np.uint64)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.presence = np.zeros(capacity, np.float32)
        self.frequency = np.zeros(capacity, np.float32)
        self.special = np.zeros(capacity, np.uint8)
        self._columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def place(self, row: int, sequence: Sequence) -> None:
        """Fill a row for a sequence that decodes next."""
        how = sequence.sampling
        self.last[row] = sequence.tokens[-1]
        self.position[row] = len(sequence.tokens) - 1
        self.temperature[row] = how.temperature
        self.seed[row] = sequence.seed
        self.drawn[row] = sequence.drawn
        self.top_p[row] = how.top_p
        self.top_k[row] = how.top_k
        self.presence[row] = how.presence_penalty
        self.frequency[row] = how.frequency_penalty
        penalised = PENALISED if how.presence_penalty or how.frequency_penalty else 0
        truncated = TRUNCATED if how.top_p < 1 or how.top_k else 0
        held = HELD if sequence.guide is not None else 0
        self.special[row] = penalised | truncated | held | (TOP if how.top_logprobs else 0)

    def move(self, source: int, target: int) -> None:
        for column in self._columns:
            column[target] = column[source]

    def swap(self, one: int, other: int) -> None:
        for column in self._columns:
            column[[one, other]] = column[[other, one]]

    def advance(self, count: int, ids: NDArray[np.int64]) -> None:
        """The first `count` rows have drawn `ids`."""
        self.last[:count] = ids
        self.position[:count] += 1
        self.drawn[:count] += np.uint64(1)

    def uniform(self, count: int) -> Tensor:
        """This step's random number of each row."""
        return torch.from_numpy(uniform(self.seed[:count], self.drawn[:count])).to(self._device)

    def tensor(self, column: NDArray[np.generic], count: int) -> Tensor:
        """The first `count` places; a view where the device is the host."""
        return torch.from_numpy(column[:count]).to(self._device)

"""Parameters of the rows of a decode step as arrays, so that a step does not loop over rows in Python."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_inference.torch_engine.sampler import uniform
from headrace_inference.torch_engine.sequence import Sequence

PENALISED, TRUNCATED, TOP, HELD, BIASED = 1, 2, 4, 8, 16
"""Bits of `special`: penalties, truncation, top logprobs, grammars and logit biases, which the traced program does not
support."""


class Rows:
    """Arrays with one element per row. They are on the host; `tensor` copies a column to the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self.last = np.zeros(capacity, np.int64)
        """The newest token, whose KV is not computed yet."""
        self.position = np.zeros(capacity, np.int64)
        """Position of this token."""
        self.temperature = np.ones(capacity, np.float32)
        self.seed = np.zeros(capacity, np.uint64)
        self.drawn = np.zeros(capacity, np.uint64)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.min_p = np.zeros(capacity, np.float32)
        self.presence = np.zeros(capacity, np.float32)
        self.frequency = np.zeros(capacity, np.float32)
        self.special = np.zeros(capacity, np.uint8)
        self._columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def fill(self, row: int, sequence: Sequence) -> None:
        """Set the parameters of a row to those of a sequence that begins to decode."""
        sampling = sequence.sampling
        self.last[row] = sequence.tokens[-1]
        self.position[row] = len(sequence.tokens) - 1
        self.temperature[row] = sampling.temperature
        self.seed[row] = sequence.seed
        self.drawn[row] = sequence.drawn
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        penalised = PENALISED if sampling.presence_penalty or sampling.frequency_penalty else 0
        truncated = TRUNCATED if sampling.truncated else 0
        guided = HELD if sequence.guide is not None else 0
        biased = BIASED if sampling.logit_bias else 0
        self.special[row] = penalised | truncated | guided | biased | (TOP if sampling.top_logprobs else 0)

    def move(self, source: int, target: int) -> None:
        """Copy a row to another row."""
        for column in self._columns:
            column[target] = column[source]

    def swap(self, left: int, right: int) -> None:
        """Exchange two rows."""
        for column in self._columns:
            column[[left, right]] = column[[right, left]]

    def advance(self, count: int, ids: NDArray[np.int64]) -> None:
        """Update the first `count` rows, which have drawn `ids`."""
        self.last[:count] = ids
        self.position[:count] += 1
        self.drawn[:count] += np.uint64(1)

    def uniform(self, count: int) -> Tensor:
        """Return the random number of each of the first `count` rows for this step."""
        return torch.from_numpy(uniform(self.seed[:count], self.drawn[:count])).to(self._device)

    def tensor(self, column: NDArray[np.generic], count: int) -> Tensor:
        """Return the first `count` elements on the device. On a CPU this is a view."""
        return torch.from_numpy(column[:count]).to(self._device)

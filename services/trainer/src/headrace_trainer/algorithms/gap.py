"""Measures how much a teacher gains from users' replies, and tests the gain by permutations.

Each answer that followed a reply is graded after its own reply, after the replies of the other runs of its block, and
after none. If replies had no specific information, they could be permuted among the runs of a block and the answers
would be as likely. `DEALS` such permutations are drawn: the share of them in which the answers are at least as likely
is the p-value of the gain (a permutation test: Fisher, "The Design of Experiments", 1935, section 21). It is exact for
any number of runs and any distribution of values. With five runs one permutation in 120 is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 8
"""Largest number of runs among which replies are permuted. It bounds the cost, which grows with the square of a
block."""
PERMUTATIONS = 1999
_ROUNDING = 1e-6
"""Nats per token. The same tokens differ by less between two forward passes."""


@dataclass(frozen=True, slots=True)
class ReplyBlock:
    """Mean logprobs per token of the answers of some runs, after each other's replies."""

    with_reply_BB: Floats
    """The answer of a run (row) after the reply of a run (column)."""
    without_reply_B: Floats
    """Each answer without a reply."""

    @property
    def gaps(self) -> Floats:
        """Gain of each run: its own reply compared with the mean of others', or with none if that is better."""
        own_B = self.with_reply_BB.diagonal()
        others_B = (self.with_reply_BB.sum(1) - own_B) / max(1, len(own_B) - 1)
        return np.asarray(own_B - np.maximum(others_B, self.without_reply_B))


@dataclass(frozen=True, slots=True)
class GapEstimate:
    """Sums over all runs that were measured."""

    count: int = 0
    total: float = 0.0
    observed: float = 0.0
    """Sum over runs of the mean logprobs after the own replies."""
    permuted: tuple[float, ...] = field(default=(0.0,) * PERMUTATIONS, repr=False)
    """The same sum in each permutation."""

    def plus(self, blocks: Iterable[ReplyBlock]) -> GapEstimate:
        """Return the estimate with more runs. The same blocks in the same order get the same permutations."""
        estimate = self
        for block in blocks:
            estimate = estimate._with(block)
        return estimate

    def _with(self, block: ReplyBlock) -> GapEstimate:
        runs_B = np.arange(len(block.without_reply_B))
        deals_KB = np.random.default_rng(self.count).permuted(np.tile(runs_B, (PERMUTATIONS, 1)), axis=1)
        dealt_K = np.asarray(self.permuted) + block.with_reply_BB[runs_B, deals_KB].sum(1)
        return GapEstimate(
            self.count + len(runs_B),
            self.total + float(block.gaps.sum()),
            self.observed + float(block.with_reply_BB[runs_B, runs_B].sum()),
            tuple(dealt_K.tolist()),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def p_value(self) -> float:
        """Probability that replies without specific information reach at least this gain."""
        as_well = np.asarray(self.permuted) >= self.observed - _ROUNDING * self.count
        return float(1 + as_well.sum()) / (1 + PERMUTATIONS)

    @property
    def is_positive(self) -> bool:
        """Whether the mean gain exceeds rounding errors."""
        return math.isfinite(self.mean) and self.mean > _ROUNDING

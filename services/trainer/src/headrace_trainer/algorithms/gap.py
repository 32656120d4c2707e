"""What users' replies are worth to a teacher that is told them, and whether chance would explain it.

Each answer that followed a reply is asked about after its own reply, after those of the other runs of its block, and
after none. If replies said nothing of their own, they could be dealt out among the runs of a block and the answers
would be as likely. That is done `DEALS` times: the share of deals in which the answers are at least as likely is the
probability that chance does as well (a permutation test: Fisher, "The Design of Experiments", 1935, section 21). It is
exact for any number of runs and however values are spread. Of five runs one deal in 120 is as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 8
"""Runs among which replies are dealt, at most: what is asked about grows with their number, and not its square."""
DEALS = 1999
_ROUNDING = 1e-6
"""Nats a token. What the same tokens are worth in two forward passes differs by less."""


@dataclass(frozen=True, slots=True)
class ReplyBlock:
    """Runs, and mean logprobs of a token of their answers."""

    told_BB: Floats
    """Of the answer of a run (row) after the reply of a run (column)."""
    untold_B: Floats
    """After no reply."""

    @property
    def gaps(self) -> Floats:
        """Of each run what its own reply adds to others' in the mean, or to none: to the better of the two."""
        own_B = self.told_BB.diagonal()
        others_B = (self.told_BB.sum(1) - own_B) / max(1, len(own_B) - 1)
        return np.asarray(own_B - np.maximum(others_B, self.untold_B))


@dataclass(frozen=True, slots=True)
class GapEstimate:
    """Of all runs that were measured."""

    count: int = 0
    total: float = 0.0
    as_said: float = 0.0
    """Mean logprobs after the own replies, added up over runs."""
    dealt: tuple[float, ...] = field(default=(0.0,) * DEALS, repr=False)
    """The same in each deal."""

    def plus(self, blocks: Iterable[ReplyBlock]) -> GapEstimate:
        """With more runs. The same blocks in the same order are dealt alike."""
        found = self
        for block in blocks:
            found = found._with(block)
        return found

    def _with(self, block: ReplyBlock) -> GapEstimate:
        runs_B = np.arange(len(block.untold_B))
        deals_KB = np.random.default_rng(self.count).permuted(np.tile(runs_B, (DEALS, 1)), axis=1)
        dealt_K = np.asarray(self.dealt) + block.told_BB[runs_B, deals_KB].sum(1)
        return GapEstimate(
            self.count + len(runs_B),
            self.total + float(block.gaps.sum()),
            self.as_said + float(block.told_BB[runs_B, runs_B].sum()),
            tuple(dealt_K.tolist()),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def chance(self) -> float:
        """How likely replies that say nothing of their own are to do as well."""
        as_well = np.asarray(self.dealt) >= self.as_said - _ROUNDING * self.count
        return float(1 + as_well.sum()) / (1 + DEALS)

    @property
    def positive(self) -> bool:
        """More than rounding."""
        return math.isfinite(self.mean) and self.mean > _ROUNDING

"""Who shares the passes of a step. Alone, one process makes all of them. In a team each makes its own part, and what
they find is added up: the loss is one sum over the batch's tokens, so who computes which token changes nothing but
rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import nn

from headrace_trainer.batches.batch import Row
from headrace_trainer.torch_learner.measures import Measures

IDLE = Row(
    "",
    0,
    np.zeros(2, np.int32),
    np.array([False, True]),
    np.zeros(2, np.float32),
    np.ones(2, np.float32),
    np.float32(0),
    np.zeros(2, np.bool_),
)
"""Nobody's row, of no weight: what a pass is made of that is only made because the others make one."""


class Team(Protocol):
    """Every member calls the same methods in the same order, with the same batch."""

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        """Tokens of one pass over rows of these `lengths`, so that there is work for everybody."""

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Of all passes, as row numbers, those that this member makes. An empty one is a pass over `IDLE`."""

    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make each gradient the sum of all members'."""

    def together(self, measures: Measures) -> Measures:
        """What all members have observed; the same for each."""


class Alone:
    """A `Team` of one."""

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return pack_tokens

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        return packs

    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Its own are all."""

    def together(self, measures: Measures) -> Measures:
        return measures


ALONE = Alone()

"""Division of a step's passes among processes. A single process computes all of them. In a team each process computes a
part, and the gradients are added up: the loss is one sum over the batch's tokens, so the division changes only the
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
"""A row without name and weight. A process without rows of its own computes it when the others compute a pass."""


class Team(Protocol):
    """Processes that share a step. Every member calls the same methods in the same order, with the same batch."""

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        """Return the number of tokens of one pass over rows of these `lengths`, so that every member has work."""

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Return the passes of this member, as row numbers, out of all `packs`. An empty one is a pass over `IDLE`."""

    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each gradient by the sum of all members' gradients."""

    def together(self, measures: Measures) -> Measures:
        """Return the observations of all members, the same for each."""


class Alone:
    """A `Team` of one process."""

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return pack_tokens

    def mine(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        return packs

    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Do nothing, because there are no other members."""

    def together(self, measures: Measures) -> Measures:
        return measures


ALONE = Alone()

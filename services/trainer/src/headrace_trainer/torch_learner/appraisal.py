"""The interface of appraisers, which compute advantages of tokens from a critic's values or a teacher's logprobs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy


class Appraiser(Protocol):
    """Computes advantages once per step, before the weights move. Its state is saved with the optimizer's."""

    @property
    def measured(self) -> Mapping[str, float]:
        """Measurements of the last step."""

    def appraise(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        """Return the passes with `advantage_N` set, and otherwise unchanged.

        An appraiser may add passes of its own, whose rows have no name and no weight. Raises `Abandoned` soon after
        `stop` is set.
        """

    def learn(self) -> Mapping[str, float]:
        """Train the appraiser after a step was taken. Return the advantages for `StepResult.advantages`."""

    def state(self) -> dict[str, Tensor]:
        """Return copies of the state on the CPU."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state; an empty one resets the appraiser."""

"""Who makes the advantages of tokens from what only tensors can say: a critic's values, or a teacher's logprobs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy


class Appraiser(Protocol):
    """Asked once a step, before the weights move. Whoever has one saves its state with the optimizer's."""

    @property
    def measured(self) -> Mapping[str, float]:
        """Of the last step."""

    def appraise(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        """The passes with `advantage_N` in them, and all else as it was; also passes of its own, whose rows are
        nobody's and have no weight. Raises `Abandoned` soon after `stop` is set."""

    def learn(self) -> Mapping[str, float]:
        """The step was taken: learn from it. What `StepResult.advantages` says of its rows."""

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken; where it is empty, begin."""

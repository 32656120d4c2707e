"""The record of how a step trained one example of an experience."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace_trainer.experiences.examples import BRANCH, Example
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.experiences.window import ContributionDetail


@dataclass(frozen=True, slots=True)
class TrainedExperience:
    """Training of one example of an experience by one step.

    `baseline` and `scale` are those of the branch's first training.
    """

    waiting: WaitingExperience
    advantage: float
    baseline: float
    scale: float
    correction: bool = False
    token_weight: float | None = None
    """The token weight of the contribution that is corrected. None: the weights hold no contribution of it, so it is
    trained like a new one."""
    example: Example = BRANCH
    turns: tuple[float, ...] = ()
    """The advantage of each span, where they differ."""
    turn_terms: tuple[float, float] | None = None
    reappraised: bool = False
    """Whether `baseline` belongs to this training and not to the branch's first one."""
    factor: float = 1.0
    """Weight of the gradient of its tokens relative to a token of the batch: the slope of its loss, and its share in a
    mean over sequences."""
    loss_advantage: float | None = None
    """Mean of the advantages that the loss used for its tokens, or None if a teacher computed them."""

    @property
    def name(self) -> str:
        """Return the name of its row in the batch."""
        part = self.example.part
        return f"{self.waiting.experience.experience_id}#{part}" if part else self.waiting.experience.experience_id

    @property
    def contribution_detail(self) -> ContributionDetail | None:
        """Return the details that the window stores, None for a whole branch that was trained with one advantage."""
        example = self.example
        if not (example.part or self.turns):
            return None
        return ContributionDetail(
            part=example.part,
            turn_id=example.turn_id,
            choice=example.choice,
            tokens=example.tokens,
            turns=self.turns,
        )


def by_experience(records: Iterable[TrainedExperience]) -> dict[str, list[TrainedExperience]]:
    """Return the records of each experience, in their order."""
    groups: dict[str, list[TrainedExperience]] = {}
    for record in records:
        groups.setdefault(record.waiting.experience.experience_id, []).append(record)
    return groups

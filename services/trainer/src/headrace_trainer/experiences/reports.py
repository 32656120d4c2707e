"""Records of trained examples, and reports of a save: the published state of the lineage, and outcomes that wait for
the next save.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace_schemas import BatchRecord, Experience, PartitionRead, RestoredOutcome, RevertedOutcome, TrainingOutcome
from headrace_schemas.events.checkpoint import TURNS_MAX, DropReason, TurnAdvantage
from headrace_schemas.values.base import Model
from headrace_trainer.experiences.examples import BRANCH, CorrectionRules, Example
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.experiences.window import ContributionDetail

Offsets = dict[str, dict[int, int]]
"""Topic to partition to the offset of the next record to read."""


@dataclass(frozen=True, slots=True)
class TrainedExperience:
    """Record of one example in a batch: its advantage, and after the step, its contribution to the weights.

    `baseline` and `scale` are those of the first training of the branch, or of the answer with a graded reply.
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
    reestimated: bool = False
    """Whether `baseline` belongs to this training and not to the branch's first one."""
    factor: float = 1.0
    """Weight of the gradient of its tokens relative to a token of the batch: the slope of its loss, and its share in a
    mean over sequences."""
    loss_advantage: float | None = None
    """Mean of the advantages that the loss used for its tokens, or None if a teacher computed them."""

    @property
    def name(self) -> str:
        """Id of the example within its batch, as in `Row.name`: the experience id, followed by `#` and the example's
        part unless the example is the whole branch."""
        part = self.example.part
        return f"{self.waiting.experience.experience_id}#{part}" if part else self.waiting.experience.experience_id

    @property
    def contribution_detail(self) -> ContributionDetail | None:
        """Details that the window stores; None for a whole branch that was trained with one advantage."""
        example = self.example
        if not (example.part or self.turns):
            return None
        return ContributionDetail(
            part=example.part,
            turn_id=example.turn_id,
            choice=example.choice,
            tokens=example.tokens,
            turns=self.turns,
            terms=None if example.grade is None else (self.baseline, self.scale),
        )


def group_by_experience(records: Iterable[TrainedExperience]) -> dict[str, list[TrainedExperience]]:
    """Group records by the id of their experience, in their order."""
    groups: dict[str, list[TrainedExperience]] = {}
    for record in records:
        groups.setdefault(record.waiting.experience.experience_id, []).append(record)
    return groups


class SaveReport(NamedTuple):
    """The part of a save that is published on the bus: outcomes, reversals and batches since the previous save."""

    outcomes: tuple[TrainingOutcome, ...] = ()
    undone: tuple[RevertedOutcome, ...] = ()
    restored: tuple[RestoredOutcome, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    read: tuple[PartitionRead, ...] = ()


class UnreportedOutcomes(Model):
    """Outcomes that did not fit into the last report and are in the next one."""

    outcomes: tuple[TrainingOutcome, ...] = ()
    undone: tuple[RevertedOutcome, ...] = ()
    restored: tuple[RestoredOutcome, ...] = ()


def training_outcome(
    experience: Experience,
    dropped: DropReason | None,
    detail: str | None,
    left_out: tuple[str, ...],
    records: Sequence[TrainedExperience],
    rules: CorrectionRules,
) -> TrainingOutcome:
    """Build the event item with the training outcome of one revision of an experience.

    Args:
        experience: the revision.
        detail: detail of `dropped`.
        dropped: reason why it was dropped, or None if it was trained.
        left_out: its turns whose answers lack logprobs that training needs.
        records: its examples as a step trained them; empty if it was dropped.
        rules: select the trained spans of a branch.
    """
    advantage, turns = None, []
    for record in records:
        example, value = record.example, record.loss_advantage
        if example.part and example.turn_id and value is not None:
            turns.append(TurnAdvantage(turn_id=example.turn_id, advantage=value, edited=bool(example.tokens)))
        elif value is not None:
            advantage = value
            turns += _turn_advantages(record, rules)
    return TrainingOutcome(
        experience_id=experience.experience_id,
        revision=experience.revision,
        turn_ids=experience.turn_ids,
        dropped=dropped,
        detail=detail,
        left_out=left_out,
        advantage=advantage,
        turn_advantages=tuple(turns[:TURNS_MAX]),
    )


def _turn_advantages(record: TrainedExperience, rules: CorrectionRules) -> list[TurnAdvantage]:
    """Return for each turn of a branch the mean of its tokens' advantages; empty if the branch was trained with a
    single advantage.
    """
    branch = record.waiting.experience.branch
    trained = None if branch is None or not record.turns else rules.trained_branch(branch)
    if trained is None:
        return []
    sums: dict[str, tuple[float, int]] = {}
    for span, advantage in zip(trained.spans, record.turns, strict=True):
        total, tokens = sums.get(span.turn_id, (0.0, 0))
        sums[span.turn_id] = total + advantage * len(span.logprobs), tokens + len(span.logprobs)
    return [TurnAdvantage(turn_id=name, advantage=total / tokens) for name, (total, tokens) in sums.items() if tokens]

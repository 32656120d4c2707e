"""Find the updates that the weights still lack for an experience: new examples, corrections and reversals. Pure.

The window remembers the contributions of each example (`part`) to the weights. An example with a value (an edit, a side
of a preference) must have contributions of that value in total. An example that was withdrawn or replaced must have
contributions of zero. A branch must have the advantage of its present reward, by the baseline and scale of its first
training. The difference is trained as a correction, with the opposite sign where the weights hold too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_schemas import Branch, Experience
from headrace_trainer.experiences.examples import BRANCH, Example
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.window import Contribution, Entry

SpanAdvantages = tuple[float, ...]
"""The advantage of each span of a branch."""


@dataclass(frozen=True, slots=True)
class CorrectionRules:
    """Rules that turn rewards into advantages after the first training."""

    advantage_max: float
    correction_min: float
    worth: Callable[[float], float] | None = None
    """Maps a reward to the value that the algorithm uses."""
    credit: Callable[[float, Sequence[float | None], float, float], SpanAdvantages] | None = None
    """Computes the advantages of the spans, where turns have advantages of their own."""
    reappraise_lost: bool = False
    """Whether an example that the weights have lost is appraised like a new one: a critic has changed since the first
    training."""
    logprobs: bool = True
    """Whether answers are trained by the logprobs of the policy that sampled them."""

    def trained_branch(self, branch: Branch) -> Branch | None:
        """Return the branch with the spans that can be trained, None without any."""
        return branch.sampled if self.logprobs else branch


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An example and the advantage that training must still apply to it.

    `advantage` is None until the reward was compared with its group.
    """

    example: Example
    advantage: float | None
    token_weight: float | None = None
    """Token weight of the contribution that is corrected, or None where the weights hold none."""
    turns: SpanAdvantages = ()
    """The missing advantage of each span, where turns have advantages of their own."""

    @property
    def is_new(self) -> bool:
        """Whether the weights hold no contribution of the example."""
        return self.token_weight is None


def pending_updates(
    experience: Experience,
    entry: Entry | None,
    examples: Sequence[Example],
    history: History,
    steps: int,
    rules: CorrectionRules,
) -> tuple[PendingUpdate, ...]:
    """Return the updates that the weights still lack for an experience.

    Args:
        experience: The newest revision of the experience.
        entry: The window's entry of the experience, or None if it was not seen before.
        given: The examples that the experience has now.
        history: The versions of the lineage.
        steps: The number of steps that the lineage has taken.
        terms: The rules that turn its reward into an advantage.

    Returns:
        The updates of `given`, in their order, followed by reversals of examples that were withdrawn.
    """
    if entry is None or not entry.trained:
        return tuple(PendingUpdate(example, example.value) for example in examples)
    contributions: dict[str, list[Contribution]] = {}
    for contribution in entry.held_contributions(history, steps):
        contributions.setdefault(contribution.part, []).append(contribution)
    trained_parts = {contribution.part for contribution in entry.contributions}
    updates: list[PendingUpdate] = []
    for example in examples:
        if example.value is None and (
            example.part not in trained_parts or (rules.reappraise_lost and example.part not in contributions)
        ):
            updates.append(PendingUpdate(example, None))
        else:
            target = _advantage(experience, entry, example, rules) if example.value is None else example.value
            turns = _span_advantages(experience, entry, target, rules) if example.is_branch else ()
            updates.append(_pending_update(example, target, turns, contributions.pop(example.part, [])))
    updates += [
        _pending_update(_withdrawn_example(reversed_contributions[0]), 0.0, (), reversed_contributions)
        for reversed_contributions in contributions.values()
    ]
    return tuple(update for update in updates if update.advantage is None or _exceeds(update, rules.correction_min))


def turns_of(experience: Experience, rules: CorrectionRules) -> tuple[float | None, ...]:
    """Return the reward of each trained span's turn at the first span of the turn, and None at the other spans."""
    assert experience.branch is not None
    branch = rules.trained_branch(experience.branch)
    assert branch is not None, "an experience without a span that can be trained has no branch to train"
    rewards: dict[str, float | None] = {reward.turn_id: reward.value for reward in experience.turn_rewards}
    return tuple(rewards.pop(span.turn_id, None) for span in branch.spans)


def _advantage(experience: Experience, entry: Entry, example: Example, rules: CorrectionRules) -> float:
    if example.grade is not None:
        return entry.advantage_of(example.grade, rules.advantage_max, example.part)
    reward = experience.reward
    if reward is not None and rules.worth is not None:
        reward = rules.worth(reward)
    return entry.advantage_of(reward, rules.advantage_max)


def _span_advantages(experience: Experience, entry: Entry, advantage: float, rules: CorrectionRules) -> SpanAdvantages:
    if rules.credit is None:
        return ()
    advantages = rules.credit(advantage, turns_of(experience, rules), *(entry.turn_terms or (0.0, 0.0)))
    return tuple(max(-rules.advantage_max, min(rules.advantage_max, value)) for value in advantages)


def _pending_update(
    example: Example, target: float, target_turns: SpanAdvantages, contributions: Sequence[Contribution]
) -> PendingUpdate:
    missing = target - math.fsum(contribution.advantage for contribution in contributions)
    spans = max((len(contribution.turns) for contribution in contributions), default=len(target_turns))
    by_span = [
        (target_turns[span] if span < len(target_turns) else 0.0)
        - math.fsum(contribution.turns[span] for contribution in contributions if span < len(contribution.turns))
        for span in range(spans)
    ]
    return PendingUpdate(example, missing, contributions[0].token_weight if contributions else None, tuple(by_span))


def _exceeds(update: PendingUpdate, correction_min: float) -> bool:
    assert update.advantage is not None
    return max(map(abs, update.turns or (update.advantage,))) >= correction_min


def _withdrawn_example(contribution: Contribution) -> Example:
    detail = contribution.what
    if detail is None or not detail.part:
        return BRANCH
    return Example(detail.part, None, "", detail.turn_id, detail.choice, detail.tokens)

"""The reward policy, which combines the rewards of many sources into one reward per branch. Pure functions.

The reward of a branch is the weighted mean over the sources that scored it, whose weights are renormalised to 1, or
their weighted sum. A source that abstained, failed or was late takes no part and never counts as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Literal

from headrace_schemas import RewardPart
from headrace_schemas.events.feedback import Outcome
from headrace_schemas.events.trajectory import NoReward
from headrace_schemas.values.ids import first_match, matches, matches_any

PARTS_MAX = 64
"""Largest number of sources that count in one reward: an experience holds as many parts."""


@dataclass(frozen=True, slots=True)
class SourceReward:
    """Newest revision of one source's reward for a trajectory or for one of its turns."""

    source: str
    turn_id: str | None
    outcome: Outcome
    value: float | None
    choice: int | None = None
    """Index of the answer that the reward is about. None for a reward of the whole turn or trajectory."""


@dataclass(frozen=True, slots=True)
class BranchReward:
    """The combined reward of one branch, or the reason why it has none."""

    reward: float | None
    no_reward: NoReward | None
    parts: tuple[RewardPart, ...] = ()
    left_out: tuple[str, ...] = ()
    """Sources with a weight and a score that do not count, because there are more than `PARTS_MAX`. Sorted."""


@dataclass(frozen=True, slots=True)
class RewardPolicy:
    """Rules that combine rewards: the weights of sources, and the sources that an experience waits for.

    The first pattern in `weights` that fits a source determines its weight.
    """

    weights: Mapping[str, float]
    required: Sequence[str] = ()
    expected: Sequence[str] = ()
    functions: Sequence[str] = ()
    """Sources that are reward functions of this scorer. They are expected, too."""
    combine: Literal["mean", "sum"] = "mean"
    unrewarded_branches: bool = False
    """Whether an experience without a reward contains its branch."""

    def weight(self, source: str) -> float:
        """Return the weight of a source in the reward, or 0 if no pattern in `weights` matches its name."""
        return first_match(self.weights, source) or 0.0

    def have_others_answered(self, source_rewards: Sequence[SourceReward], learned: str) -> bool:
        """Return whether every expected source except the reward model `learned` has answered.

        The reward model is left out because it scores last, from the rewards of the others.
        """
        patterns = [pattern for pattern in (*self.expected, *self.functions) if not matches(pattern, learned)]
        return _each_fits(patterns, {reward.source for reward in source_rewards})

    def is_complete(self, source_rewards: Sequence[SourceReward]) -> bool:
        """Return whether every expected source has answered and every required source has given a score."""
        answered = {reward.source for reward in source_rewards}
        scored = {reward.source for reward in source_rewards if reward.outcome == "scored"}
        return (
            _each_fits([*self.expected, *self.functions], answered)
            and _each_fits(self.required, scored)
            and any(self.weight(source) for source in scored)
        )

    def branch_reward(
        self, source_rewards: Sequence[SourceReward], turn_ids: Sequence[str], *, rewarded: bool
    ) -> BranchReward:
        """Return the reward of a branch.

        Args:
            turn_ids: turns of the branch.
            rewarded: whether an earlier revision had a reward. Then a missing reward counts as withdrawn.
        """
        values = self._values(source_rewards, turn_ids)
        parts = self._parts(values)
        if not parts:
            return BranchReward(None, "withdrawn" if rewarded else "no_reward")
        if not _each_fits(self.required, values):
            return BranchReward(None, "withdrawn" if rewarded else "required_source_missing")
        counted = {part.source for part in parts}
        left_out = tuple(source for source in sorted(values) if self.weight(source) and source not in counted)
        return BranchReward(self._total(parts), None, parts, left_out[:PARTS_MAX])

    def turn_reward(self, source_rewards: Sequence[SourceReward], turn_id: str) -> float | None:
        """Return the combined reward of the sources that scored this turn, or None if no such source has a weight.

        Weights are those of the branch's reward.
        """
        of_turn = [reward for reward in source_rewards if reward.turn_id == turn_id]
        parts = self._parts(self._values(of_turn, [turn_id]))
        return self._total(parts) if parts else None

    def _parts(self, values: Mapping[str, float]) -> tuple[RewardPart, ...]:
        """Return, for each source with a weight, its value and weight, sorted by name. For a mean the weights add up to
        1.

        At most `PARTS_MAX` sources count: first required sources, then those with the largest weights.
        """
        weights = {source: weight for source in sorted(values) if (weight := self.weight(source))}
        if len(weights) > PARTS_MAX:
            first = sorted(
                weights, key=lambda source: (not matches_any(self.required, source), -weights[source], source)
            )
            weights = {source: weights[source] for source in sorted(first[:PARTS_MAX])}
        total = sum(weights.values()) if self.combine == "mean" else 1.0
        return tuple(
            RewardPart(source=source, value=values[source], weight=weight / total) for source, weight in weights.items()
        )

    def _values(self, source_rewards: Sequence[SourceReward], turn_ids: Sequence[str]) -> dict[str, float]:
        """Return the reward value of each source for one branch (a token sequence of the trajectory).

        A source's value for the whole trajectory is used if it gave one, else the mean of its values for the turns
        `turn_ids`. If a source rewarded both a turn and the answer of it that the branch contains, the value of the
        answer is used.
        """
        of_trajectory: dict[str, float] = {}
        by_turn: dict[str, dict[str, float]] = {}
        rewards = sorted(source_rewards, key=lambda item: (item.source, item.turn_id or "", item.choice is not None))
        for reward in rewards:
            if reward.value is None:
                continue
            if reward.turn_id is None:
                of_trajectory[reward.source] = reward.value
            elif reward.turn_id in turn_ids:
                by_turn.setdefault(reward.source, {})[reward.turn_id] = reward.value
        return {source: fmean(values.values()) for source, values in by_turn.items()} | of_trajectory

    def _total(self, parts: Sequence[RewardPart]) -> float:
        """Return the reward: the weighted mean or sum (`combine`) of the sources' values, rounded once, at the end.

        Algorithms compare rewards with thresholds. Rounding the weights first could make a reward of exactly 0.5
        smaller.
        """
        weights = [Fraction(self.weight(part.source)) for part in parts]
        total = sum(Fraction(part.value) * weight for part, weight in zip(parts, weights, strict=True))
        return float(total / sum(weights) if self.combine == "mean" else total)


def _each_fits(patterns: Iterable[str], sources: Iterable[str]) -> bool:
    names = list(sources)
    return all(any(matches(pattern, name) for name in names) for pattern in patterns)

"""How the rewards of many sources become one reward. Pure.

The reward of a branch is the weighted mean over the sources that scored it, whose weights are renormalised to 1, or
their weighted sum. A source that abstained, failed or was late takes no part and never counts as 0 (P6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace_schemas import RewardPart
from headrace_schemas.events.experience import NoReward
from headrace_schemas.events.reward import Outcome
from headrace_schemas.source_patterns import fits, fits_any

PARTS_MAX = 64
"""Most sources that count in one reward: an experience holds as many parts."""


@dataclass(frozen=True, slots=True)
class SourceReward:
    """What one source currently says about a trajectory, or about one turn of it: its newest revision."""

    source: str
    turn_id: str | None
    outcome: Outcome
    value: float | None
    choice: int | None = None
    """Which answer of the turn it is about, when it is about one."""


@dataclass(frozen=True, slots=True)
class BranchReward:
    """The combined reward of one branch, or the reason why it has none."""

    reward: float | None
    no_reward: NoReward | None
    parts: tuple[RewardPart, ...] = ()
    left_out: tuple[str, ...] = ()
    """Sources with a weight and a score that do not count, because there are more than `PARTS_MAX`; by name."""


@dataclass(frozen=True, slots=True)
class RewardPolicy:
    """The weight of each source (the first pattern that fits), which sources are required and which are expected."""

    weights: Mapping[str, float]
    required: Sequence[str] = ()
    expected: Sequence[str] = ()
    functions: Sequence[str] = ()
    """Sources that are our own reward functions. They are expected, too."""
    combine: Literal["mean", "sum"] = "mean"
    unrewarded_branches: bool = False
    """Whether a branch comes with its experience where that has no reward."""

    def weight(self, source: str) -> float:
        return next((weight for pattern, weight in self.weights.items() if fits(pattern, source)), 0.0)

    def answered(self, source_rewards: Sequence[SourceReward], learned: str) -> bool:
        """Whether everybody that is waited for has answered, but for the source `learned`, which speaks last."""
        others = [pattern for pattern in (*self.expected, *self.functions) if not fits(pattern, learned)]
        return _each_fits(others, {one.source for one in source_rewards})

    def complete(self, source_rewards: Sequence[SourceReward]) -> bool:
        """Whether nothing is left to wait for: each expected source has answered, each required one with a score."""
        answered = {one.source for one in source_rewards}
        scored = {one.source for one in source_rewards if one.outcome == "scored"}
        return (
            _each_fits([*self.expected, *self.functions], answered)
            and _each_fits(self.required, scored)
            and any(self.weight(source) for source in scored)
        )

    def branch_reward(
        self, source_rewards: Sequence[SourceReward], turn_ids: Sequence[str], *, rewarded: bool
    ) -> BranchReward:
        """The reward of the branch with these turns. `rewarded`: the branch had a reward before."""
        values = self._values(source_rewards, turn_ids)
        parts = self._parts(values)
        if not parts:
            return BranchReward(None, "withdrawn" if rewarded else "no_reward")
        if not _each_fits(self.required, values):
            return BranchReward(None, "withdrawn" if rewarded else "required_source_missing")
        counted = {part.source for part in parts}
        left_out = tuple(source for source in sorted(values) if self.weight(source) and source not in counted)
        return BranchReward(_total(parts), None, parts, left_out[:PARTS_MAX])

    def turn_reward(self, source_rewards: Sequence[SourceReward], turn_id: str) -> float | None:
        """What the sources that judge this turn by itself amount to, by the same weights; None when none does."""
        own = [one for one in source_rewards if one.turn_id == turn_id]
        parts = self._parts(self._values(own, [turn_id]))
        return _total(parts) if parts else None

    def _parts(self, values: Mapping[str, float]) -> tuple[RewardPart, ...]:
        """The share of each source that counts, by name. In a mean the weights add up to 1.

        Of more than `PARTS_MAX` those that are required count first, then those with the largest weight.
        """
        weights = {source: weight for source in sorted(values) if (weight := self.weight(source))}
        if len(weights) > PARTS_MAX:
            first = sorted(weights, key=lambda source: (not fits_any(self.required, source), -weights[source], source))
            weights = {source: weights[source] for source in sorted(first[:PARTS_MAX])}
        total = sum(weights.values()) if self.combine == "mean" else 1.0
        return tuple(
            RewardPart(source=source, value=values[source], weight=weight / total) for source, weight in weights.items()
        )

    def _values(self, source_rewards: Sequence[SourceReward], turn_ids: Sequence[str]) -> dict[str, float]:
        """The value of each source: that for the whole trajectory, else the mean of those for turns of the branch.

        What is about the very answer that the branch holds goes before what is about its turn.
        """
        whole: dict[str, float] = {}
        by_turn: dict[str, dict[str, float]] = {}
        for one in sorted(source_rewards, key=lambda item: (item.source, item.turn_id or "", item.choice is not None)):
            if one.value is None:
                continue
            if one.turn_id is None:
                whole[one.source] = one.value
            elif one.turn_id in turn_ids:
                by_turn.setdefault(one.source, {})[one.turn_id] = one.value
        return {source: sum(found.values()) / len(found) for source, found in by_turn.items()} | whole


def _total(parts: Iterable[RewardPart]) -> float:
    return sum(part.value * part.weight for part in parts)


def _each_fits(patterns: Iterable[str], sources: Iterable[str]) -> bool:
    names = list(sources)
    return all(any(fits(pattern, name) for name in names) for pattern in patterns)

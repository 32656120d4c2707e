"""How the verdicts of many sources become one reward. Pure.

The reward of a branch is the weighted mean over the sources that scored it, renormalised: whoever abstained, failed or
was late takes no part, and never counts as 0 (P6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace_schemas import RewardPart
from headrace_schemas.events.experience import NoReward
from headrace_schemas.events.reward import Outcome
from headrace_scorer.patterns import fits


@dataclass(frozen=True, slots=True)
class Verdict:
    """A source's current word on a trajectory, or on one turn of it."""

    source: str
    turn_id: str | None
    outcome: Outcome
    value: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """What the verdicts amount to for one branch: a reward, or why there is none."""

    reward: float | None
    no_reward: NoReward | None
    parts: tuple[RewardPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights by pattern, the first that fits; patterns of the sources that must have scored or are waited for."""

    weights: Mapping[str, float]
    required: Sequence[str] = ()
    expected: Sequence[str] = ()
    functions: Sequence[str] = ()
    """Sources that are reward functions of ours; expected, too."""

    def weight(self, source: str) -> float:
        return next((weight for pattern, weight in self.weights.items() if fits(pattern, source)), 0.0)

    def complete(self, verdicts: Sequence[Verdict]) -> bool:
        """Whether nobody is left to wait for: all that are expected have spoken, the required ones with a score."""
        spoken = {verdict.source for verdict in verdicts}
        scored = {verdict.source for verdict in verdicts if verdict.outcome == "scored"}
        return (
            _each_fits([*self.expected, *self.functions], spoken)
            and _each_fits(self.required, scored)
            and any(self.weight(source) for source in scored)
        )

    def standing(self, verdicts: Sequence[Verdict], turn_ids: Sequence[str], *, rewarded: bool) -> Standing:
        """For the branch of these turns. `rewarded` is whether it has had a reward before."""
        values = self._values(verdicts, turn_ids)
        weights = {source: self.weight(source) for source in values}
        total = sum(weights.values())
        if not total:
            return Standing(None, "withdrawn" if rewarded else "no_reward")
        if not _each_fits(self.required, values):
            return Standing(None, "withdrawn" if rewarded else "required_source_missing")
        parts = tuple(
            RewardPart(source=source, value=values[source], weight=weights[source] / total)
            for source in sorted(values)
            if weights[source]
        )
        return Standing(sum(part.value * part.weight for part in parts), None, parts)

    def _values(self, verdicts: Sequence[Verdict], turn_ids: Sequence[str]) -> dict[str, float]:
        """Each source's value: its verdict on the whole, else the mean of its verdicts on turns of the branch."""
        whole: dict[str, float] = {}
        by_turn: dict[str, list[float]] = {}
        for verdict in sorted(verdicts, key=lambda one: (one.source, one.turn_id or "")):
            if verdict.value is None:
                continue
            if verdict.turn_id is None:
                whole[verdict.source] = verdict.value
            elif verdict.turn_id in turn_ids:
                by_turn.setdefault(verdict.source, []).append(verdict.value)
        return {source: sum(values) / len(values) for source, values in by_turn.items()} | whole


def _each_fits(patterns: Iterable[str], sources: Iterable[str]) -> bool:
    names = list(sources)
    return all(any(fits(pattern, name) for name in names) for pattern in patterns)

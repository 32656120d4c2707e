"""Combination of verdicts into judgements. Pure; each value of a judgement is between 0 and 1.

If there are several verdicts on one question (`samples`), their median counts. More than half of the answers must be
readable and not abstain. Each pair is judged in both orders. If the winner changes with the order, it is a tie.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from headrace_judge.rubric import SCALE_MAX, SCALE_MIN, Rubric
from headrace_judge.verdict import Unreadable, Verdict, shorten

Outcome = Literal["scored", "abstained", "failed", "parse_error", "timed_out"]
Reading = Verdict | Unreadable


class Judgement(BaseModel):
    """Judgement of one run. `value` is set exactly if `outcome` is `scored`."""

    model_config = ConfigDict(frozen=True)

    outcome: Outcome
    reason: str
    value: float | None = None
    criteria: dict[str, float] = {}


def judge_run(rubric: Rubric, readings: Sequence[Reading]) -> Judgement:
    """Combine the verdicts on one run: the weighted mean of the criteria's medians, with the scale mapped to 0..1."""
    numbers, reason = _medians(readings)
    if isinstance(numbers, Judgement):
        return numbers
    criteria = {name: (score - SCALE_MIN) / (SCALE_MAX - SCALE_MIN) for name, score in numbers.items()}
    return Judgement(outcome="scored", value=_weighted_mean(rubric.weights, criteria), criteria=criteria, reason=reason)


def judge_pair(rubric: Rubric, first_as_a: Sequence[Reading], first_as_b: Sequence[Reading]) -> Judgement:
    """Combine the verdicts on a pair into the judgement of its first run: 1 if it won, 0 if it lost, 0.5 for a tie.

    A tie has the reason `order` if the two orders disagree, and `tie` if neither order prefers a run.

    Args:
        rubric: the rubric.
        first_as_a: verdicts on the prompt that shows the first run as A.
        first_as_b: verdicts on the prompt that shows the first run as B.
    """
    first, reason = _medians(first_as_a)
    if isinstance(first, Judgement):
        return first
    second, second_reason = _medians(first_as_b)
    if isinstance(second, Judgement):
        return second
    sides = _side(_weighted_mean(rubric.weights, first)), -_side(_weighted_mean(rubric.weights, second))
    criteria = {name: _agreed_score(_side(first[name]), -_side(second[name])) for name in first}
    if sides[0] != sides[1]:
        reason = "order"
    elif sides[0] == 0:
        reason = "tie"
    else:
        reason = f"{reason} / {second_reason}"
    return Judgement(outcome="scored", value=_agreed_score(*sides), criteria=criteria, reason=reason)


def judge_equal_runs(rubric: Rubric) -> Judgement:
    """Return the judgement of a pair of runs with equal transcripts: a tie, without a call of the model."""
    criteria = dict.fromkeys(rubric.weights, 0.5)
    return Judgement(outcome="scored", value=0.5, criteria=criteria, reason="equal")


def swap_runs(judgement: Judgement) -> Judgement:
    """Convert a judgement of a pair's first run to that of its second run: each score becomes 1 minus the score."""
    if judgement.value is None:
        return judgement
    criteria = {name: 1 - value for name, value in judgement.criteria.items()}
    return judgement.model_copy(update={"value": 1 - judgement.value, "criteria": criteria})


def win_rate(results: Sequence[tuple[str, Judgement]], waiting: int) -> Judgement | None:
    """Combine the judgements of a run's pairs into its win rate.

    Return None if no pair was judged yet. If no judgement has a score, return the most frequent outcome of the pairs.

    Args:
        results: opponents, with the judgement of each pair for this run.
        waiting: number of pairs that are not judged yet.
    """
    scored = [(opponent, item) for opponent, item in results if item.value is not None]
    if not scored:
        if waiting or not results:
            return None
        outcome = Counter(item.outcome for _, item in results).most_common(1)[0][0]
        example = next(item for _, item in results if item.outcome == outcome)
        return Judgement(outcome=outcome, reason=f"none of {len(results)} pairs was decided: {example.reason}")
    names = scored[0][1].criteria
    criteria = {name: statistics.fmean(item.criteria.get(name, 0.5) for _, item in scored) for name in names}
    value = statistics.fmean(item.value for _, item in scored if item.value is not None)
    lines = [f"win rate over {len(scored)} pairs", *(_line(opponent, item) for opponent, item in results)]
    return Judgement(outcome="scored", value=value, criteria=criteria, reason=shorten("\n".join(lines)))


def _line(opponent: str, judgement: Judgement) -> str:
    names = {1.0: "won", 0.0: "lost", 0.5: "tied"}
    result = judgement.outcome if judgement.value is None else names[judgement.value]
    return f"{result} against {opponent}: {judgement.reason}"


def _medians(readings: Sequence[Reading]) -> tuple[dict[str, float] | Judgement, str]:
    """Combine the readings of several answers of the judge to the same question.

    Args:
        readings: a verdict for each answer, or the reason why the answer was unreadable.

    Returns:
        The median score of each criterion, and the reason in the first verdict with scores. If at most half of the
        readings have scores, a judgement without a value, and an empty reason.
    """
    scored = [item for item in readings if isinstance(item, Verdict) and item.criteria is not None]
    if 2 * len(scored) > len(readings):
        names = scored[0].criteria or {}
        medians = {name: float(statistics.median((item.criteria or {})[name] for item in scored)) for name in names}
        return medians, scored[0].reason
    unreadable = [item for item in readings if isinstance(item, Unreadable)]
    if unreadable:
        return Judgement(outcome="parse_error", reason=shorten(str(unreadable[0]))), ""
    abstained = next(item for item in readings if isinstance(item, Verdict) and item.criteria is None)
    return Judgement(outcome="abstained", reason=f"the model abstains: {abstained.reason}"), ""


def _weighted_mean(weights: Mapping[str, float], values: Mapping[str, float]) -> float:
    """Return the mean of the criteria's values, weighted by the rubric."""
    return sum(weights[name] * value for name, value in values.items()) / sum(weights.values())


def _side(value: float) -> int:
    """Return the sign of a value: -1, 0 or 1. Values that differ from 0 only by rounding count as 0."""
    return 0 if abs(value) < 1e-9 else 1 if value > 0 else -1


def _agreed_score(first: int, second: int) -> float:
    """Return the score of a pair on whose winner both orders agree (1, 0, or 0.5 for a tie), otherwise 0.5."""
    return (first + 1) / 2 if first == second else 0.5

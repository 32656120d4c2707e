"""Detection of reward hacking and of training that no longer improves the audit score.

**Reward rises, score falls.** Over the last `WINDOW` versions with an audit score, the Mann-Kendall trend test is
applied twice: to the training reward (upward) and to the score (downward). The test only assumes that without a trend
all orders are equally likely, whatever the noise. Both tests must reject at `ALPHA`, so if the score does not fall or
the reward does not rise, a single check raises a false alarm with probability at most `ALPHA`. Checks overlap; a unit
test measures the false alarm rate over a hundred versions.

**Flat score.** The newer half of the window is compared with the older half, using the standard errors of the scores.
The score is flat if the 95 % upper bound of the gain is below `GAIN`: a model whose newer half is better by `GAIN` is
called flat with probability at most 5 %. A score that is not called flat has not been shown to rise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal

from headrace.errors import UsageError
from headrace.topics import Range, Topics
from headrace_schemas import Event, ModelEvent, TrainingMetrics

WINDOW = 12
"""Number of newest versions that are checked; a trend needs at least `WINDOW_MIN`."""
WINDOW_MIN = 8
ALPHA = 0.01
GAIN = 0.05
"""Smallest gain that is worth detecting, in the unit of scores."""
_Z95 = 1.645


@dataclass(frozen=True, slots=True)
class Point:
    """Mean training reward of one version, and the version's score on the held-out audit tasks with its standard
    error.
    """

    reward: float | None
    score: float
    error: float
    """Standard error of the score."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that the rewards and scores of a model's newest versions show, with a remedy in its text."""

    model: str
    kind: Literal["hacked", "flat"]
    text: str
    """The observation and the remedy."""


def judge(model: str, points: Sequence[Point]) -> Finding | None:
    """Return the problem that rewards and scores of a lineage's versions show, or None.

    Args:
        model: name of the model, for the text.
        points: the versions of the lineage, the oldest first.
    """
    recent = points[-WINDOW:]
    rewarded = [point for point in points if point.reward is not None][-WINDOW:]
    if len(rewarded) >= WINDOW_MIN:
        rewards = [point.reward for point in rewarded if point.reward is not None]
        scores = [point.score for point in rewarded]
        if mann_kendall_p_value(rewards) <= ALPHA and mann_kendall_p_value([-score for score in scores]) <= ALPHA:
            return Finding(model, "hacked", _reward_hacking_text(model, rewards, scores))
    if len(recent) == WINDOW and recent[-1].score < 1 - GAIN:  # a higher score has no room for a gain
        gain, error = half_window_gain(recent)
        if gain + _Z95 * error < GAIN:
            return Finding(model, "flat", _flat_score_text(model, gain, error))
    return None


def mann_kendall_p_value(values: Sequence[float]) -> float:
    """Return the one-sided Mann-Kendall p-value of a rising trend.

    The value is exact without ties and conservative (too large) with ties.
    """
    statistic = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    pairs = len(values) * (len(values) - 1) // 2
    fewest = (pairs - statistic) // 2  # inversions of an order with at least this trend
    return sum(_permutations_by_inversions(len(values))[: fewest + 1]) / math.factorial(len(values))


def half_window_gain(points: Sequence[Point]) -> tuple[float, float]:
    """Return the mean score of the newer half of the points minus that of the older half, with its standard error.

    `points` must have an even length.
    """
    half = len(points) // 2
    gain = math.fsum(point.score for point in points[half:]) - math.fsum(point.score for point in points[:half])
    return gain / half, math.sqrt(math.fsum(point.error**2 for point in points)) / half


@cache
def _permutations_by_inversions(count: int) -> tuple[int, ...]:
    """Return the number of permutations of `count` values with 0, 1, 2, ... inversions."""
    counts = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(counts) + size - 1)
        for inversions, orders in enumerate(counts):
            for added in range(size):
                longer[inversions + added] += orders
        counts = longer
    return tuple(counts)


def _reward_hacking_text(model: str, rewards: Sequence[float], scores: Sequence[float]) -> str:
    half = len(scores) // 2

    def change(values: Sequence[float]) -> str:
        return f"{math.fsum(values[:half]) / half:.3f} to {math.fsum(values[half:]) / (len(values) - half):.3f}"

    return (
        f"{model}: over the last {len(scores)} measured versions the training reward rises ({change(rewards)}) while "
        f"the audit score falls ({change(scores)}). The reward pays for behaviour that the score does not value: read "
        "runs with a high reward, correct the reward function or the rubric, and roll back with "
        f"`headrace models rollback {model}`"
    )


def _flat_score_text(model: str, gain: float, error: float) -> str:
    return (
        f"{model}: the audit score is flat over the last {WINDOW} measured versions ({gain:+.3f} ± {error:.3f}). Check "
        "zero_advantage_group_fraction (tasks that every run solves or fails give no advantage: train other tasks) and "
        "whether reward and score measure the same; then try another trainer.optimizer.learning_rate, or stop training"
    )


class ScoreHistory:
    """Training rewards and audit scores by version, from which findings are computed.

    Pass the events of `training-metrics` and `model-events` in order.
    """

    def __init__(self) -> None:
        self._lineages: dict[str, str] = {}
        self._rewards_since_version: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._versions: dict[tuple[str, str], dict[str, float | None]] = {}
        self._scores: dict[str, tuple[float, float]] = {}
        self._seen: set[str] = set()

    def add(self, event: Event) -> None:
        """Add one event. Duplicates and events of other types are ignored."""
        if event.event_id in self._seen:
            return
        self._seen.add(event.event_id)
        if isinstance(event, TrainingMetrics):
            self._add_account(event)
        elif isinstance(event, ModelEvent) and event.decision == "evaluated" and "score" in event.statistics:
            numbers = event.statistics
            # Zero failures in n plays do not imply a standard error of zero.
            floor = 1 / (numbers.get("tasks", 0.0) + 2)
            self._scores[event.version] = numbers["score"], max(numbers.get("score_standard_error", 0.5), floor)

    def _add_account(self, event: TrainingMetrics) -> None:
        lineage = event.model, event.lineage
        self._lineages[event.model] = event.lineage
        rewards = self._rewards_since_version.setdefault(lineage, [])
        if "reward_mean" in event.metrics:
            rewards.append((event.metrics["reward_mean"], event.metrics.get("steps", 1.0)))
        if event.version is not None:
            steps = math.fsum(count for _, count in rewards)
            mean = math.fsum(reward * count for reward, count in rewards) / steps if steps else None
            self._versions.setdefault(lineage, {})[event.version] = mean
            rewards.clear()

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the lineage that reported last, for each model."""
        results = (judge(model, self._points((model, lineage))) for model, lineage in self._lineages.items())
        return tuple(finding for finding in results if finding is not None)

    def _points(self, lineage: tuple[str, str]) -> list[Point]:
        versions = self._versions.get(lineage, {})
        return [Point(reward, *self._scores[name]) for name, reward in versions.items() if name in self._scores]


def findings(events: Iterable[Event]) -> tuple[Finding, ...]:
    """Return the findings of a complete sequence of events."""
    history = ScoreHistory()
    for event in events:
        history.add(event)
    return history.findings()


async def read(topics: Topics) -> tuple[Finding, ...]:
    """Return the findings of all models from the records that the topics have now."""
    history = ScoreHistory()
    try:
        for topic in (TrainingMetrics.topic, ModelEvent.topic):
            async for entry in topics.read(Range(topic)):
                if entry.event is not None:
                    with suppress(ValueError, ArithmeticError, LookupError, TypeError):  # skip events with bad numbers
                        history.add(entry.event)
    except UsageError:  # a topic is missing: no version was trained, or none was measured
        return ()
    return history.findings()


class FindingReporter:
    """Callable that reports each new finding of all models once, while it persists. Call it after each score."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: set[tuple[str, str]] = set()

    async def __call__(self, topics: Topics) -> None:
        findings = await read(topics)
        for finding in findings:
            if (finding.model, finding.kind) not in self._reported:
                self._report(finding.text)
        self._reported = {(finding.model, finding.kind) for finding in findings}

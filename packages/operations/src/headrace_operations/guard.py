"""Whether the reward that is trained on still means what the held-out score measures (reward hacking), and whether
training still leads anywhere.

**Reward up, score down.** Over the last `WINDOW` versions with an audit score, Mann and Kendall's test for a trend is
taken twice: of the training reward upwards and of the score downwards. It asks only that versions without a trend come
in any order alike, whatever their noise. Both have to show at `ALPHA`, so where the score does not fall, or the reward
does not rise, one look is wrong with probability `ALPHA` at most. Looks overlap; a test counts what a hundred versions
come to.

**Flat.** The newer half of the window is compared with the older half, by the scores' own standard errors. It is flat
when the upper bound at 95 % of the gain is below `GAIN`: a run whose newer half is `GAIN` better is called flat with
probability 5 % at most. A score that cannot be called flat has not been shown to rise.
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
"""Versions that are looked at, the last ones; `WINDOW_MIN` do for a trend."""
WINDOW_MIN = 8
ALPHA = 0.01
GAIN = 0.05
"""A gain that would be worth having, in the unit of scores."""
_Z95 = 1.645


@dataclass(frozen=True, slots=True)
class Point:
    """A version: the mean reward of what it was trained on, and its score on audit tasks."""

    reward: float | None
    score: float
    error: float
    """The score's standard error."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the reward and the score of a model's last versions say together, and what to try."""

    model: str
    kind: Literal["hacked", "flat"]
    text: str
    """What was seen, and what to try."""


def judge(model: str, points: Sequence[Point]) -> Finding | None:
    """What the versions of one lineage show, in their order. Pure."""
    recent = points[-WINDOW:]
    rewarded = [point for point in points if point.reward is not None][-WINDOW:]
    if len(rewarded) >= WINDOW_MIN:
        rewards = [point.reward for point in rewarded if point.reward is not None]
        scores = [point.score for point in rewarded]
        if rising(rewards) <= ALPHA and rising([-score for score in scores]) <= ALPHA:
            return Finding(model, "hacked", _hacked(model, rewards, scores))
    if len(recent) == WINDOW and recent[-1].score < 1 - GAIN:  # else there is nothing left to gain
        gain, error = gained(recent)
        if gain + _Z95 * error < GAIN:
            return Finding(model, "flat", _flat(model, gain, error))
    return None


def rising(values: Sequence[float]) -> float:
    """Mann and Kendall's p-value of a rise: the probability that values in random order rise as clearly. Exact without
    ties, and too large with them."""
    statistic = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    pairs = len(values) * (len(values) - 1) // 2
    fewest = (pairs - statistic) // 2  # inversions of an order that rises at least as clearly
    return sum(_orders(len(values))[: fewest + 1]) / math.factorial(len(values))


def gained(points: Sequence[Point]) -> tuple[float, float]:
    """How much better the newer half of an even number of points is, with its standard error."""
    half = len(points) // 2
    gain = math.fsum(point.score for point in points[half:]) - math.fsum(point.score for point in points[:half])
    return gain / half, math.sqrt(math.fsum(point.error**2 for point in points)) / half


@cache
def _orders(count: int) -> tuple[int, ...]:
    """How many orders of so many values have 0, 1, 2, ... inversions."""
    found = [1]
    for size in range(2, count + 1):
        longer = [0] * (len(found) + size - 1)
        for inversions, orders in enumerate(found):
            for more in range(size):
                longer[inversions + more] += orders
        found = longer
    return tuple(found)


def _hacked(model: str, rewards: Sequence[float], scores: Sequence[float]) -> str:
    half = len(scores) // 2

    def change(values: Sequence[float]) -> str:
        return f"{math.fsum(values[:half]) / half:.3f} to {math.fsum(values[half:]) / (len(values) - half):.3f}"

    return (
        f"{model}: over the last {len(scores)} measured versions the training reward rises ({change(rewards)}) while "
        f"the audit score falls ({change(scores)}). The reward pays for something that the score does not value: read "
        "runs with a high reward, mend the reward function or the rubric, and go back with "
        f"`headrace models rollback {model}`"
    )


def _flat(model: str, gain: float, error: float) -> str:
    return (
        f"{model}: the audit score is flat over the last {WINDOW} measured versions ({gain:+.3f} ± {error:.3f}). Look "
        "at zero_advantage_group_fraction (tasks that are always solved, or never, teach nothing: train others), and "
        "at whether reward and score mean the same; then try another trainer.optimizer.learning_rate, or stop here"
    )


class Record:
    """Rewards and scores by version. `add` what `training-metrics` and `model-events` hold, in their order."""

    def __init__(self) -> None:
        self._lineages: dict[str, str] = {}
        self._since: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._versions: dict[tuple[str, str], dict[str, float | None]] = {}
        self._scores: dict[str, tuple[float, float]] = {}
        self._seen: set[str] = set()

    def add(self, event: Event) -> None:
        if event.event_id in self._seen:
            return
        self._seen.add(event.event_id)
        if isinstance(event, TrainingMetrics):
            self._add_account(event)
        elif isinstance(event, ModelEvent) and event.decision == "evaluated" and "score" in event.statistics:
            numbers = event.statistics
            # None of n plays failing does not make an error of 0.
            floor = 1 / (numbers.get("tasks", 0.0) + 2)
            self._scores[event.version] = numbers["score"], max(numbers.get("score_standard_error", 0.5), floor)

    def _add_account(self, event: TrainingMetrics) -> None:
        place = event.model, event.lineage
        self._lineages[event.model] = event.lineage
        since = self._since.setdefault(place, [])
        if "reward_mean" in event.metrics:
            since.append((event.metrics["reward_mean"], event.metrics.get("steps", 1.0)))
        if event.version is not None:
            steps = math.fsum(count for _, count in since)
            mean = math.fsum(reward * count for reward, count in since) / steps if steps else None
            self._versions.setdefault(place, {})[event.version] = mean
            since.clear()

    def findings(self) -> tuple[Finding, ...]:
        """Of the lineage of each model that reported last."""
        found = (judge(model, self._points((model, lineage))) for model, lineage in self._lineages.items())
        return tuple(one for one in found if one is not None)

    def _points(self, place: tuple[str, str]) -> list[Point]:
        versions = self._versions.get(place, {})
        return [Point(reward, *self._scores[name]) for name, reward in versions.items() if name in self._scores]


def findings(events: Iterable[Event]) -> tuple[Finding, ...]:
    """Of all `events` at once."""
    record = Record()
    for event in events:
        record.add(event)
    return record.findings()


async def read(topics: Topics) -> tuple[Finding, ...]:
    """What the topics show now."""
    record = Record()
    try:
        for topic in (TrainingMetrics.topic, ModelEvent.topic):
            async for entry in topics.read(Range(topic)):
                if entry.event is not None:
                    with suppress(ValueError, ArithmeticError, LookupError, TypeError):  # it shows nothing then
                        record.add(entry.event)
    except UsageError:  # a bus without one of them: nothing was trained, or nothing measured
        return ()
    return record.findings()


class Warner:
    """Called with the topics after each score: says what they show, and nothing twice in a row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[tuple[str, str]] = set()

    async def __call__(self, topics: Topics) -> None:
        found = await read(topics)
        for one in found:
            if (one.model, one.kind) not in self._said:
                self._say(one.text)
        self._said = {(one.model, one.kind) for one in found}

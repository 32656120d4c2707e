"""Tests of the guard against reward hacking and plateaus: by hand, by error rates of simulated runs, and from
events."""

from __future__ import annotations

import math
import random
from collections import Counter
from datetime import UTC, datetime
from itertools import permutations
from typing import cast

import pytest

from headrace.topics import Topics
from headrace_operations.guard import (
    ALPHA,
    GAIN,
    WINDOW,
    Finding,
    FindingReporter,
    Point,
    ScoreHistory,
    findings,
    half_window_gain,
    judge,
    mann_kendall_p_value,
)
from headrace_schemas import Event, ModelEvent, TrainingMetrics

TASKS = 100


def test_the_p_value_of_a_trend_by_hand() -> None:
    """Of the 24 orders of four values, one has no inversion, and three have exactly one."""
    assert mann_kendall_p_value([1, 2, 3, 4]) == pytest.approx(1 / 24)
    assert mann_kendall_p_value([1, 3, 2, 4]) == pytest.approx(4 / 24)
    assert mann_kendall_p_value([4, 3, 2, 1]) == 1.0
    assert mann_kendall_p_value([1, 1, 1, 1]) > 0.5, "ties are no trend"


def test_the_p_value_is_exact_for_values_in_random_order() -> None:
    p_values = [mann_kendall_p_value(order) for order in permutations(range(6))]
    for level in (0.01, 0.05, 0.2):
        assert sum(p <= level for p in p_values) / len(p_values) <= level


def test_a_gain_by_hand() -> None:
    points = [Point(None, 0.2, 0.03), Point(None, 0.4, 0.04), Point(None, 0.5, 0.0), Point(None, 0.7, 0.0)]
    assert half_window_gain(points) == pytest.approx((0.3, 0.025))


def points(rewards: list[float], scores: list[float], error: float = 0.01) -> list[Point]:
    return [Point(reward, score, error) for reward, score in zip(rewards, scores, strict=True)]


UP = [0.3 + 0.03 * n for n in range(WINDOW)]
DOWN = [0.8 - 0.02 * n for n in range(WINDOW)]


def test_a_rising_reward_with_a_falling_score_is_reported_with_the_remedy() -> None:
    finding = judge("m", points(UP, DOWN))
    assert finding is not None
    assert finding.kind == "hacked"
    assert "rises (0.375 to 0.555) while the audit score falls (0.750 to 0.630)" in finding.text
    assert "headrace models rollback m" in finding.text
    assert judge("m", points(UP, UP)) is None, "both rise"
    assert judge("m", points(DOWN, UP)) is None
    assert judge("m", points(UP[:7], DOWN[:7])) is None, "too few versions to say so"


def test_a_flat_score_is_reported_once_a_gain_is_excluded() -> None:
    finding = judge("m", points(UP, [0.5] * WINDOW))
    assert finding is not None
    assert finding.kind == "flat"
    assert "+0.000 ± 0.006" in finding.text
    assert judge("m", points(UP, [0.5] * WINDOW, 0.1)) is None, "so rough a measurement excludes nothing"
    assert judge("m", points(UP[1:], [0.5] * (WINDOW - 1))) is None
    assert judge("m", points(UP, [0.99] * WINDOW)) is None, "as good as it gets"
    exact = [Point(None, 0.5, 0.01)] * WINDOW
    assert judge("m", exact) is not None, "no reward is needed for that"


def scored(draw: random.Random, true: float) -> Point:
    """Return an audit score of `TASKS` tasks with the success rate `true`, and its standard error."""
    mean = sum(draw.random() < true for _ in range(TASKS)) / TASKS
    return Point(None, mean, max(math.sqrt(mean * (1 - mean) / (TASKS - 1)), 1 / (TASKS + 2)))


def simulated(draw: random.Random, versions: int, rise: float, gain: float) -> list[Point]:
    """Return noisy rewards and scores of `versions`, which change by `rise` and `gain` with each version."""
    history = []
    for number in range(versions):
        point = scored(draw, 0.5 + gain * number)
        history.append(Point(0.4 + rise * number + draw.gauss(0, 0.05), point.score, point.error))
    return history


def kinds(seed: int, runs: int, rise: float, gain: float) -> Counter[str]:
    draw = random.Random(seed)
    print(f"seed {seed}")
    results = [judge("m", simulated(draw, WINDOW, rise, gain)) for _ in range(runs)]
    return Counter(finding.kind if finding else "nothing" for finding in results)


def within(count: int, runs: int, rate: float) -> bool:
    """Return whether the rate of `count` in `runs` exceeds `rate` by at most three standard errors."""
    return count / runs <= rate + 3 * math.sqrt(rate * (1 - rate) / runs)


RUNS = 1500


@pytest.mark.parametrize("rise", [0.0, 0.03])
def test_a_score_that_does_not_fall_is_called_hacked_with_the_promised_rate(rise: float) -> None:
    counts = kinds(1, RUNS, rise, 0.0)
    assert within(counts["hacked"], RUNS, ALPHA), counts


def test_a_falling_score_with_a_reward_that_does_not_rise_is_no_hacking() -> None:
    counts = kinds(2, RUNS, 0.0, -0.03)
    assert within(counts["hacked"], RUNS, ALPHA), counts


def test_a_score_that_loses_a_third_while_the_reward_rises_is_found() -> None:
    counts = kinds(3, 300, 0.03, -0.03)
    assert counts["hacked"] > 0.9 * 300, counts


def test_a_run_that_gains_is_called_flat_with_the_promised_rate() -> None:
    """The two halves of the window differ by `GAIN` if each version gains `GAIN / (WINDOW / 2)`."""
    counts = kinds(4, RUNS, 0.0, GAIN / (WINDOW / 2))
    assert within(counts["flat"], RUNS, 0.05), counts


def test_a_run_without_gain_is_called_flat_at_about_every_second_look() -> None:
    """A version's score has a standard error of 0.05, so the difference of the two halves has one of 0.029."""
    counts = kinds(5, 300, 0.0, 0.0)
    assert counts["flat"] > 0.4 * 300, counts


def test_looks_at_each_of_a_hundred_versions_seldom_raise_a_false_alarm() -> None:
    """The false alarm rate is 1 % for one check, and larger for a hundred checks of overlapping windows."""
    draw, alarmed = random.Random(6), 0
    print("seed 6")
    for _ in range(60):
        history = [Point(0.03 * n + draw.gauss(0, 0.05), scored(draw, 0.5).score, 0.05) for n in range(100)]
        results = [judge("m", history[: end + 1]) for end in range(WINDOW, 100)]
        alarmed += any(finding is not None and finding.kind == "hacked" for finding in results)
    assert alarmed / 60 < 0.45, alarmed


START = datetime(2026, 1, 1, tzinfo=UTC)


def account(number: int, reward: float | None, *, version: bool = True, lineage: str = "main") -> TrainingMetrics:
    return TrainingMetrics(
        time=START,
        model="m",
        lineage=lineage,
        step=number,
        account=number,
        version=f"m@{number:012x}" if version else None,
        metrics={} if reward is None else {"reward_mean": reward, "steps": 1.0},
    )


def measured(number: int, score: float, **numbers: float) -> ModelEvent:
    return ModelEvent(
        time=START,
        decision_id=f"evaluated-{number}-{score}",
        model="m",
        version=f"m@{number:012x}",
        decision="evaluated",
        statistics={"score": score, **numbers},
    )


def test_points_are_made_of_accounts_and_of_the_last_score_of_each_version() -> None:
    record = ScoreHistory()
    events: list[Event] = [account(0, None), account(1, 0.2, version=False), account(2, 0.4), account(3, 0.9)]
    events += [measured(2, 0.1), measured(2, 0.5, tasks=98, score_standard_error=0.0), measured(9, 0.5)]
    for event in [*events, *events]:
        record.add(event)
    (point,) = record._points(("m", "main"))
    assert point.reward == pytest.approx(0.3)
    assert point.score == 0.5
    assert point.error == pytest.approx(0.01)


def test_findings_are_of_the_lineage_that_reported_last() -> None:
    events: list[Event] = [account(n, UP[n]) for n in range(WINDOW)]
    events += [measured(n, DOWN[n], tasks=1000, score_standard_error=0.01) for n in range(WINDOW)]
    assert [finding.kind for finding in findings(events)] == ["hacked"]
    assert findings([*events, account(99, 0.5, lineage="replay")]) == ()


async def test_a_warning_is_reported_once_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    hacked, flat = Finding("m", "hacked", "it is hacked"), Finding("m", "flat", "it is flat")
    looks = iter([(hacked,), (hacked, flat), (), (hacked,)])

    async def read(_topics: object) -> tuple[Finding, ...]:
        return next(looks)

    monkeypatch.setattr("headrace_operations.guard.read", read)
    messages: list[str] = []
    reporter = FindingReporter(messages.append)
    for _ in range(4):
        await reporter(cast(Topics, None))
    assert messages == ["it is hacked", "it is flat", "it is hacked"]

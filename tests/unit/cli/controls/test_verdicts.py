"""Verdicts of the controls: rewards without information are compared with the gain of the true reward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from headrace_operations.controls.kinds import FLIPPED, RANDOM, SHUFFLED, TRUE, Control
from headrace_operations.controls.report import CERTAINTY, SHARE_MAX, Report, Run
from headrace_schemas.programs.replay import ShortRun
from headrace_statistics.clustered_means import Mean, Score, certainty_above
from tests.support.seeds import draw_seed

TASKS, BASE = 200, 0.23


def plays(rate: float, draw: random.Random, tasks: int = TASKS) -> list[Score]:
    """Plays of tasks, of which about `rate` succeed. Equal draws succeed at all higher rates, as with equal seeds."""
    return [(str(number), float(draw.random() < rate)) for number in range(tasks)]


def report_of(gains: dict[Control, float], seed: int, trainings: int = 1) -> Report:
    """Report of trainings with these expected gains over a base of 23 %."""
    run = cast(ShortRun, SimpleNamespace(steps=10, trained=500, stopped=None))
    draw = random.Random(seed)
    runs = [Run(control, n, run, plays(BASE + gain, draw)) for n in range(trainings) for control, gain in gains.items()]
    return Report(500, plays(BASE, draw), runs)


def accused(report: Report) -> list[str]:
    return [row.control.name for row in report.rows if not row.as_expected]


def mean_of(points: float, error: float) -> Mean:
    return Mean(points / 100, error / 100, None, error / 100, (points / 100,))


def test_eight_points_beside_seventy_two_accuse_no_reward() -> None:
    shuffled, true = mean_of(8, 3.8), mean_of(72, 3.2)
    assert shuffled.value > 2 * shuffled.error, "two standard errors above the base, which was the verdict before"
    assert certainty_above(shuffled, true, SHARE_MAX) < 0.1


@pytest.mark.parametrize(("points", "certain"), [(14.4, 0.5), (22, 0.97), (30, 0.999), (72, 1.0), (-5, 0.0)])
def test_certainty_grows_with_the_excess_over_the_share(points: float, certain: float) -> None:
    assert certainty_above(mean_of(points, 3.8), mean_of(72, 3.2), SHARE_MAX) == pytest.approx(certain, abs=0.01)


def test_without_a_true_gain_every_certain_gain_counts() -> None:
    assert certainty_above(mean_of(8, 3.8), mean_of(-3, 3.0), SHARE_MAX) > CERTAINTY - 0.01
    assert certainty_above(mean_of(0, 0), mean_of(0, 0), SHARE_MAX) == 0.0
    assert certainty_above(mean_of(1, 0), mean_of(0, 0), SHARE_MAX) == 1.0


@pytest.mark.parametrize("number", range(20))
def test_a_perfect_reward_is_never_accused(number: int) -> None:
    report = report_of({TRUE: 0.72, SHUFFLED: 0.08, RANDOM: 0.05, FLIPPED: -0.2}, draw_seed(f"perfect {number}"))
    assert accused(report) == []
    assert any("--seeds 5" in advice for advice in report.advice)


@pytest.mark.parametrize("number", range(20))
def test_a_score_that_rises_by_itself_is_always_named(number: int) -> None:
    report = report_of({TRUE: 0.4, SHUFFLED: 0.4, RANDOM: 0.4}, draw_seed(f"itself {number}"))
    assert {"shuffled", "random"} <= set(accused(report))
    assert all("of the true reward's" in problem for problem in report.problems)


@pytest.mark.parametrize("number", range(20))
def test_recorded_rewards_without_information_are_always_named(number: int) -> None:
    report = report_of({TRUE: -0.1, SHUFFLED: -0.1}, draw_seed(f"empty {number}"), trainings=2)
    assert "true" in accused(report)
    assert not any("--seeds 5" in advice for advice in report.advice)


def test_the_report_states_share_and_certainty() -> None:
    report = report_of({TRUE: 0.72, SHUFFLED: 0.09}, draw_seed("share"))
    rows: Sequence[dict[str, float]] = report.as_json()["controls"]
    assert rows[0]["share_of_true_gain"] == 1.0
    assert 0 < rows[1]["share_of_true_gain"] < SHARE_MAX
    assert rows[1]["certainty_above_share"] < CERTAINTY

"""The statistic of the gate, against numbers worked by hand and Python's own `statistics`."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from headrace_registry.comparison import compare


def test_worked_by_hand() -> None:
    """Differences 0.5, 0, −0.25, 0.25: mean 0.125; squared deviations .140625 .015625 .140625 .015625, sum .3125."""
    candidate = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.75}
    champion = {"d": 0.5, "c": 0.5, "b": 0.5, "a": 0.5}
    compared = compare(candidate, champion)
    assert compared.statistics() == {
        "tasks": 4.0,
        "score": 0.625,
        "champion_score": 0.5,
        "difference": 0.125,
        "standard_error": pytest.approx(math.sqrt(0.3125 / 3 / 4)),
    }


@pytest.mark.parametrize("seed", range(5))
def test_against_pythons_statistics(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    tasks = [f"t{number}" for number in range(chance.randint(2, 300))]
    candidate, champion = ({task: chance.random() for task in tasks} for _ in range(2))
    differences = [candidate[task] - champion[task] for task in tasks]
    compared = compare(candidate, champion)
    assert compared.difference == pytest.approx(statistics.fmean(differences))
    assert compared.standard_error == pytest.approx(statistics.stdev(differences) / len(tasks) ** 0.5)
    assert compared.score - compared.champion_score == pytest.approx(compared.difference)


@pytest.mark.parametrize(
    ("score", "champion", "margin", "promoted"),
    [
        (0.5, 0.5, 0.0, True),
        (0.4, 0.5, 0.0, False),
        (0.30, 0.35, 0.05, True),  # in binary fractions a little more than 0.05 apart
        (0.29, 0.35, 0.05, False),
        (1.0, 0.0, 0.0, True),
    ],
)
def test_non_inferiority(score: float, champion: float, margin: float, promoted: bool) -> None:
    assert compare({"t": score}, {"t": champion}).not_inferior(margin) is promoted


def test_one_task_has_no_standard_error() -> None:
    assert "standard_error" not in compare({"t": 1.0}, {"t": 0.0}).statistics()


@pytest.mark.parametrize(("candidate", "champion"), [({}, {}), ({"a": 1.0}, {"b": 1.0}), ({"a": 1.0}, {})])
def test_unpaired_tasks_are_refused(candidate: dict[str, float], champion: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="scored for one version only"):
        compare(candidate, champion)

"""Standard errors, compared with values computed by hand and with the spread of simulated repetitions."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from headrace_statistics.clustered_means import Score, difference, mean


def test_mean_equals_values_computed_by_hand() -> None:
    """The deviations by task are -1, 0 and 1 from the mean 0.5 over six plays: √(2 · 3/2) / 6."""
    plays = [("a", 0.0), ("a", 0.0), ("b", 0.5), ("b", 0.5), ("c", 1.0), ("c", 1.0)]
    single = mean([plays])
    assert (single.value, single.over_seeds) == (0.5, None)
    assert single.error == single.over_tasks == pytest.approx(math.sqrt(2 * 3 / 2) / 6)
    both = mean([plays, [(task, 0.1) for task, _ in plays]])
    assert both.value == pytest.approx(0.3)
    assert both.over_seeds == pytest.approx(0.4 / math.sqrt(2) / math.sqrt(2))
    assert both.over_tasks == pytest.approx(single.error / 2)
    assert both.error == max(both.over_seeds or 0, both.over_tasks)


def test_differences_are_between_plays_of_one_task() -> None:
    base = [("a", 0.0), ("b", 1.0)]
    assert difference([base], [base]).within()
    better = difference([[("a", 0.5), ("b", 1.5)]], [base])
    assert (better.value, better.error) == (0.5, 0.0), "the same on each task"
    assert not better.within()
    with pytest.raises(AssertionError):
        difference([[("b", 1.0), ("a", 0.0)]], [base])


@pytest.mark.parametrize("shared", [False, True], ids=["tasks of its own", "the same tasks"])
def test_two_standard_errors_cover_the_true_mean(shared: bool) -> None:
    """The simulation has five seeds that differ slightly, 40 tasks of different difficulty, and three plays of each."""
    generator = random.Random(5)
    print("seed 5")
    inside, spread, errors = 0, [], []
    for _ in range(400):
        tasks = [generator.gauss(0.0, 0.2) for _ in range(40)]
        seeds: list[list[Score]] = []
        for _ in range(5):
            level = generator.gauss(0.5, 0.03)
            seed_tasks = tasks if shared else [generator.gauss(0.0, 0.2) for _ in range(40)]
            seeds.append(
                [
                    (str(n), level + easy + generator.gauss(0, 0.3))
                    for n, easy in enumerate(seed_tasks)
                    for _ in range(3)
                ]
            )
        result = mean(seeds, shared=shared)
        inside += abs(result.value - 0.5) <= 2 * result.error
        spread.append(result.value)
        errors.append(result.error)
    share, actual_spread = inside / 400, statistics.stdev(spread)
    print(f"{share:.3f} inside, spread {actual_spread:.4f}, said {statistics.fmean(errors):.4f}")
    assert 0.9 <= share <= 0.995
    assert 0.95 * actual_spread <= statistics.fmean(errors) <= 1.4 * actual_spread


def test_a_single_task_has_an_error_of_half_the_range() -> None:
    assert mean([[("a", 1.0), ("a", 1.0)]]).error == 0.5


def test_few_tasks_with_equal_means_have_an_error_above_zero() -> None:
    """Two tasks with the same mean have plays that differ: √(1/3 · 1/4) as with four independent plays."""
    plays = [("a", 0.0), ("a", 1.0), ("b", 1.0), ("b", 0.0)]
    assert mean([plays]).error == pytest.approx(math.sqrt(1 / 3 / 4))

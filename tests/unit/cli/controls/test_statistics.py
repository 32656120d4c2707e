"""Standard errors: by hand, and against what simulated repetitions really spread by."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from headrace_operations.controls.statistics import Score, difference, mean


def test_by_hand() -> None:
    """Deviations by task are -1, 0 and 1 of the mean 0.5 over six plays: √(2 · 3/2) / 6."""
    plays = [("a", 0.0), ("a", 0.0), ("b", 0.5), ("b", 0.5), ("c", 1.0), ("c", 1.0)]
    found = mean([plays])
    assert (found.value, found.over_seeds) == (0.5, None)
    assert found.error == found.over_tasks == pytest.approx(math.sqrt(2 * 3 / 2) / 6)
    two = mean([plays, [(task, 0.1) for task, _ in plays]])
    assert two.value == pytest.approx(0.3)
    assert two.over_seeds == pytest.approx(0.4 / math.sqrt(2) / math.sqrt(2))
    assert two.over_tasks == pytest.approx(found.error / 2)
    assert two.error == max(two.over_seeds or 0, two.over_tasks)


def test_a_difference_is_taken_play_by_play() -> None:
    base = [("a", 0.0), ("b", 1.0)]
    assert difference([base], [base]).within()
    better = difference([[("a", 0.5), ("b", 1.5)]], [base])
    assert (better.value, better.error) == (0.5, 0.0), "the same on each task"
    assert not better.within()
    with pytest.raises(AssertionError):
        difference([[("b", 1.0), ("a", 0.0)]], [base])


@pytest.mark.parametrize("shared", [False, True], ids=["tasks of its own", "the same tasks"])
def test_two_errors_hold_the_truth_as_often_as_they_say(shared: bool) -> None:
    """Five seeds that are really a little different, 40 tasks that are easy or hard, three plays each."""
    draw = random.Random(5)
    print("seed 5")
    inside, spread, said = 0, [], []
    for _ in range(400):
        tasks = [draw.gauss(0.0, 0.2) for _ in range(40)]
        seeds: list[list[Score]] = []
        for _ in range(5):
            level = draw.gauss(0.5, 0.03)
            ours = tasks if shared else [draw.gauss(0.0, 0.2) for _ in range(40)]
            seeds.append([(str(n), level + easy + draw.gauss(0, 0.3)) for n, easy in enumerate(ours) for _ in range(3)])
        found = mean(seeds, shared=shared)
        inside += abs(found.value - 0.5) <= 2 * found.error
        spread.append(found.value)
        said.append(found.error)
    share, really = inside / 400, statistics.stdev(spread)
    print(f"{share:.3f} inside, spread {really:.4f}, said {statistics.fmean(said):.4f}")
    assert 0.9 <= share <= 0.995
    assert 0.95 * really <= statistics.fmean(said) <= 1.4 * really


def test_one_task_says_nothing() -> None:
    assert mean([[("a", 1.0), ("a", 1.0)]]).error == 0.5


def test_few_tasks_that_agree_by_luck_do_not_make_an_error_of_0() -> None:
    """Two tasks with the same mean, of plays that differ: √(1/3 · 1/4) as of four independent ones."""
    plays = [("a", 0.0), ("a", 1.0), ("b", 1.0), ("b", 0.0)]
    assert mean([plays]).error == pytest.approx(math.sqrt(1 / 3 / 4))

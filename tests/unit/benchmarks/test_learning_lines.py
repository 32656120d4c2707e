"""Lines of `make bench NAME=learning` on constructed runs: sound runs fail none, each planted fault fails its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._learning_lines import FORMAT, Table, finding, lines, markdown
from benchmarks._learning_results import RunResult
from headrace_statistics.clustered_means import Score

SEEDS, TASKS = 5, 148
NOTHING_LEARNT = {"shuffled": 0.35, "random": 0.35, "learning rate 0": 0.35}
SCORES = {"true": 0.7, "flipped": 0.1, "lag 4": 0.7, FORMAT: 0.2} | NOTHING_LEARNT
Fault = Callable[[dict[str, float]], dict[str, float]]


def plays(score: float, seed: int, salt: str = "") -> list[Score]:
    """Draw a score for each task with the same random numbers for all arms of a seed: arms differ by `score` alone."""
    draw = random.Random(f"{seed}{salt}")
    return [(f"{seed}-{task}", float(draw.random() < score)) for task in range(TASKS)]


def run(arm: str, seed: int, score: float, *, passed: bool = False) -> RunResult:
    run_result = RunResult(arm, seed, plays(0.35, seed), plays(score, seed))
    if arm == "flipped":
        run_result.trial = {"passed": passed, "tasks": 30}
    if arm in ("true", FORMAT):
        run_result.trace = [
            (step, 0.4 + 0.03 * step, plays(0.35 + (score - 0.35) * step / 10, seed)) for step in range(1, 11)
        ]
    return run_result


def table(scores: dict[str, float], **changes: bool) -> Table:
    return Table([run(arm, seed, score, **changes) for arm, score in scores.items() for seed in range(SEEDS)])


def missed(run_table: Table) -> list[str]:
    return [line.name.split(":")[0] for line in lines(run_table) if not line.holds]


def test_a_sound_trainer_misses_no_line() -> None:
    run_table = table(SCORES)
    assert missed(run_table) == []
    assert len(lines(run_table)) == 9
    assert "| flipped | " in markdown(run_table.rows(), run_table.score_of_base())


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"true": 0.4, "lag 4": 0.4}, "true"),
        ({"shuffled": 0.6}, "shuffled"),  # the true reward leaks into it
        ({"random": 0.2}, "random"),  # noise alone ruins the model
        ({"learning rate 0": 0.45}, "learning rate 0"),
        ({"flipped": 0.35}, "flipped"),
        ({"lag 4": 0.6}, "lag 4"),
        ({FORMAT: 0.5}, FORMAT),  # rewarded for the format, and the score rises: nothing is hacked
    ],
)
def test_each_fault_fails_its_line(changed: dict[str, float], line: str) -> None:
    assert {name for name in missed(table(SCORES | changed)) if ":" not in name} == {line.split(":")[0]}


def test_a_flipped_version_that_the_gate_lets_pass_fails() -> None:
    assert missed(table(SCORES, passed=True)) == ["flipped"]


def test_a_flipped_run_without_a_version_to_try_is_not_a_refusal() -> None:
    runs = [replace(run("flipped", seed, 0.1), trial={}) for seed in range(SEEDS)]
    assert missed(Table(runs)) == ["flipped"]


def test_the_guard_reads_a_trace() -> None:
    assert finding(run(FORMAT, 0, 0.1)) == "hacked"
    assert finding(run("true", 0, 0.7)) is None


def test_the_guard_looks_after_each_version() -> None:
    """The guard judges every version, because a reward that has reached its maximum rises no further."""
    run_result = run(FORMAT, 0, 0.2)
    assert finding(run_result) == "hacked"
    step, reward, worst = run_result.trace[-1]
    run_result.trace += [(step + number, reward, worst) for number in range(1, 11)]
    assert finding(run_result) == "hacked"
    assert finding(replace(run_result, trace=run_result.trace[-8:])) is None

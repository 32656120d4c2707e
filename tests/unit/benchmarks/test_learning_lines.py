"""Lines of `make bench NAME=learning` on constructed runs: sound runs fail none, each planted fault fails its own.

Lines of `make demo NAME=swaps`: each fault of an answer, a gap or a gateway fails its own line and no other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks._learning_lines import (
    FORMAT,
    FREE_CALLS,
    HELD_CALLS,
    HELD_SHUFFLED,
    HELD_UNMASKED,
    RunResult,
    Table,
    finding,
    lines,
    markdown,
)
from benchmarks._swaps_live import SWAPS, TOKENS, Answer, StreamingClients, lines_of
from headrace_statistics.clustered_means import Score

SEEDS, TASKS = 5, 148
NOTHING_LEARNT = {"shuffled": 0.35, "random": 0.35, "learning rate 0": 0.35}
TYPED_SCORES = {FREE_CALLS: 0.6, HELD_CALLS: 0.6, HELD_SHUFFLED: 0.35, HELD_UNMASKED: 0.5}
SCORES = {"true": 0.7, "flipped": 0.1, "lag 4": 0.7, FORMAT: 0.2} | NOTHING_LEARNT | TYPED_SCORES
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
    assert len(lines(run_table)) == 14
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
        ({HELD_CALLS: 0.45}, "held calls"),
        ({HELD_CALLS: 0.35, FREE_CALLS: 0.35}, "held calls"),
        ({HELD_SHUFFLED: 0.6}, "held calls, shuffled"),
        ({FORMAT: 0.5}, FORMAT),  # rewarded for the format, and the score rises: nothing is hacked
    ],
)
def test_each_fault_fails_its_line(changed: dict[str, float], line: str) -> None:
    assert {*missed(table(SCORES | changed))} - {"controls"} == {line.split(":")[0]}


@pytest.mark.parametrize(
    ("true", "shuffled", "line"),
    [
        (0.7, 0.6, "controls: share of seeds that accuse the true reward"),  # shuffled rewards teach as well
        (0.7, 0.6, "controls: share of seeds that accuse shuffled recorded rewards"),
        (0.36, 0.35, "controls: share of seeds that accuse the true reward"),  # it teaches nothing
    ],
)
def test_wrong_accusation_of_a_reward_fails_its_line(true: float, shuffled: float, line: str) -> None:
    run_table = table({"true": true, "shuffled": shuffled, "random": 0.35})
    assert line in [accusation.name for accusation in lines(run_table) if not accusation.holds]


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


OLD, NEW = "clerk@0123456789ab", "clerk@ba9876543210"
LETTERS = {OLD: "y", NEW: "n"}


def answer(version: str = OLD, gap_s: float = 0.02) -> Answer:
    """Return a complete answer. Its longest gap, `gap_s`, is before the last token."""
    at_s = [0.01 * index for index in range(TOKENS)]
    at_s[-1] = at_s[-2] + gap_s
    return Answer(0.0, {version}, LETTERS[version] * TOKENS, "length", True, at_s)


def failed_swap_lines(answers: list[Answer], takeover_delays_s: list[float]) -> list[str]:
    lines, _ = lines_of([answer() for _ in range(9)], answers, LETTERS, takeover_delays_s, SWAPS)
    return [line.name for line in lines if not line.holds]


DELAYS_S = [0.2] * (SWAPS + 1)
GOOD = [answer(), answer(NEW)] * 100


def test_all_hold_where_nothing_went_wrong() -> None:
    assert failed_swap_lines(GOOD, DELAYS_S) == []


@pytest.mark.parametrize(
    ("corrupt", "line"),
    [
        (lambda original: replace(original, error="status 503", text="", is_complete=False), "no answer failed"),
        (lambda original: replace(original, text=original.text[:-1]), "truncated"),
        (lambda original: replace(original, ended="stop"), "truncated"),
        (lambda original: replace(original, is_complete=False), "truncated"),
        (lambda original: replace(original, versions={OLD, NEW}), "two versions"),
        (lambda original: replace(original, text=original.text[:-1] + "n"), "two versions"),
    ],
)
def test_one_bad_answer_is_one_too_many(corrupt: Callable[[Answer], Answer], line: str) -> None:
    (line_name,) = failed_swap_lines([*GOOD, corrupt(answer())], DELAYS_S)
    assert line in line_name


def test_an_answer_of_one_version_with_the_letters_of_another_is_of_two() -> None:
    assert answer().mixed({OLD: "n"})


def test_gaps_are_extra_and_at_p99() -> None:
    """The usual longest gap is 20 ms; a gap of 265 ms exceeds it by 245 ms, and a gap of 275 ms by 255 ms."""
    slow = [answer(gap_s=0.275)] * 2
    assert failed_swap_lines(GOOD + slow[:1], DELAYS_S) == []
    (line_name,) = failed_swap_lines(GOOD + slow * 5, DELAYS_S)
    assert "extra gap" in line_name
    assert failed_swap_lines(GOOD + [answer(gap_s=0.265)] * 10, DELAYS_S) == []


def test_gateways_that_hear_late_and_swaps_that_did_not_happen() -> None:
    (line_name,) = failed_swap_lines(GOOD, [*DELAYS_S[:-5], *[1.2] * 5])
    assert "every gateway" in line_name
    (line_name,) = failed_swap_lines(GOOD, DELAYS_S[:-1])
    assert "took over" in line_name


def test_a_stream_is_taken_as_it_comes() -> None:
    streamed_answer = Answer(0.0)
    for data in (
        b'{"model": "m@1", "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
        b'{"model": "m@1", "choices": [{"delta": {"content": "y"}, "finish_reason": null}]}',
        b'{"model": "m@2", "choices": [{"delta": {}, "finish_reason": "length"}]}',
        b"[DONE]",
    ):
        StreamingClients._take(data, streamed_answer)
    assert (
        streamed_answer.text,
        streamed_answer.ended,
        streamed_answer.is_complete,
        streamed_answer.versions,
        len(streamed_answer.at_s),
    ) == (
        "y",
        "length",
        True,
        {"m@1", "m@2"},
        1,
    )
    StreamingClients._take(b'{"error": {"message": "gone"}}', streamed_answer)
    assert streamed_answer.error is not None

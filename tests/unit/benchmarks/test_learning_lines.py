"""Tests of the pass criteria of the benchmarks `learning`, `signals` and `swaps`: correct results pass, and each
injected fault fails the criterion for it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from benchmarks import _gains_lines
from benchmarks._gains_lines import Figure, Gain, Gains, misled, rows
from benchmarks._gains_lines import lines as gain_lines
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
from benchmarks.signals import seeds_of
from headrace_statistics.intervals import Score

SEEDS, TASKS = 5, 148
NOTHING_LEARNT = {"shuffled": 0.35, "random": 0.35, "learning rate 0": 0.35}
TYPED_SCORES = {FREE_CALLS: 0.6, HELD_CALLS: 0.6, HELD_SHUFFLED: 0.35, HELD_UNMASKED: 0.5}
SCORES = {"true": 0.7, "flipped": 0.1, "lag 4": 0.7, FORMAT: 0.2} | NOTHING_LEARNT | TYPED_SCORES
Fault = Callable[[dict[str, float]], dict[str, float]]


def plays(score: float, seed: int, salt: str = "") -> list[Score]:
    """Return one simulated score for each task. Arms with equal `seed` use equal random numbers, so only `score`
    differs."""
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
    """The reward guard checks every version, because a reward at its maximum cannot rise any further."""
    run_result = run(FORMAT, 0, 0.2)
    assert finding(run_result) == "hacked"
    step, reward, worst = run_result.trace[-1]
    run_result.trace += [(step + number, reward, worst) for number in range(1, 11)]
    assert finding(run_result) == "hacked"
    assert finding(replace(run_result, trace=run_result.trace[-8:])) is None


OLD, NEW = "clerk@0123456789ab", "clerk@ba9876543210"
LETTERS = {OLD: "y", NEW: "n"}


def answer(version: str = OLD, gap_s: float = 0.02) -> Answer:
    """Return a complete answer whose longest gap between tokens, `gap_s`, precedes the last token."""
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
    """The usual longest gap between tokens is 20 ms: a gap of 265 ms is 245 ms longer, and a gap of 275 ms is 255 ms
    longer."""
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


GAIN_SEEDS, GAIN_TASKS, BASE = 5, 400, 0.35
GAIN_SCORES = {
    _gains_lines.BASE: BASE,
    _gains_lines.EXPLICIT: 0.75,
    _gains_lines.SFT: 0.65,
    _gains_lines.DPO: 0.65,
    _gains_lines.NATURAL: 0.65,
    _gains_lines.FEW: 0.67,
    _gains_lines.POISONED: 0.66,
    _gains_lines.DIRECTED_BASE: BASE,
    _gains_lines.TYPED: 0.6,
    _gains_lines.BY_TOKEN: 0.6,
    **dict.fromkeys(_gains_lines.RIVALS, 0.6),
    **{arm.name: math.nan for arm in (_gains_lines.HAS_A_GAP, *_gains_lines.HAS_NONE, _gains_lines.MISLED)},
}
QUICK = {_gains_lines.TYPED: 1.0, **dict.fromkeys(_gains_lines.RIVALS, 0.3)}
"""Share of the final gain that an arm has after a tenth of the sessions."""


def gain_plays(score: float, seed: int, guard: float | None = None) -> list[Score]:
    """Return simulated scores. All arms of a seed use equal random numbers, so that only the success rates differ."""
    draw = random.Random(seed)
    kinds = ["extension", _gains_lines.GUARD] * (GAIN_TASKS // 2)
    success_rates = {"extension": score, _gains_lines.GUARD: score if guard is None else guard}
    return [(f"{kind}-{number}", float(draw.random() < success_rates[kind])) for number, kind in enumerate(kinds)]


def gain_run(arm: str, seed: int, score: float, **changes: object) -> Gain:
    gain = Gain(arm, seed, [] if math.isnan(score) else gain_plays(score, seed))
    gain.edits = 150 if arm in (_gains_lines.SFT, _gains_lines.DPO) else 0
    gain.sessions = 480
    gain.steps = int(arm == _gains_lines.HAS_A_GAP.name or bool(gain.scores))
    if arm in QUICK:
        shares = (QUICK[arm], 1.0)
        gain.trace = [(48 + 432 * n, gain_plays(BASE + (score - BASE) * share, seed)) for n, share in enumerate(shares)]
    if arm in (_gains_lines.FEW, _gains_lines.POISONED):
        draw = random.Random(seed)
        gain.ordered = [(good, draw.gauss(0.6 if good else 0.4, 0.1)) for good in (True, False) * 200]
        gain.judged = gain.ordered[:200]
    for name, value in changes.items():
        setattr(gain, name, value)
    return gain


def gain_table(scores: Mapping[str, float], changed: Mapping[str, Mapping[str, object]] | None = None) -> Gains:
    changes = changed or {}
    return Gains(
        gain_run(arm, seed, score, **changes.get(arm, {}))
        for arm, score in scores.items()
        for seed in range(GAIN_SEEDS)
    )


def failed_line_names(gains: Gains) -> list[str]:
    return [line.name for line in gain_lines(gains) if not line.holds]


def test_sound_runs_miss_no_line() -> None:
    gains = gain_table(GAIN_SCORES)
    assert failed_line_names(gains) == []
    assert len(gain_lines(gains)) == 14
    assert set(rows(gains)) == {arm for arm, score in GAIN_SCORES.items() if not math.isnan(score)}
    assert misled(gains) == Figure((0.0,) * GAIN_SEEDS)
    assert misled(Gains([])) is None
    assert gains.sessions_to(_gains_lines.TYPED, 0.15) == 48
    assert gains.sessions_to(_gains_lines.BINARY, 0.15) == 480


FIXED_BASE = {_gains_lines.DIRECTED_BASE: {"scores": gain_plays(BASE, 0)}}
"""A base with the same plays for every seed, to match an arm with changed plays."""


@pytest.mark.parametrize(
    ("scores", "changed", "line"),
    [
        ({_gains_lines.SFT: 0.45}, {}, "edits, sft: gain"),
        ({_gains_lines.DPO: 0.3}, {}, "edits, dpo: gain"),
        ({}, {_gains_lines.DPO: {"edits": 201}}, "edits, dpo: edits"),
        ({_gains_lines.NATURAL: 0.5}, {}, "natural signals"),
        ({_gains_lines.FEW: 0.58, _gains_lines.POISONED: 0.57}, {}, "few thumbs: share"),
        ({_gains_lines.POISONED: 0.58}, {}, "few thumbs: what 2 % poisoners cost"),
        ({}, {_gains_lines.FEW: {"ordered": [(True, 0.4), (False, 0.6)]}}, "few thumbs: AUROC of the reward model"),
        ({}, {_gains_lines.FEW: {"judged": [(True, 0.4), (False, 0.6)]}}, "few thumbs: AUROC of the rewards"),
        ({}, {_gains_lines.TYPED: {"scores": gain_plays(0.45, 0)}, **FIXED_BASE}, "typed corrections: gain"),
        ({}, {_gains_lines.TYPED: {"sessions": 512}}, "typed corrections: sessions"),
        ({}, {_gains_lines.BINARY: {"trace": [(48, gain_plays(0.9, 0))]}}, "typed corrections: sessions to 15 points"),
        *(
            ({}, {arm: {"trace": [(95, gain_plays(0.9, 0))]}}, "typed corrections: sessions to 15 points")
            for arm in _gains_lines.RIVALS
        ),
        (
            {},
            {_gains_lines.TYPED: {"scores": gain_plays(0.9, 0, guard=0.3)}, **FIXED_BASE},
            "typed corrections: what the guard",
        ),
        ({}, {_gains_lines.HAS_NONE[0].name: {"steps": 1}}, "typed corrections: settings"),
        ({}, {_gains_lines.HAS_A_GAP.name: {"steps": 0}}, "typed corrections: settings"),
    ],
)  # fmt: skip
def test_each_fault_fails_its_gain_line(
    scores: dict[str, float], changed: dict[str, dict[str, object]], line: str
) -> None:
    failures = failed_line_names(gain_table(GAIN_SCORES | scores, changed))
    assert len(failures) == 1, failures
    assert failures[0].startswith(line)


def test_what_learned_nothing_has_no_share_of_a_gain() -> None:
    failures = failed_line_names(gain_table(GAIN_SCORES | {_gains_lines.EXPLICIT: 0.3}))
    assert "few thumbs: share of the gain with full labels" in failures
    assert "natural signals: share of the gain of explicit feedback" in failures


def test_rounds_are_counted_over_seeds_that_chose_nothing() -> None:
    assert seeds_of(_gains_lines.ARMS[_gains_lines.SFT], range(5)) == [0, 1, 2, 3, 4]
    compared = (
        _gains_lines.DIRECTED_BASE,
        _gains_lines.TYPED,
        *(name for name in _gains_lines.RIVALS if name != _gains_lines.BINARY),
    )
    assert {tuple(seeds_of(_gains_lines.ARMS[arm], range(5))) for arm in compared} == {(*range(5), *range(15, 25))}


def test_an_interval_is_student_s_and_one_seed_has_none() -> None:
    figure = Figure((0.1, 0.2, 0.3, 0.4, 0.5))
    assert figure.reach == pytest.approx(2.776 * 0.158114 / math.sqrt(5), abs=2e-3)
    assert math.isinf(Figure((0.1,)).reach)


def test_other_tasks_than_the_base_s_are_not_compared() -> None:
    other = [(f"other-{task}", value) for task, value in gain_plays(0.7, 0)]
    with pytest.raises(AssertionError, match="the same tasks"):
        Gains([gain_run(_gains_lines.BASE, 0, BASE), gain_run(_gains_lines.SFT, 0, 0.7, scores=other)]).gain(
            _gains_lines.SFT
        )

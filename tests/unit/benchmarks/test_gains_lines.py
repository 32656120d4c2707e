"""Gain lines of `make bench NAME=signals` on constructed runs: sound runs pass, each planted fault fails its line."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from benchmarks import _gains_arms as arms
from benchmarks._gains_arms import Gain
from benchmarks._gains_jobs import seeds_of
from benchmarks._gains_lines import Figure, Gains, lines, misled, rows
from headrace_statistics.clustered_means import Score

SEEDS, TASKS, BASE = 5, 400, 0.35
SCORES = {
    arms.BASE: BASE,
    arms.EXPLICIT: 0.75,
    arms.SFT: 0.65,
    arms.DPO: 0.65,
    arms.NATURAL: 0.65,
    arms.FEW: 0.67,
    arms.POISONED: 0.66,
    arms.DIRECTED_BASE: BASE,
    arms.TYPED: 0.6,
    arms.BY_TOKEN: 0.6,
    **dict.fromkeys(arms.RIVALS, 0.6),
    **{arm.name: math.nan for arm in (arms.HAS_A_GAP, *arms.HAS_NONE, arms.MISLED)},
}
QUICK = {arms.TYPED: 1.0, **dict.fromkeys(arms.RIVALS, 0.3)}
"""Share of the final gain that an arm has after a tenth of the sessions."""


def plays(score: float, seed: int, guard: float | None = None) -> list[Score]:
    """Return plays with the same luck for all arms of a seed, so that only scores cause differences."""
    draw = random.Random(seed)
    kinds = ["extension", arms.GUARD] * (TASKS // 2)
    success_rates = {"extension": score, arms.GUARD: score if guard is None else guard}
    return [(f"{kind}-{number}", float(draw.random() < success_rates[kind])) for number, kind in enumerate(kinds)]


def run(arm: str, seed: int, score: float, **changes: object) -> Gain:
    gain = Gain(arm, seed, [] if math.isnan(score) else plays(score, seed))
    gain.edits = 150 if arm in (arms.SFT, arms.DPO) else 0
    gain.sessions = 480
    gain.steps = int(arm == arms.HAS_A_GAP.name or bool(gain.scores))
    if arm in QUICK:
        shares = (QUICK[arm], 1.0)
        gain.trace = [(48 + 432 * n, plays(BASE + (score - BASE) * share, seed)) for n, share in enumerate(shares)]
    if arm in (arms.FEW, arms.POISONED):
        draw = random.Random(seed)
        gain.ordered = [(good, draw.gauss(0.6 if good else 0.4, 0.1)) for good in (True, False) * 200]
        gain.judged = gain.ordered[:200]
    for name, value in changes.items():
        setattr(gain, name, value)
    return gain


def table(scores: Mapping[str, float], changed: Mapping[str, Mapping[str, object]] | None = None) -> Gains:
    changes = changed or {}
    return Gains(
        run(arm, seed, score, **changes.get(arm, {})) for arm, score in scores.items() for seed in range(SEEDS)
    )


def failed_line_names(gains: Gains) -> list[str]:
    return [line.name for line in lines(gains) if not line.holds]


def test_sound_runs_miss_no_line() -> None:
    gains = table(SCORES)
    assert failed_line_names(gains) == []
    assert len(lines(gains)) == 14
    assert set(rows(gains)) == {arm for arm, score in SCORES.items() if not math.isnan(score)}
    assert misled(gains) == Figure((0.0,) * SEEDS)
    assert misled(Gains([])) is None
    assert gains.sessions_to(arms.TYPED, 0.15) == 48
    assert gains.sessions_to(arms.BINARY, 0.15) == 480


FIXED_BASE = {arms.DIRECTED_BASE: {"scores": plays(BASE, 0)}}
"""A base with the same plays for every seed, to match an arm with changed plays."""


@pytest.mark.parametrize(
    ("scores", "changed", "line"),
    [
        ({arms.SFT: 0.45}, {}, "edits, sft: gain"),
        ({arms.DPO: 0.3}, {}, "edits, dpo: gain"),
        ({}, {arms.DPO: {"edits": 201}}, "edits, dpo: edits"),
        ({arms.NATURAL: 0.5}, {}, "natural signals"),
        ({arms.FEW: 0.58, arms.POISONED: 0.57}, {}, "few thumbs: share"),
        ({arms.POISONED: 0.58}, {}, "few thumbs: what 2 % poisoners cost"),
        ({}, {arms.FEW: {"ordered": [(True, 0.4), (False, 0.6)]}}, "few thumbs: AUROC of the reward model"),
        ({}, {arms.FEW: {"judged": [(True, 0.4), (False, 0.6)]}}, "few thumbs: AUROC of the rewards"),
        ({}, {arms.TYPED: {"scores": plays(0.45, 0)}, **FIXED_BASE}, "typed corrections: gain"),
        ({}, {arms.TYPED: {"sessions": 512}}, "typed corrections: sessions"),
        ({}, {arms.BINARY: {"trace": [(48, plays(0.9, 0))]}}, "typed corrections: sessions to 15 points"),
        *(
            ({}, {arm: {"trace": [(95, plays(0.9, 0))]}}, "typed corrections: sessions to 15 points")
            for arm in arms.RIVALS
        ),
        ({}, {arms.TYPED: {"scores": plays(0.9, 0, guard=0.3)}, **FIXED_BASE}, "typed corrections: what the guard"),
        ({}, {arms.HAS_NONE[0].name: {"steps": 1}}, "typed corrections: settings"),
        ({}, {arms.HAS_A_GAP.name: {"steps": 0}}, "typed corrections: settings"),
    ],
)  # fmt: skip
def test_each_fault_fails_its_line(scores: dict[str, float], changed: dict[str, dict[str, object]], line: str) -> None:
    failures = failed_line_names(table(SCORES | scores, changed))
    assert len(failures) == 1, failures
    assert failures[0].startswith(line)


def test_what_learned_nothing_has_no_share_of_a_gain() -> None:
    failures = failed_line_names(table(SCORES | {arms.EXPLICIT: 0.3}))
    assert "few thumbs: share of the gain with full labels" in failures
    assert "natural signals: share of the gain of explicit feedback" in failures


def test_rounds_are_counted_over_seeds_that_chose_nothing() -> None:
    assert seeds_of(arms.ARMS[arms.SFT], range(5)) == [0, 1, 2, 3, 4]
    compared = (arms.DIRECTED_BASE, arms.TYPED, *(name for name in arms.RIVALS if name != arms.BINARY))
    assert {tuple(seeds_of(arms.ARMS[arm], range(5))) for arm in compared} == {(*range(5), *range(15, 25))}


def test_an_interval_is_student_s_and_one_seed_has_none() -> None:
    figure = Figure((0.1, 0.2, 0.3, 0.4, 0.5))
    assert figure.reach == pytest.approx(2.776 * 0.158114 / math.sqrt(5), abs=2e-3)
    assert math.isinf(Figure((0.1,)).reach)


def test_other_tasks_than_the_base_s_are_not_compared() -> None:
    other = [(f"other-{task}", value) for task, value in plays(0.7, 0)]
    with pytest.raises(AssertionError, match="the same tasks"):
        Gains([run(arms.BASE, 0, BASE), run(arms.SFT, 0, 0.7, scores=other)]).gain(arms.SFT)

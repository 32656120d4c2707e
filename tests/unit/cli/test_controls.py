"""Tests of control experiments (`headrace controls`).

They cover the experiences with given rewards, their selection from a recording, the effect of each control on the
rewards (and on no other field), the verdicts compared with the gain of the true reward, and the advice in the report.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.errors import UsageError
from headrace_operations.controls import kinds
from headrace_operations.controls.kinds import (
    CONTROLS,
    FLIPPED,
    RANDOM,
    SHUFFLED,
    STILL,
    TRUE,
    Control,
    only_source,
    reward_sources,
)
from headrace_operations.controls.report import CERTAINTY, SHARE_MAX, Report, Run
from headrace_operations.controls.runner import from_file, select_trainable
from headrace_schemas import Branch, Checkpoint, Experience, RewardPart, Span
from headrace_schemas.programs import ShortRun
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.ids import session_key
from headrace_statistics.intervals import Mean, Score, certainty_above
from tests.support.presence import draw_seed

VERSION = "m@000000000000"


def experience(number: int, reward: float | None, version: str = VERSION, **parts: float) -> Experience:
    """Return an experience of one task and one turn. `parts` are the parts of its reward by source."""
    branch = Branch(token_ids=(1, 2, 3), spans=(Span(start=1, logprobs=(-0.5, -0.5), turn_id="t", version=version),))
    return Experience(
        time=datetime(2026, 11, 20, tzinfo=UTC),
        experience_id=f"e{number}",
        trajectory_id=f"t{number}",
        session_key=session_key("default", str(number)),
        session_id=str(number),
        model="m",
        branch=branch,
        reward=reward,
        no_reward="no_reward" if reward is None else None,
        parts=tuple(RewardPart(source=name, value=value, weight=1.0) for name, value in parts.items()),
    )


def rewards(experiences: list[Experience]) -> list[float | None]:
    return [experience.reward for experience in experiences]


def test_the_newest_revision_counts_in_the_order_of_first_revisions() -> None:
    first, second = experience(0, 0.1), experience(1, 0.2)
    later = first.model_copy(update={"revision": 2, "reward": 0.9})
    earlier = first.model_copy(update={"revision": 1, "reward": 0.5})
    experiences = select_trainable([first, second, later, earlier], "m", 10).experiences
    assert [(selected.experience_id, selected.reward) for selected in experiences] == [("e0", 0.9), ("e1", 0.2)]


def test_withdrawn_experiences_are_left_out_and_restored_ones_have_their_tokens() -> None:
    original = experience(0, 0.1)
    withdrawn = original.model_copy(update={"revision": 1, "reward": None, "no_reward": "withdrawn", "branch": None})
    assert not select_trainable([original, withdrawn], "m", 10).experiences
    restored = original.model_copy(update={"revision": 2, "branch": None, "reward": 0.7})
    (selected,) = select_trainable([original, withdrawn, restored], "m", 10).experiences
    assert (selected.reward, selected.branch) == (0.7, original.branch)


def test_only_the_newest_experiences_of_the_model_are_selected() -> None:
    experiences = [experience(number, 0.1) for number in range(4)]
    assert not select_trainable(experiences, "other", 10).experiences
    assert [selected.experience_id for selected in select_trainable(experiences, "m", 2).experiences] == ["e2", "e3"]


def test_experiences_of_later_versions_are_left_out_and_counted() -> None:
    """A control that imitates the answers of a better version gains with any reward."""
    later = "m@111111111111"
    mixed = experience(4, 0.1)
    assert mixed.branch is not None
    second_span = Span(start=3, logprobs=(-0.5,), turn_id="u", version=later)
    branch = Branch(token_ids=(1, 2, 3, 4), spans=(*mixed.branch.spans, second_span))
    mixed = mixed.model_copy(update={"branch": branch})
    unrewarded = experience(0, None, version=later)
    experiences = [unrewarded, experience(1, 0.1), experience(2, 0.2, version=later), experience(3, 0.3), mixed]
    recording = select_trainable(experiences, "m", 10)
    assert [selected.experience_id for selected in recording.experiences] == ["e1", "e3"]
    assert (recording.version, recording.later) == (VERSION, 2)
    newest = select_trainable(experiences, "m", 1)
    assert [selected.experience_id for selected in newest.experiences] == ["e3"], "the limit applies to what is left"


def test_lines_of_replay_events_and_bare_events_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    text = experience(0, 0.5).to_json().decode()
    path.write_text(f'{{"topic": "experiences", "event": {text}}}\n\n{text}\n{{"problem": "no event"}}\n')
    assert [selected.experience_id for selected in from_file(path)] == ["e0", "e0"]


@pytest.mark.parametrize("line", ["no json", '{"event": {"experience_id": 1}}', "[]"])
def test_an_invalid_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"lines\.jsonl, line 1: is not an experience of `headrace replay events"):
        from_file(path)


def test_a_missing_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write a file with `headrace replay events experiences -o FILE`"):
        from_file(tmp_path / "none.jsonl")


PLAYS = 400


def checkpoint() -> Checkpoint:
    digest = sha256(b"").hexdigest()
    ref = BlobRef(uri="memory://x", sha256=digest, size=0)
    return Checkpoint(time=datetime.now(UTC), model="m", version=f"m@{digest[:16]}", lineage="c", step=0, manifest=ref)


def plays(score: float, seed: int = 0) -> list[Score]:
    draw = random.Random(seed)
    return [(str(number), float(draw.random() < score)) for number in range(PLAYS)]


def report(*scores: tuple[Control, float]) -> Report:
    short = ShortRun(base=checkpoint(), last=checkpoint(), trained=64, steps=1)
    return Report(64, plays(0.3), [Run(control, 0, short, plays(score)) for control, score in scores])


SOUND = {TRUE: 0.6, SHUFFLED: 0.3, FLIPPED: 0.1, RANDOM: 0.3, STILL: 0.3}


def test_expected_results_are_no_problems() -> None:
    assert report(*SOUND.items(), (only_source("format"), 0.3), (only_source("answer"), 0.6)).problems == []


def test_a_shuffled_control_that_learns_is_a_problem() -> None:
    (problem,) = report(*(SOUND | {SHUFFLED: 0.6}).items()).problems
    assert problem.startswith("shuffled: the reward does not cause the learning")
    assert "of the true reward's +" in problem


def test_each_unexpected_result_is_a_problem() -> None:
    scores = {TRUE: 0.3, SHUFFLED: 0.6, FLIPPED: 0.6, RANDOM: 0.6, STILL: 0.1}
    controls_report = report(*scores.items(), (only_source("format"), 0.1))
    names = [problem.split(":")[0] for problem in controls_report.problems]
    assert names == [*(control.name for control in CONTROLS), "format alone"]
    as_json = controls_report.as_json()
    assert [control_json["as_expected"] for control_json in as_json["controls"]] == [False] * 6
    assert as_json["problems"] == controls_report.problems


def test_a_constant_score_is_a_problem_of_the_true_reward_alone() -> None:
    assert [problem.split(":")[0] for problem in report((TRUE, 0.3), (SHUFFLED, 0.1)).problems] == ["true"]


def test_a_falling_score_without_information_gives_advice() -> None:
    (one_seed,) = report(*SOUND.items()).advice
    assert "Repeat with --seeds 5" in one_seed
    controls_report = report(*(SOUND | {SHUFFLED: 0.1}).items())
    assert controls_report.problems == []
    advice, _ = controls_report.advice
    assert advice.startswith("shuffled: ")
    assert "trainer.optimizer.learning_rate" in advice
    assert controls_report.as_json()["advice"] == controls_report.advice


EXPERIENCES = [experience(number, reward) for number, reward in enumerate((0.0, 0.2, 1.0, 0.2))]


def chance(seed: int = 0) -> random.Random:
    return random.Random(seed)


def test_controls_true_and_still_change_no_reward() -> None:
    assert TRUE.change(EXPERIENCES, chance()) == STILL.change(EXPERIENCES, chance()) == EXPERIENCES
    assert STILL.settings == {"trainer.optimizer.learning_rate": 1e-300}


def test_flipped_rewards_keep_their_span() -> None:
    assert rewards(FLIPPED.change(EXPERIENCES, chance())) == [1.0, 0.8, 0.0, 0.8]
    assert FLIPPED.change([], chance()) == []


RECORDED = [experience(number, float(number % 6 == 0)) for number in range(96)]
"""Runs of which one in six succeeds: by chance a shuffle has a correlation of 0.1 with these rewards."""


def recorded_gain(control: Control, seed: int) -> float:
    """Return by how much the mean reward that a control deals to the successful runs exceeds that of the others."""
    dealt = rewards(control.change(RECORDED, chance(seed)))
    pairs = [(true.reward, float(reward or 0.0)) for true, reward in zip(RECORDED, dealt, strict=True)]
    return fmean(new for true, new in pairs if true) - fmean(new for true, new in pairs if not true)


@pytest.mark.parametrize("control", [SHUFFLED, RANDOM], ids=lambda control: control.name)
def test_rewards_dealt_by_chance_do_not_favour_the_successful_runs(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = [abs(recorded_gain(control, seed)) for seed in range(60)]
    assert max(gains) < 0.06, gains
    monkeypatch.setattr(kinds, "DRAWS", 1)
    assert max(abs(recorded_gain(control, seed)) for seed in range(60)) > 0.2, "a plain shuffle often favours them"


def test_shuffled_rewards_are_a_permutation_in_which_each_run_gets_each_reward_equally_often() -> None:
    counts = Counter[int]()
    for seed in range(200):
        shuffled = rewards(SHUFFLED.change(RECORDED, chance(seed)))
        assert sorted(map(float, filter(None, shuffled))) == [1.0] * 16
        counts.update(number for number, reward in enumerate(shuffled) if reward)
    assert all(10 <= counts[number] <= 60 for number in range(96)), counts  # 33 expected, a standard deviation of 5.3


def test_rewards_without_variation_are_dealt_as_they_are() -> None:
    equal = [experience(number, 0.5) for number in range(3)]
    assert rewards(SHUFFLED.change(equal, chance())) == rewards(RANDOM.change(equal, chance())) == [0.5] * 3


def test_random_rewards_are_drawn_from_the_distribution() -> None:
    dealt = Counter(reward for seed in range(60) for reward in rewards(RANDOM.change(RECORDED, chance(seed))))
    assert set(dealt) == {0.0, 1.0}
    assert 0.12 < dealt[1.0] / dealt.total() < 0.21, dealt


def test_a_source_alone_leaves_out_unscored_experiences() -> None:
    experiences = [experience(0, 0.6, answer=1.0, format=0.2), experience(1, 0.3, format=0.3)]
    assert reward_sources(experiences) == ["answer", "format"]
    assert rewards(only_source("format").change(experiences, chance())) == [0.2, 0.3]
    scored = only_source("answer").change(experiences, chance())
    assert [(scored_experience.experience_id, scored_experience.reward) for scored_experience in scored] == [
        ("e0", 1.0)
    ]


def test_controls_change_only_rewards_and_are_reproducible() -> None:
    for control in (*CONTROLS, only_source("x")):
        changed = control.change(EXPERIENCES, chance(7))
        assert changed == control.change(EXPERIENCES, chance(7))
        for before, after in zip(EXPERIENCES, changed, strict=False):
            assert before.model_copy(update={"reward": 0}) == after.model_copy(update={"reward": 0})
    assert rewards(EXPERIENCES) == [0.0, 0.2, 1.0, 0.2], "the input is unchanged"


TASKS, BASE = 200, 0.23


def short_plays(rate: float, draw: random.Random, tasks: int = TASKS) -> list[Score]:
    """Return scores of `tasks`, of which about `rate` are 1. Equal random states succeed on the same tasks at higher
    rates."""
    return [(str(number), float(draw.random() < rate)) for number in range(tasks)]


def report_of(gains: dict[Control, float], seed: int, trainings: int = 1) -> Report:
    """Return a report of trainings whose expected gains are `gains` over a base success rate of 23 %."""
    run = cast(ShortRun, SimpleNamespace(steps=10, trained=500, stopped=None))
    draw = random.Random(seed)
    runs = [
        Run(control, n, run, short_plays(BASE + gain, draw))
        for n in range(trainings)
        for control, gain in gains.items()
    ]
    return Report(500, short_plays(BASE, draw), runs)


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

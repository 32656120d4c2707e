"""Problems and advice of a controls report."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from hashlib import sha256

from headrace_operations.controls.kinds import CONTROLS, FLIPPED, RANDOM, SHUFFLED, STILL, TRUE, Control, alone
from headrace_operations.controls.report import Report, Run
from headrace_schemas import Checkpoint
from headrace_schemas.programs.replay import ShortRun
from headrace_schemas.values.blobs import BlobRef
from headrace_statistics.clustered_means import Score

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
    assert report(*SOUND.items(), (alone("format"), 0.3), (alone("answer"), 0.6)).problems == []


def test_a_shuffled_control_that_learns_is_a_problem() -> None:
    (problem,) = report(*(SOUND | {SHUFFLED: 0.6}).items()).problems
    assert problem.startswith("shuffled: the reward does not cause the learning")
    assert ", the true reward +" in problem


def test_each_unexpected_result_is_a_problem() -> None:
    scores = {TRUE: 0.3, SHUFFLED: 0.6, FLIPPED: 0.6, RANDOM: 0.6, STILL: 0.1}
    controls_report = report(*scores.items(), (alone("format"), 0.1))
    names = [problem.split(":")[0] for problem in controls_report.problems]
    assert names == [*(control.name for control in CONTROLS), "format alone"]
    as_json = controls_report.as_json()
    assert [control_json["as_expected"] for control_json in as_json["controls"]] == [False] * 6
    assert as_json["problems"] == controls_report.problems


def test_a_constant_score_is_a_problem_of_the_true_reward_alone() -> None:
    assert [problem.split(":")[0] for problem in report((TRUE, 0.3), (SHUFFLED, 0.1)).problems] == ["true"]


def test_a_falling_score_without_information_gives_advice() -> None:
    assert report(*SOUND.items()).advice == []
    controls_report = report(*(SOUND | {SHUFFLED: 0.1}).items())
    assert controls_report.problems == []
    (advice,) = controls_report.advice
    assert advice.startswith("shuffled: ")
    assert "trainer.optimizer.learning_rate" in advice
    assert controls_report.as_json()["advice"] == controls_report.advice

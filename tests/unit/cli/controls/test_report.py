"""What is said in words, and what makes the command fail."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from hashlib import sha256

from headrace_operations.controls.kinds import CONTROLS, FLIPPED, RANDOM, SHUFFLED, STILL, TRUE, Control, alone
from headrace_operations.controls.report import Report, Run
from headrace_operations.controls.statistics import Score
from headrace_schemas import Checkpoint
from headrace_schemas.blobs import BlobRef
from headrace_schemas.controls import ShortRun

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


def test_what_comes_out_as_it_has_to_is_no_problem() -> None:
    assert report(*SOUND.items(), (alone("format"), 0.3), (alone("answer"), 0.6)).problems == []


def test_a_control_that_learns_as_well_as_the_truth_is_said() -> None:
    (said,) = report(*(SOUND | {SHUFFLED: 0.6}).items()).problems
    assert said.startswith("shuffled: the reward does not cause the learning")
    assert ", the true reward +" in said


def test_each_control_that_fails_is_said() -> None:
    wrong = {TRUE: 0.3, SHUFFLED: 0.6, FLIPPED: 0.6, RANDOM: 0.6, STILL: 0.1}
    found = report(*wrong.items(), (alone("format"), 0.1))
    names = [said.split(":")[0] for said in found.problems]
    assert names == [*(control.name for control in CONTROLS), "format alone"]
    as_json = found.as_json()
    assert [one["as_expected"] for one in as_json["controls"]] == [False] * 6
    assert as_json["problems"] == found.problems


def test_the_truth_may_not_stand_still_and_shuffled_may_fall() -> None:
    assert [said.split(":")[0] for said in report((TRUE, 0.3), (SHUFFLED, 0.1)).problems] == ["true"]


def test_noise_that_ruins_the_model_is_no_problem_of_the_reward_but_said() -> None:
    assert report(*SOUND.items()).advice == []
    found = report(*(SOUND | {SHUFFLED: 0.1}).items())
    assert found.problems == []
    (said,) = found.advice
    assert said.startswith("shuffled: ")
    assert "trainer.optimizer.learning_rate" in said
    assert found.as_json()["advice"] == found.advice

"""Tests of the work that one experience costs: it grows with the experience's size and not with its square."""

from __future__ import annotations

import time
from pathlib import Path

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.trajectory import PreferenceSide, TurnReward
from headrace_trainer.algorithms.presets import Signals
from headrace_trainer.experiences.admission import AdmissionLimits
from headrace_trainer.experiences.replies import ReplyReader
from tests.unit.trainer.test_history import name
from tests.unit.trainer.world import experience

SPANS_MAX, SIDES_MAX = 4096, 256
VERSION = name(1)


def with_branch(branch: Branch) -> Experience:
    """Return an experience of `branch` with as many signals as an event may hold."""
    turns = branch.turn_ids
    update = {
        "branch": branch,
        "turn_rewards": tuple(TurnReward(turn_id=turn, value=0.0) for turn in turns),
        "preferences": tuple(
            PreferenceSide(turn_id=turn, preference_id=f"preference-{turn}", side="chosen")
            for turn in turns[-SIDES_MAX:]
        ),
    }
    return experience(1, VERSION).model_copy(update=update)


def many_answers() -> Branch:
    spans = tuple(
        Span(start=2 * index + 1, logprobs=(-1.0,), turn_id=f"turn-{index}", version=VERSION)
        for index in range(SPANS_MAX)
    )
    return Branch(token_ids=(2,) * (2 * SPANS_MAX + 1), spans=spans)


def test_the_examples_of_the_largest_experience_take_linear_time(base: Path) -> None:
    limits = AdmissionLimits(
        vocabulary=320,
        sequence_tokens=40_000,
        max_staleness=2,
        reward_max=100.0,
        advantage_max=10.0,
        correction_min=0.01,
        signals=Signals(preferences=True, replies=True),
        replies=ReplyReader(base, 0.2, 0.8),
    )
    largest = with_branch(many_answers())
    began_s = time.process_time()
    assert limits.examples(largest)
    assert time.process_time() - began_s < 2.0, "it took 75 s when each answer was searched among all spans"

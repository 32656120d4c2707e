"""A value outside the declared range of its source does not count, and the source is named."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from headrace_schemas import DeadLetter
from headrace_scorer.settings import ScorerSettings
from tests.support.trajectories import closed
from tests.support.turns import feedback
from tests.unit.scorer.conftest import Open
from tests.unit.scorer.test_scorer import reward

RANGES = {"feedback": (0.0, 1.0), "feedback:*": (0.0, 5.0), "stars": (1.0, 5.0), "function:*": (-1.0, 1.0)}


def test_the_first_pattern_that_fits_counts() -> None:
    settings = ScorerSettings(ranges=RANGES)
    seed = 8
    print(f"seed {seed}")
    chance = random.Random(seed)
    for source, (low, high) in (("feedback", (0, 1)), ("feedback:tone", (0, 5)), ("stars", (1, 5))):
        for _ in range(50):
            assert settings.violation(source, chance.uniform(low, high)) is None
            outside = chance.choice((low - 10 ** chance.uniform(-9, 6), high + 10 ** chance.uniform(-9, 6)))
            assert f"{source} = " in (settings.violation(source, outside) or "")
        assert settings.violation(source, low) is settings.violation(source, high) is None
    assert settings.violation("judge:r", 1e6) is None
    assert settings.violation("feedback", None) is None


@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_without_room_is_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValidationError):
        ScorerSettings(ranges={"feedback": limits})


async def test_feedback_and_rewards_outside_their_range_are_dead_lettered_by_name(open_scorer: Open) -> None:
    trajectory = closed()
    async with open_scorer(ranges=RANGES) as rig:
        await rig.deliver(trajectory)
        await rig.deliver(feedback(value=100.0), reward(trajectory, "stars", value=50.0))
        letters = rig.stream.sent(DeadLetter)
        assert [letter.reason for letter in letters] == ["out_of_range", "out_of_range"]
        assert "feedback = 100: must be from 0 to 1 (scorer.ranges)" in letters[0].error
        assert "stars = 50: must be from 1 to 5 (scorer.ranges)" in letters[1].error
        assert rig.experiences() == []
        await rig.deliver(feedback(value=1.0), reward(trajectory, "stars", value=5.0))
        assert rig.experiences()[-1][2] == 3.0
        assert len(rig.stream.sent(DeadLetter)) == 2


async def test_a_reward_function_outside_its_range_has_failed(open_scorer: Open) -> None:
    def percent() -> float:
        return 85.0

    async with open_scorer(percent, ranges=RANGES) as rig:
        await rig.deliver(closed())
        await rig.run_functions()
        assert rig.rewards() == [("function:percent", 0, "failed", None)]
        (source,) = rig.scoring.sources.listed().data
    assert "function:percent = 85: must be from -1 to 1" in (source.last_error or "")

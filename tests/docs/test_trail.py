"""A trail that is read while services write: what is not there yet is waited for."""

from __future__ import annotations

import pytest

from headrace_schemas import Event, Experience, Reward, RewardPart
from tests.docs.trail import Log, Missing, follow
from tests.support.streams import START
from tests.support.trajectories import closed
from tests.support.turns import ask, feedback, user


def test_a_reward_that_came_after_its_topic_was_read_is_waited_for() -> None:
    """Topics are read one after the other: the experience may hold a reward that the reading of rewards did not see."""
    turn = ask([user("q")])
    run = closed(turn)
    experience = Experience(
        time=START, experience_id=Experience.id_of(run.trajectory_id, 0), trajectory_id=run.trajectory_id,
        session_key=run.session_key, session_id="s", model="m", branch=run.branches[0], turn_ids=(turn.turn_id,),
        reward=2.0, parts=tuple(RewardPart(source=one, value=1.0, weight=1.0) for one in ("function:a", "feedback")),
    )  # fmt: skip

    def rewarded(source: str) -> Reward:
        return Reward(
            time=START, trajectory_id=run.trajectory_id, session_key=run.session_key, source=source, revision=0,
            outcome="scored", value=1.0,
        )  # fmt: skip

    seen: list[Event] = [turn, feedback("s", turn), run, rewarded("function:a"), experience]
    with pytest.raises(Missing, match="feedback"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="training-metrics"):
        follow(Log([*seen, rewarded("feedback")]), turn.turn_id)

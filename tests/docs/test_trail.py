"""A trail that is read while services write: it waits for missing events."""

from __future__ import annotations

import pytest

from headrace_schemas import Checkpoint, Event, Experience, Reward, RewardPart, Trajectory, Turn
from headrace_schemas.values.blobs import BlobRef
from tests.docs.trail import Log, Missing, follow
from tests.support.account_events import report, verdict
from tests.support.trajectories import closed
from tests.support.turns import START, ask, feedback, user


def experience_of(run: Trajectory, turn: Turn, *sources: str) -> Experience:
    return Experience(
        time=START, experience_id=Experience.id_of(run.trajectory_id, 0), trajectory_id=run.trajectory_id,
        session_key=run.session_key, session_id="s", model="m", branch=run.branches[0], turn_ids=(turn.turn_id,),
        reward=1.0, parts=tuple(RewardPart(source=source, value=1.0, weight=1.0) for source in sources),
    )  # fmt: skip


def rewarded(run: Trajectory, source: str) -> Reward:
    return Reward(
        time=START, trajectory_id=run.trajectory_id, session_key=run.session_key, source=source, revision=0,
        outcome="scored", value=1.0,
    )  # fmt: skip


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        time=START, model="m", version=f"m@{step:012x}", lineage="main", step=step,
        manifest=BlobRef(uri="none", sha256="0" * 64, size=0),
    )  # fmt: skip


def test_a_reward_that_came_after_its_topic_was_read_is_waited_for() -> None:
    """Topics are read one after the other: the experience may hold a reward that the reading of rewards did not see."""
    turn = ask([user("q")])
    run = closed(turn)
    experience = experience_of(run, turn, "function:a", "feedback")
    seen: list[Event] = [turn, feedback("s", turn), run, rewarded(run, "function:a"), experience]
    with pytest.raises(Missing, match="feedback"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="training-metrics"):
        follow(Log([*seen, rewarded(run, "feedback")]), turn.turn_id)


def test_a_batch_that_moved_no_weights_is_in_the_next_version() -> None:
    """One walk in 35 has a batch with equal rewards, from which no version is made."""
    turn = ask([user("q")])
    run = closed(turn)
    experience = experience_of(run, turn, "feedback")
    seen: list[Event] = [turn, feedback("s", turn), run, rewarded(run, "feedback"), experience, checkpoint(0)]
    seen.append(report(verdict(experience.experience_id, turn.turn_id)))
    with pytest.raises(Missing, match="checkpoints"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="model-events"):
        follow(Log([*seen, checkpoint(1)]), turn.turn_id)


def test_a_version_is_that_of_its_report() -> None:
    turn = ask([user("q")])
    run = closed(turn)
    experience = experience_of(run, turn, "feedback")
    reported = report(verdict(experience.experience_id, turn.turn_id), save=1)
    seen: list[Event] = [turn, feedback("s", turn), run, rewarded(run, "feedback"), experience, checkpoint(2)]
    seen.append(reported.model_copy(update={"version": checkpoint(1).version}))
    with pytest.raises(Missing, match="checkpoints"):
        follow(Log(seen), turn.turn_id)
    with pytest.raises(Missing, match="model-events"):
        follow(Log([*seen, checkpoint(1)]), turn.turn_id)

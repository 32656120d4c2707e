"""Tests of the scorer: rewards of all sources are joined in a ledger and become experiences, with revisions and
withdrawals."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from headrace_schemas import DeadLetter, Experience, LeftOut, Reward, Trajectory
from headrace_scorer import schema
from tests.support.turns import START, VERSION, ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, answer, half


def reward(trajectory: Trajectory, source: str, value: float | None = 1.0, revision: int = 0, **fields: Any) -> Reward:
    defaults = {
        "time": START,
        "trajectory_id": trajectory.trajectory_id,
        "session_key": trajectory.session_key,
        "tenant": trajectory.tenant,
        "source": source,
        "revision": revision,
        "value": value,
        "outcome": "scored" if value is not None else "abstained",
    }
    return Reward.model_validate({**defaults, **fields})


async def test_the_migrated_schema_is_the_one_in_the_code(open_scorer: Open) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"version_table": "schema_version"})
        return list(compare_metadata(context, schema.metadata))

    async with open_scorer() as rig, rig.stream.processor.database.transaction() as tx:
        assert await tx.run_sync(differences) == []


async def test_a_function_scores_and_the_branches_share_the_weight(open_scorer: Open) -> None:
    turns = [ask([user("q")], text, at=at) for at, text in enumerate("ab")]
    async with open_scorer(half) as rig:
        trajectory = closed(*turns, parts=2, task_id="task", run_id="7")
        await rig.deliver(trajectory)
        assert rig.rewards() == [("function:half", 0, "scored", 0.5)]
        assert rig.experiences() == [(0, 0, 0.5, None), (1, 0, 0.5, None)]
        first, second = rig.stream.sent(Experience)
        assert (first.weight, second.weight) == (0.25, 0.25)
        assert first.branch == trajectory.branches[0], "the tokens are bit for bit the trajectory's (P2)"
        assert (first.task_id, first.run_id, first.turn_ids) == ("task", "7", (turns[0].turn_id,))
        assert [(part.source, part.value, part.weight) for part in first.parts] == [("function:half", 0.5, 1.0)]
        assert first.key == trajectory.key


async def test_a_redelivered_trajectory_changes_nothing(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        record = rig.stream.produce(closed())[0]
        await rig.stream.deliver(record, record)
        await rig.run_functions()
        await rig.stream.deliver(record)
        await rig.deliver(*rig.stream.sent(Reward))
        assert (len(rig.rewards()), len(rig.experiences())) == (1, 1)
        assert await rig.stream.count("ledger") == 1, "our own rewards come back over the bus and are known"


async def test_everybody_expected_is_waited_for(open_scorer: Open) -> None:
    async with open_scorer(half, expected=["judge:*"], required=["feedback"]) as rig:
        trajectory = closed()
        await rig.deliver(trajectory)
        await rig.deliver(reward(trajectory, "judge:help", None))
        assert rig.experiences() == []
        await rig.deliver(feedback(value=1.0))
        assert rig.experiences() == [(0, 0, 0.75, None)]


async def test_p6_whoever_abstains_or_fails_is_no_zero(open_scorer: Open) -> None:
    def abstains() -> None: ...

    def fails() -> str:
        raise RuntimeError("broken")

    def returns_nonsense() -> float:
        return float("nan")

    async with open_scorer(half, abstains, fails, returns_nonsense) as rig:
        await rig.deliver(closed())
        assert sorted(outcome for _, _, outcome, _ in rig.rewards()) == ["abstained", "failed", "failed", "scored"]
        assert rig.experiences() == [(0, 0, 0.5, None)]


async def test_what_has_no_reward_when_waiting_ends_says_so(open_scorer: Open) -> None:
    async with open_scorer(reward_wait_s=60) as rig:
        await rig.deliver(closed())
        await rig.pass_time(59)
        assert rig.experiences() == []
        await rig.pass_time(1)
        assert rig.experiences() == [(0, 0, None, "no_reward")]
        assert rig.stream.sent(Experience)[0].branch is None
        await rig.pass_time(60)
        assert len(rig.experiences()) == 1


async def test_a_required_source_that_stays_away(open_scorer: Open) -> None:
    async with open_scorer(half, required=["feedback"], reward_wait_s=60) as rig:
        await rig.deliver(closed())
        await rig.pass_time(61)
        assert rig.experiences() == [(0, 0, None, "required_source_missing")]
        await rig.deliver(feedback(value=1.0))
        assert rig.experiences()[1:] == [(0, 1, 0.75, None)], "late is fine (P10)"


async def test_what_is_there_counts_when_waiting_ends(open_scorer: Open) -> None:
    async with open_scorer(half, expected=["judge:*"], reward_wait_s=60) as rig:
        trajectory = closed()
        await rig.deliver(trajectory)
        await rig.pass_time(61)
        assert rig.experiences() == [(0, 0, 0.5, None)]
        await rig.deliver(reward(trajectory, "judge:x", 1.0))
        assert rig.experiences()[1:] == [(0, 1, 0.75, None)]


async def test_p10_feedback_is_joined_in_any_order_and_revised_any_time(open_scorer: Open) -> None:
    turn = ask([user("q")])
    async with open_scorer() as rig:
        early = feedback("s", turn, value=0.0, at=5)
        await rig.deliver(early)
        assert rig.rewards() == []
        await rig.deliver(closed(turn))
        assert rig.rewards() == [("feedback", 0, "scored", 0.0)]
        first, last = rig.stream.produce(
            feedback("s", turn, value=0.3, at=100), feedback("s", turn, value=1.0, at=50, comment="I was wrong")
        )
        await rig.stream.deliver(last)
        await rig.stream.deliver(first)
        assert rig.rewards()[1:] == [("feedback", 1, "scored", 1.0)], "an older word that comes late changes nothing"
        await rig.deliver(feedback("s", turn, value=None, withdrawn=True, at=20))
        assert rig.rewards()[2:] == [("feedback", 2, "withdrawn", None)]
        await rig.deliver(feedback("s", turn, value=0.5, at=300))
        assert [reward for _, _, reward, _ in rig.experiences()] == [0.0, 1.0, None, 0.5]
        assert rig.experiences()[2] == (0, 2, None, "withdrawn")


async def test_feedback_about_a_session_waits_for_its_trajectory(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        await rig.deliver(feedback(value=1.0, at=5))
        await rig.deliver(closed(ask([user("first")]), at=10))
        await rig.deliver(closed(ask([user("second")]), at=20))
        assert [reward.value for reward in rig.stream.sent(Reward)] == [1.0]
        await rig.deliver(feedback(value=0.5, at=15))
        first, second = rig.stream.sent(Reward)
        assert first.trajectory_id != second.trajectory_id


async def test_what_was_said_moves_when_it_turns_out_to_mean_a_newer_trajectory(open_scorer: Open) -> None:
    async with open_scorer() as rig:
        first, second = closed(ask([user("a")]), at=10), closed(ask([user("b")]), at=20)
        await rig.deliver(first)
        await rig.deliver(feedback(value=1.0, at=15))
        await rig.deliver(second)
        moved = [(reward.trajectory_id == second.trajectory_id, reward.outcome) for reward in rig.stream.sent(Reward)]
        assert moved == [(False, "scored"), (True, "scored"), (False, "withdrawn")]
        assert rig.experiences() == [(0, 0, 1.0, None), (0, 0, 1.0, None), (0, 1, None, "withdrawn")]


async def test_feedback_on_one_turn_is_for_its_branch(open_scorer: Open) -> None:
    a, b = ask([user("q")], "a", at=0), ask([user("q")], "b", at=1)
    async with open_scorer() as rig:
        await rig.deliver(closed(a, b))
        await rig.deliver(feedback("s", b, value=1.0))
        assert [reward.turn_id for reward in rig.stream.sent(Reward)] == [b.turn_id]
        assert rig.experiences() == [(0, 0, None, "no_reward"), (1, 0, 1.0, None)]
        await rig.deliver(feedback("s", a, value=0.0))
        assert rig.experiences()[2:] == [(0, 1, 0.0, None)], "the other branch has not changed"


async def test_functions_that_look_at_feedback_look_again(open_scorer: Open) -> None:
    async with open_scorer(answer, half) as rig:
        turn = ask([user("q")], "Ada")
        await rig.deliver(closed(turn))
        assert rig.rewards() == [("function:answer", 0, "abstained", None), ("function:half", 0, "scored", 0.5)]
        await rig.deliver(feedback("s", turn, value=None, context={"expected": "Ada"}))
        assert rig.rewards()[2:] == [("function:answer", 1, "scored", 1.0)], "the other need not look again"
        assert [reward for _, _, reward, _ in rig.experiences()] == [0.5, 0.75]


async def test_no_experience_while_functions_are_about_to_speak_again(open_scorer: Open) -> None:
    async with open_scorer(answer) as rig:
        turn = ask([user("q")], "Ada")
        await rig.stream.deliver(closed(turn))
        first = await rig.perform()
        await rig.stream.deliver(feedback("s", turn, value=0.0, context={"expected": "Ada"}))
        await rig.stream.step(rig.scoring.result_step(first))
        assert rig.rewards() == [("feedback", 0, "scored", 0.0)], "what was said without the facts is not entered"
        assert rig.experiences() == []
        await rig.run_functions()
        assert rig.experiences() == [(0, 0, 0.5, None)]


async def test_names_that_feedback_brings_late_make_a_revision(open_scorer: Open) -> None:
    turn = ask([user("q")])
    async with open_scorer(half) as rig:
        await rig.deliver(closed(turn))
        await rig.deliver(feedback("s", turn, value=None, task_id="task"))
        assert [(experience.revision, experience.task_id) for experience in rig.stream.sent(Experience)] == [
            (0, None),
            (1, "task"),
        ]


async def test_held_out_traffic_gets_rewards_and_no_experience(open_scorer: Open) -> None:
    async with open_scorer(half, reward_wait_s=60) as rig:
        await rig.deliver(closed(purpose="eval"), feedback(value=1.0))
        await rig.pass_time(61)
        assert sorted(source for source, *_ in rig.rewards()) == ["feedback", "function:half"]
        assert rig.experiences() == []


async def test_a_run_with_nothing_to_train_gets_rewards_and_no_experience(open_scorer: Open) -> None:
    turn = ask([user("q")])
    out = LeftOut(turn_id=turn.turn_id, reason="truncated_sampling", version=VERSION)
    async with open_scorer(half, reward_wait_s=60) as rig:
        await rig.deliver(closed(turn, branches=(), left_out=(out,)), feedback("s", turn, value=1.0))
        await rig.pass_time(61)
        assert sorted(source for source, *_ in rig.rewards()) == ["feedback", "function:half"]
        assert rig.experiences() == []


async def test_verdicts_of_third_parties_may_come_first_and_the_highest_revision_counts(open_scorer: Open) -> None:
    trajectory = closed()
    async with open_scorer(expected=["mine"]) as rig:
        await rig.deliver(reward(trajectory, "mine", 0.2, revision=3))
        await rig.deliver(reward(trajectory, "mine", 0.9, revision=1))
        await rig.deliver(trajectory)
        assert rig.experiences() == [(0, 0, 0.2, None)]
        await rig.deliver(reward(trajectory, "mine", 0.4, revision=4))
        assert rig.experiences()[1:] == [(0, 1, 0.4, None)]
        assert await rig.stream.count("ledger") == 3, "the history stays"


async def test_another_tenant_has_no_say(open_scorer: Open) -> None:
    turn = ask([user("q")])
    trajectory = closed(turn)
    forged = feedback("s", turn, value=1.0, tenant="b").model_copy(update={"session_key": turn.session_key})
    general = feedback("s", value=1.0, tenant="b").model_copy(update={"session_key": turn.session_key})
    async with open_scorer(reward_wait_s=60) as rig:
        await rig.deliver(forged, general, reward(trajectory, "x", tenant="b"), trajectory)
        await rig.deliver(reward(trajectory, "y", tenant="b"), forged.model_copy(update={"feedback_id": "again"}))
        await rig.pass_time(61)
        assert rig.rewards() == []
        assert rig.experiences() == [(0, 0, None, "no_reward")]


async def test_too_many_sources_are_dead_lettered(open_scorer: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = closed()
    for module in ("handlers", "ledger"):
        monkeypatch.setattr(f"headrace_scorer.{module}.SOURCES_MAX", 2)
    async with open_scorer() as rig:
        await rig.deliver(trajectory)
        await rig.deliver(*(reward(trajectory, f"source-{n}") for n in range(3)))
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["too_many_sources"]
        assert await rig.stream.count("ledger") == 2
        await rig.deliver(feedback(value=0.0))
        assert rig.rewards() == [], "nor can feedback add one"


@pytest.mark.parametrize("topic", ["trajectories", "rewards", "feedback"])
async def test_poison_is_dead_lettered_and_the_rest_goes_on(open_scorer: Open, topic: str) -> None:
    async with open_scorer(half) as rig:
        poison = [rig.stream.append(topic, value) for value in (b"{", b"[]", b'{"time": 1}', None)]
        await rig.stream.deliver(*poison, closed())
        await rig.run_functions()
        assert len(rig.stream.sent(DeadLetter)) == 4
        assert rig.experiences() == [(0, 0, 0.5, None)]


async def test_feedback_and_rewards_for_nothing_are_kept_and_hurt_nobody(open_scorer: Open) -> None:
    ghost = ask([user("q")])
    async with open_scorer() as rig:
        await rig.deliver(feedback("s", ghost), feedback("nobody"), reward(closed(), "x"))
        assert (rig.rewards(), rig.experiences(), rig.stream.sent(DeadLetter)) == ([], [], [])


async def test_how_each_function_fares_is_known(open_scorer: Open) -> None:
    def broken() -> float:
        raise KeyError("expected")

    async with open_scorer(half, broken) as rig:
        await rig.deliver(closed(session="a"))
        await rig.deliver(closed(session="b"))
        states = {source.id: source for source in rig.scoring.sources.source_list().data}
    assert states["function:half"].outcomes == {"scored": 2}
    assert (states["function:broken"].outcomes, states["function:broken"].failing) == ({"failed": 2}, 2)
    assert "KeyError: 'expected'" in (states["function:broken"].last_error or "")

"""Events of one tenant have no effect on another tenant that uses the same ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from headrace_schemas import DeadLetter, Event, Experience, Reward, Trajectory
from headrace_schemas.events.feedback import task_key
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_schemas.values import ids
from headrace_scorer import schema
from tests.support.trajectories import closed
from tests.support.turns import ask, feedback, said, user
from tests.unit.scorer.conftest import Open, Rig, answer, half

TENANTS = (("default", "b"), ("b", "default"), ("a", "b"), ("a/b", "a"))


def _everything(tenant: str) -> list[Event]:
    """A trajectory with two turns, and feedback and rewards of every kind about it. The ids are equal for all."""
    first, second = (ask([user(f"question {n}")], "yes", "no", tenant=tenant) for n in range(2))
    trajectory = closed(first, second, tenant=tenant, trajectory_id="run-1", task_id="task")
    key = trajectory.session_key
    pair = Preference(chosen=ComparedAnswer(turn_id=first.turn_id), rejected=ComparedAnswer(turn_id=second.turn_id))
    kinds: dict[str, dict[str, Any]] = {
        "value": {"value": 1.0},
        "revised": {"value": 0.25},
        "part": {"value": None, "parts": {"tone": 0.5}},
        "edit": {"value": None, "edit": said("better"), "msg_ids": (first.turn_id,)},
        "preference": {"value": None, "preference": pair, "msg_ids": (first.turn_id, second.turn_id)},
        "facts": {"value": None, "context": {"expected": "yes"}},
        "turn": {"value": 0.5, "level": "turn", "msg_ids": (second.turn_id,), "source": "user"},
        "withdrawn": {
            "value": None,
            "withdrawn": True,
            "source": "user",
            "msg_ids": (second.turn_id,),
            "level": "turn",
        },
    }
    opinions: list[Event] = [
        feedback(tenant=tenant, feedback_id=name, session_key=key, **fields) for name, fields in kinds.items()
    ]
    task = feedback(
        tenant=tenant,
        feedback_id="task",
        session_key=task_key(tenant, "task"),
        task_id="task",
        level="task",
        partition=0,
        value=0.75,
    )
    reward = Reward(
        time=trajectory.time, trajectory_id="run-1", session_key=key, tenant=tenant, source="mine", value=0.5
    )
    return [trajectory, *opinions, task, reward]


def _copied(events: Sequence[Event], tenant: str) -> list[Event]:
    """Return the events for another tenant, with all ids and keys unchanged, including those of the session."""
    return [event.model_copy(update={"tenant": tenant}) for event in events]


def _last_published(rig: Rig, tenant: str) -> dict[tuple[object, ...], tuple[object, ...]]:
    """The last reward of each source and turn of a tenant, and the last experience of each branch."""
    last: dict[tuple[object, ...], tuple[object, ...]] = {}
    for reward in rig.stream.sent(Reward):
        if reward.tenant == tenant:
            last[reward.source, reward.turn_id, reward.choice] = (reward.outcome, reward.value)
    for experience in rig.stream.sent(Experience):
        if experience.tenant == tenant:
            last[(experience.experience_id,)] = (
                experience.reward,
                experience.parts,
                experience.turn_rewards,
                experience.edits,
                experience.preferences,
            )
    return last


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_equal_ids_of_another_tenant_change_nothing(open_scorer: Open, mine: str, other: str) -> None:
    events = _everything(mine)
    copies = _copied(events[1:], other)
    async with open_scorer(answer) as rig:
        await rig.deliver(*events)
        alone = _last_published(rig, mine)
    assert len(alone) > len(events) / 2
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for arrival in ("before", "between", "after"):
        async with open_scorer(answer) as rig:
            if arrival == "before":
                await rig.deliver(*copies)
            for event in events:
                if arrival == "between":
                    await rig.deliver(*rng.sample(copies, rng.randint(0, len(copies))))
                await rig.stream.deliver(event)
            await rig.run_functions()
            if arrival == "after":
                await rig.deliver(*copies)
            assert _last_published(rig, mine) == alone, arrival
            assert rig.stream.sent(DeadLetter) == []


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_trajectory_id_of_another_tenant_is_refused_by_name(open_scorer: Open, mine: str, other: str) -> None:
    trajectory, *rest = _everything(mine)
    assert isinstance(trajectory, Trajectory)
    async with open_scorer(answer) as rig:
        await rig.deliver(trajectory, *rest)
        before = _last_published(rig, mine)
        await rig.deliver(*_copied([trajectory], other))
        assert _last_published(rig, mine) == before
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["trajectory_taken"]


async def test_prefix_of_another_tenant_is_refused_on_the_bus(open_scorer: Open) -> None:
    names = [ids.ingested_trajectory_id("a", "run-1"), ids.ingested_trajectory_id("b", "run-1"), "run-1"]
    turns = [ask([user("q")], tenant="b", turn_id=f"t{at}") for at, _ in enumerate(names)]
    sent = [
        closed(turn, tenant="b", trajectory_id=name, end_reason="ingest")
        for name, turn in zip(names, turns, strict=True)
    ]
    async with open_scorer(half) as rig:
        await rig.deliver(*sent)
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["foreign_trajectory_id"]
        assert {experience.trajectory_id for experience in rig.stream.sent(Experience)} == set(names[1:])


async def test_feedback_of_the_default_tenant_is_stored_under_its_event_id(open_scorer: Open) -> None:
    """Rows of earlier releases have this name, so a retry after an update is still the same feedback."""
    async with open_scorer() as rig:
        event = feedback()
        await rig.deliver(event, event)
        async with rig.stream.processor.database.transaction() as tx:
            assert (await tx.execute(select(schema.feedback.c.event_id))).scalars().all() == [event.event_id]

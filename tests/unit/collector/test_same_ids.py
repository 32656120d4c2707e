"""Two tenants with equal ids: records of one tenant change no session of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace_schemas import DeadLetter, Event, SessionEnd, Trajectory
from tests.support.streams import Bench
from tests.support.turns import after, ask, end, feedback, user
from tests.unit.collector.conftest import Open, pass_time

TENANTS = (("default", "b"), ("b", "default"), ("a", "b"), ("a/b", "a"))


def _copy_for_tenant(events: Sequence[Event], tenant: str) -> list[Event]:
    """Return the same events for another tenant, with equal ids and keys."""
    return [event.model_copy(update={"tenant": tenant}) for event in events]


def _commit(tenant: str) -> SessionEnd:
    return SessionEnd(time=end().time, end_id="commit", scope="tenant", tenant=tenant, reason="commit", partition=0)


def _published(stream: Bench, tenant: str) -> list[dict[str, Any]]:
    trajectories = [trajectory for trajectory in stream.sent(Trajectory) if trajectory.tenant == tenant]
    return [event.model_dump(exclude={"time", "turns_from"}) for event in trajectories]


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_equal_ids_of_another_tenant_change_nothing(with_settings: Open, mine: str, other: str) -> None:
    first = ask([user("q")], "yes", tenant=mine)
    second = ask(after(first, user("more")), "ok", tenant=mine, at=2)
    turns: list[Event] = [first, second]
    opinions: list[Event] = [
        feedback("s", first, second, tenant=mine, feedback_id="f", value=1.0, task_id="t", run_id="r"),
        feedback("s", tenant=mine, feedback_id="g", value=None, context={"expected": "yes"}),
    ]
    ending: list[Event] = [feedback("s", tenant=mine, feedback_id="h", value=0.5, ends_session=True)]
    foreign: list[Event] = [
        feedback("s", first, tenant=mine, feedback_id="i", value=None, task_id="x", ends_session=True),
        end(tenant=mine),
        _commit(mine),
    ]
    copies = [*_copy_for_tenant([*opinions, *ending, *foreign], other)]
    results = []
    for foreign_turns in ((), copies):
        async with with_settings() as stream:
            await stream.deliver(*foreign_turns)
            for event in (*turns, *opinions):
                await stream.deliver(event)
                await stream.deliver(*foreign_turns)
                assert _published(stream, mine) == []
            await stream.deliver(*ending)
            await stream.deliver(*foreign_turns)
            await pass_time(stream, 1.0)
            results.append(_published(stream, mine))
            assert stream.sent(DeadLetter) == []
    assert results[0] == results[1]
    assert len(results[0]) == 1


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_forged_turns_are_dead_lettered_with_the_reason(with_settings: Open, mine: str, other: str) -> None:
    """Neither another tenant's session key nor the id of another session's turn takes anything away."""
    turn = ask([user("q")], "yes", tenant=mine)
    foreign_turn = ask([user("q")], "no", tenant=other)
    forged = [
        turn.model_copy(update={"tenant": other}),
        foreign_turn.model_copy(update={"turn_id": turn.turn_id}),
        foreign_turn.model_copy(update={"session_key": turn.session_key}),
        ask([user("q")], tenant=other, turn_id="own-name"),
        ask([user("q")], tenant=mine, turn_id="own-name"),
    ]
    async with with_settings() as stream:
        await stream.deliver(*forged)
        await stream.deliver(turn, end(tenant=mine))
        reasons = sorted(letter.reason for letter in stream.sent(DeadLetter))
        assert reasons == ["foreign_session_key", "foreign_session_key", "foreign_turn_id", "turn_taken"]
        assert [trajectory["branches"][0]["spans"][0]["turn_id"] for trajectory in _published(stream, mine)] == [
            turn.turn_id
        ]

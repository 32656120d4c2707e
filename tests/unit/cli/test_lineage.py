"""Traces from a version to its training data, and from a session to its versions, on generated histories."""

from __future__ import annotations

import random

import pytest

from headrace.errors import UsageError
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import trace_version
from headrace_schemas import Trajectory
from tests.support.lineage_questions import assert_traces_agree, in_memory, made_up
from tests.support.training_history import History


@pytest.mark.parametrize("repetition", range(10))
async def test_short_histories_with_much_going_back_and_forth(repetition: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    history = made_up(seed, 30, 25)
    await assert_traces_agree(in_memory(history.events), history)


async def test_the_trace_of_a_session_has_the_reason_for_turns_without_experience() -> None:
    history = History(random.Random(3))
    history.begin()
    for number in range(60):
        history.session(number)
    topics = in_memory(history.events)
    for event in history.events:
        if isinstance(event, Trajectory):
            trace = await trace_session(topics, event.session_id, tenant="default", after=0, limit=10)
            (run,) = (run for run in trace.runs if run.trajectory_id == event.trajectory_id)
            assert run.held_out == ("eval" if event.purpose == "eval" else event.untrained)
            assert run.left_out == {item.turn_id: item.reason for item in event.left_out}


async def test_unknown_sessions_and_versions_are_errors() -> None:
    topics = in_memory([])
    with pytest.raises(UsageError, match="no trainer has reported this version"):
        await trace_version(topics, "m@0123456789ab", everything=False, after=0, limit=1)
    with pytest.raises(UsageError, match="session 'nobody' of tenant 'acme'"):
        await trace_session(topics, "nobody", tenant="acme", after=0, limit=1)

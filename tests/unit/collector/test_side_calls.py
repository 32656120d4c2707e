"""Side calls and sub-agents are runs of their own, and side calls get no reward of the session."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headrace_collector.facts import turn_facts
from headrace_collector.runs import partition_runs
from headrace_schemas import Message, SubAgent, Trajectory, Turn
from headrace_schemas.events.trajectory import NO_TOOLS, SIDE_CALL
from tests.support.streams import START, Bench
from tests.support.turns import after, ask, end, feedback, said, user
from tests.unit.collector.conftest import Open

AGENT, TITLE = Message(role="system", content="You repair code."), Message(role="system", content="Write a title.")


def task(text: str = "fix it", **fields: Any) -> Turn:
    return ask([AGENT, user(text)], "done", **fields)


def title(kind: str | None = NO_TOOLS, **fields: Any) -> Turn:
    return ask([TITLE, user("fix it")], "A fix", side_call=kind, **fields)


def runs(*turns: Turn) -> list[list[Turn]]:
    by_id = {turn.turn_id: turn for turn in turns}
    partition = partition_runs([turn_facts(turn, START, offset) for offset, turn in enumerate(turns)], [])
    return [[by_id[turn.turn_id] for turn in run.turns] for run in partition.runs]


def test_side_calls_are_apart_from_the_run_in_any_order() -> None:
    first = task()
    more = ask(after(first, user("more")), "ok")
    turns = [title(), first, more, title(kind="memory")]
    for order in itertools.permutations(turns):
        divided = {frozenset(turn.turn_id for turn in run) for run in runs(*order)}
        assert divided == {
            frozenset((first.turn_id, more.turn_id)),
            *(frozenset((turn.turn_id,)) for turn in turns[::3]),
        }


def test_guess_holds_only_beside_calls_with_tools_that_begin_otherwise() -> None:
    only_chat = [title(), ask([TITLE, user("fix it"), said("A fix"), user("again")], "B", side_call=NO_TOOLS)]
    assert runs(*only_chat) == [only_chat], "an agent without tools has no other calls"
    last_step = ask([AGENT, user("fix it"), said("done"), user("sum up")], "all done", side_call=NO_TOOLS)
    assert len(runs(task(), last_step)) == 1, "the system prompt is the agent's own"
    assert len(runs(title(kind="title"))) == 1


def test_side_calls_of_one_conversation_are_one_run() -> None:
    first = title(kind="memory")
    second = ask(after(first, user("shorter")), "Fix", side_call="memory")
    assert runs(task(), first, second)[1:] == [[first, second]]


def test_sub_agents_are_runs_of_their_own() -> None:
    main, more = task(), task("more")
    explorers = [ask([user("look")], "seen", sub_agent=SubAgent(agent=name)) for name in ("a", "b", "a")]
    assert runs(main, explorers[0], explorers[1], more, explorers[2]) == [
        [main, more],
        [explorers[0], explorers[2]],
        [explorers[1]],
    ]


def test_sub_agents_of_named_runs_stay_apart() -> None:
    turns = [task(run_id=run) for run in ("0", "1")]
    turns += [ask([user("look")], "x", run_id=run, sub_agent=SubAgent(agent="a")) for run in ("0", "1")]
    assert runs(*turns) == [[turn] for turn in turns]


async def test_side_call_is_untrained_unless_feedback_lists_it(stream: Bench) -> None:
    main, beside, rated = task(), title(), title(kind="title")
    await stream.deliver(main, beside, rated)
    await stream.deliver(feedback(), feedback("s", rated, value=0.0))
    await stream.deliver(end())
    sent = {trajectory.turn_ids: trajectory for trajectory in stream.sent(Trajectory)}
    assert [sent[turn.turn_id,].untrained for turn in (main, beside, rated)] == [None, SIDE_CALL, None]
    assert all(trajectory.branches and trajectory.parts == 1 for trajectory in sent.values())


async def test_sub_agents_run_names_its_parent(stream: Bench) -> None:
    nested = SubAgent(agent="b", parent="a")
    await stream.deliver(task(), ask([user("look")], "x", sub_agent=nested))
    await stream.deliver(end())
    assert [trajectory.sub_agent for trajectory in stream.sent(Trajectory)] == [None, nested]


async def test_side_calls_share_the_run_where_settings_want_it(with_settings: Open) -> None:
    async with with_settings(side_calls="in_run") as stream:
        main, beside = task(), title()
        await stream.deliver(main, beside)
        await stream.deliver(end())
        (trajectory,) = stream.sent(Trajectory)
        assert (trajectory.turn_ids, trajectory.untrained) == ((main.turn_id, beside.turn_id), None)


@pytest.mark.parametrize("kind", ["title", NO_TOOLS])
async def test_withdrawn_feedback_asks_for_no_training(stream: Bench, kind: str) -> None:
    beside = title(kind=kind)
    await stream.deliver(task(), beside, feedback("s", beside, value=None))
    await stream.deliver(end())
    assert stream.sent(Trajectory)[1].untrained == SIDE_CALL

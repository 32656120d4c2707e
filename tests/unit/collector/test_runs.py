"""Tests of the division of turns into runs: by names from the client, by feedback and by continued conversations.

The order of arrival has no influence. Side calls and sub-agents are separate runs, and side calls get no reward.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_collector.facts import Contents, TurnContent, TurnFacts, turn_facts
from headrace_collector.feedback_targets import OrderedFeedback, listings_in
from headrace_collector.runs import partition_runs
from headrace_schemas import Feedback, FunctionCall, Message, SubAgent, ToolCall, Trajectory, Turn
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_schemas.events.trajectory import NO_TOOLS, SIDE_CALL
from tests.support.streams import Bench
from tests.support.turns import START, after, ask, end, feedback, said, tool, user
from tests.unit.collector.conftest import Open


def implicit(messages: Sequence[Message], *replies: str, at: float = 0.0, **fields: Any) -> Turn:
    return ask(messages, *replies, at=at, session_source="implicit", **fields)


def facts(*turns: Turn) -> list[TurnFacts]:
    """Return the facts of `turns`, captured in the order of their times."""
    return [turn_facts(turn, START, round(turn.started_at.timestamp() * 1000)) for turn in turns]


def in_log_order(*feedback_events: Feedback) -> list[OrderedFeedback]:
    """Return the feedback events with increasing offsets."""
    return [OrderedFeedback(event, offset, 0) for offset, event in enumerate(feedback_events)]


def tokens(*turns: Turn) -> Contents:
    return {turn.turn_id: TurnContent.of(turn) for turn in turns}


def runs(turns: Sequence[Turn], *feedback_events: Feedback, tokens: Contents | None = None) -> list[list[Turn]]:
    by_id = {turn.turn_id: turn for turn in turns}
    session_runs = partition_runs(facts(*turns), listings_in(in_log_order(*feedback_events)), tokens).runs
    return [[by_id[turn.turn_id] for turn in run.turns] for run in session_runs]


def test_named_session_is_one_run() -> None:
    turns = [ask([user("a")], at=0), ask([user("b")], at=1), ask([user("a")], at=2)]
    assert runs(turns) == [turns]
    assert runs(turns, feedback("s", turns[0]), feedback("s", turns[1], turns[2])) == [turns], "lists name no runs"


def test_feedback_with_run_ids_splits_a_named_session() -> None:
    a, b = ask([user("a")], at=0), ask([user("b")], at=1)
    more = ask(after(b, user("c")), at=2)
    feedback_events = feedback("s", a, run_id="0"), feedback("s", b, run_id="1")
    assert runs([a, b, more], *feedback_events) == [[a], [b, more]], (
        "a turn that nobody listed goes with what it continues"
    )


def test_run_ids_of_the_client_split_a_named_session() -> None:
    a, b, c = (ask([user("q")], at=at, run_id=run) for at, run in enumerate(["0", "1", "0"]))
    assert runs([a, b, c]) == [[a, c], [b]]
    assert runs([a, c], feedback("s", a, c, run_id="0", task_id="t")) == [[a, c]], "a task's name makes no other run"


def test_equal_run_ids_of_client_and_feedback_are_one_run() -> None:
    a, b, c = (ask([user("q")], at=at, run_id=run) for at, run in enumerate(["0", "1", None]))
    assert runs([a, b, c], feedback("s", c, run_id="0")) == [[a, c], [b]], "the client or the feedback"


def test_single_run_id_splits_nothing() -> None:
    named, unnamed = ask([user("a")], at=0, run_id="0"), ask([user("b")], at=1)
    assert runs([named, unnamed]) == [[named, unnamed]]


def test_conversations_with_equal_openings_are_divided_by_history() -> None:
    a, b = implicit([user("q")], "red", at=0), implicit([user("q")], "blue", at=1)
    next_b, next_a = implicit(after(b, tool("x")), at=2), implicit(after(a, tool("x")), at=3)
    assert runs([a, b, next_b, next_a]) == [[a, next_a], [b, next_b]]
    assert partition_runs(facts(a, b, next_b, next_a), []).ties == frozenset(), "no tokens are needed to tell"


def test_equal_conversations_are_continued_in_turn() -> None:
    a, b = implicit([user("q")], "same", at=0), implicit([user("q")], "same", at=1)
    next_a, next_b = implicit(after(a, tool("x")), "same", at=2), implicit(after(b, tool("x")), "same", at=3)
    last = implicit(after(next_a, tool("y")), at=4)
    assert runs([a, b, next_a, next_b, last]) == [[a, next_a, last], [b, next_b]]


def test_exact_tokens_divide_equal_conversations() -> None:
    a = implicit([user("q")], "same", at=0)
    odd = (*a.choices[0].token_ids[:-2], 999)
    choice = replace_tokens(a, odd)
    b = implicit([user("q")], "same", at=1, choices=(choice,), usage=usage(a, len(odd)))
    heir = implicit(after(b, tool("x")), at=2, prompt_token_ids=b.prompt_token_ids + odd + (7, 7))
    turns = [a, b, heir]
    assert partition_runs(facts(*turns), []).ties == {turn.turn_id for turn in turns}, "conversations alone do not tell"
    assert runs(turns, tokens=tokens(*turns)) == [[a], [b, heir]]


def test_missing_tokens_do_not_change_runs() -> None:
    """Turns whose content was deleted by retention are divided like turns whose tokens do not match."""
    a, b = implicit([user("q")], "same", at=0), implicit([user("q")], "same", at=1)
    heir = implicit(after(b, tool("x")), at=2, prompt_token_ids=(7, 7))
    for tokens_of in ([heir, a, b], [heir, a], [heir, b], [heir], [a, b]):
        assert runs([a, b, heir], tokens=tokens(*tokens_of)) == [[a, heir], [b]]


def replace_tokens(turn: Turn, ids: tuple[int, ...]) -> Any:
    return turn.choices[0].model_copy(update={"token_ids": ids, "logprobs": (-1.0,) * len(ids)})


def usage(turn: Turn, sampled: int) -> Any:
    return turn.usage.model_copy(update={"completion_tokens": sampled})


def test_history_with_changed_formatting_continues_its_run() -> None:
    call = ToolCall(id="1", function=FunctionCall(name="f", arguments='{"a": 1,  "b": [2]}'))
    first = implicit([user("q")])
    answer = Message(role="assistant", content=None, tool_calls=(call,), reasoning_content="hm")
    first = first.model_copy(update={"choices": (first.choices[0].model_copy(update={"message": answer}),)})
    respelled = call.model_copy(update={"id": "x", "function": FunctionCall(name="f", arguments='{"b":[2],"a":1}')})
    sent_back = Message(role="assistant", content=" ", name="agent", tool_calls=(respelled,))
    second = implicit([user("q"), sent_back, tool("r")], at=1)
    assert runs([first, second]) == [[first, second]]
    other = Message(role="assistant", content=None, tool_calls=(respelled, respelled))
    assert len(runs([first, implicit([user("q"), other, tool("r")], at=1)])) == 2


def test_fork_stays_in_its_run() -> None:
    a = implicit([user("q")], "red", "blue")
    left, right = implicit(after(a, user("m"), choice=0), at=1), implicit(after(a, user("n"), choice=1), at=2)
    assert runs([a, left, right]) == [[a, left, right]]


def test_listing_defines_exactly_one_run() -> None:
    a, orphan = implicit([user("q")], "x", at=0), implicit([user("q")], "y", at=1)
    b = implicit(after(a, tool("r")), at=2)
    unlisted, more = implicit(after(b, user("m")), at=3), implicit(after(orphan, user("m")), at=4)
    assert runs([a, orphan, b, unlisted, more], feedback("s", a, b)) == [[a, b], [orphan, more], [unlisted]]


def test_overlapping_listings_are_one_run_unless_their_run_ids_differ() -> None:
    a, b, c = (implicit([user("q")], name, at=at) for at, name in enumerate("abc"))
    assert runs([a, b, c], feedback("s", a, b), feedback("s", b, c)) == [[a, b, c]]
    first, other = feedback("s", a, b, run_id="0", at=50), feedback("s", b, c, run_id="1", at=60)
    assert runs([a, b, c], first, other) == [[a], [b, c]], "the later list takes its turns away"
    assert runs([a, b, c], other, first) == [[a, b], [c]], "whatever its clock says"


def test_repeated_run_ids_of_feedback_are_different_runs() -> None:
    a, b = implicit([user("q")], "x", at=0), implicit([user("q")], "y", at=1)
    feedback_events = feedback("s", a, task_id="t", run_id="0"), feedback("s", b, task_id="t", run_id="0")
    assert runs([a, b], *feedback_events) == [[a], [b]]


def test_run_ids_divide_runs_without_a_session() -> None:
    a, b = implicit([user("q")], "x", at=0, run_id="0"), implicit([user("q")], "x", at=1, run_id="1")
    rewritten = implicit([user("summary")], at=2, run_id="0")
    unnamed = implicit(after(rewritten, user("m")), at=3)
    assert runs([a, b, rewritten, unnamed]) == [[a, rewritten, unnamed], [b]]


def test_equal_run_ids_of_different_tasks_are_different_runs() -> None:
    a, b = (implicit([user("q")], "x", at=at, task_id=task, run_id="0") for at, task in enumerate("tu"))
    assert runs([a, b]) == [[a], [b]]


def test_retry_is_in_the_run_of_its_original() -> None:
    lost, parallel = implicit([user("q")], "x", delivered=False), implicit([user("q")], "y", at=1)
    retry = implicit([user("q")], "z", at=5, retry=1)
    more = implicit(after(retry, tool("r")), at=6)
    assert runs([lost, parallel, retry, more]) == [[lost, retry, more], [parallel]]


def test_turn_that_continues_a_closed_run_starts_a_new_run() -> None:
    a = implicit([user("q")], "x")
    late = implicit(after(a, user("late")), at=1)
    follows, fork = implicit(after(late, user("m")), at=2), implicit(after(a, user("other")), at=3)
    stranger = implicit([user("q")], "y", at=4)
    tokens_of = facts(a, late, follows, fork, stranger)
    closed = [replace(tokens_of[0], trajectory_id="t"), *tokens_of[1:]]
    session_runs = [sorted(run.turn_ids) for run in partition_runs(closed, []).runs]
    assert session_runs == [sorted([late.turn_id, follows.turn_id, fork.turn_id]), [stranger.turn_id]]


def test_open_run_is_continued_among_equal_conversations() -> None:
    closed, still_open = implicit([user("q")], "same", at=0), implicit([user("q")], "same", at=1)
    heir = implicit(after(closed, tool("x")), at=2)
    tokens_of = facts(closed, still_open, heir)
    (run,) = partition_runs([replace(tokens_of[0], trajectory_id="t"), *tokens_of[1:]], []).runs
    assert run.turn_ids == {still_open.turn_id, heir.turn_id}


def test_runs_with_equal_offsets_are_ordered_by_first_turn() -> None:
    a, b = implicit([user("q")], "x", at=0), implicit([user("q")], "y", at=0)
    more = implicit(after(a, tool("r")), at=1)
    assert a.turn_id < b.turn_id < more.turn_id
    assert runs([b, a, more]) == [[a, more], [b]]


def test_models_of_a_run_are_separate_trajectories() -> None:
    a, b = ask([user("q")], at=0), ask([user("q")], at=1, model="other")
    session_runs = partition_runs(facts(a, b), []).runs
    assert [(run.turns[0].model, run.models) for run in session_runs] == [("m", 2), ("other", 2)]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Turn], list[Feedback]]:
    turns: list[Turn] = []
    for at in range(draw(st.integers(1, 10))):
        reply = draw(st.sampled_from(["x", "y"]))
        extra: dict[str, Any] = {"retry": draw(st.sampled_from([0, 0, 0, 1])), "delivered": draw(st.booleans())}
        parents: list[Turn | None] = [None, *turns]
        parent = draw(st.sampled_from(parents))
        messages = [user("q")] if parent is None else after(parent, tool(draw(st.sampled_from("rs"))))
        turns.append(implicit(messages, reply, at=at % 4, **extra))
    lists = draw(st.lists(st.lists(st.sampled_from(turns), min_size=1, max_size=4), max_size=3))
    names = st.sampled_from([None, "0", "1"])
    return turns, [feedback("s", *listed, at=50 + n % 2, run_id=draw(names)) for n, listed in enumerate(lists)]


@settings(max_examples=150)
@given(traffic(), st.randoms(use_true_random=False))
def test_runs_do_not_depend_on_the_order_of_arrival(
    history: tuple[list[Turn], list[Feedback]], shuffle: random.Random
) -> None:
    turns, lists = history
    feedback_events = in_log_order(*lists)
    expected = partition_runs(facts(*turns), listings_in(feedback_events))
    assert sorted(turn.turn_id for run in expected.runs for turn in run.turns) == sorted(t.turn_id for t in turns)
    shuffle.shuffle(turns)
    shuffle.shuffle(feedback_events)
    assert partition_runs(facts(*turns), listings_in(feedback_events)) == expected


def test_feedback_about_one_turn_is_not_a_listing() -> None:
    """Otherwise feedback about one turn of an implied session would remove this turn from its run."""
    first = implicit([user("q")], "a")
    second = implicit(after(first, user("and?")), "b", at=5)
    better = Message(role="assistant", content="better")
    pair = Preference(chosen=ComparedAnswer(turn_id=second.turn_id), rejected=ComparedAnswer(turn_id=first.turn_id))
    for word in (
        feedback("s", second, value=None, edit=better),
        feedback("s", second, value=None, withdrawn=True, kind="edit"),
        feedback("s", second, value=1.0, level="turn"),
        feedback("s", second, value=1.0, level="response"),
        feedback("s", second, value=1.0, level="session"),
        feedback("s", first, second, value=None, preference=pair),
    ):
        assert listings_in(in_log_order(word)) == []
        assert len(partition_runs(facts(first, second), listings_in(in_log_order(word))).runs) == 1
    session_feedback = feedback("s", second, value=1.0)
    assert len(partition_runs(facts(first, second), listings_in(in_log_order(session_feedback))).runs) == 2, (
        "a list of turns is a run"
    )


AGENT, TITLE = Message(role="system", content="You repair code."), Message(role="system", content="Write a title.")


def task(text: str = "fix it", **fields: Any) -> Turn:
    return ask([AGENT, user(text)], "done", **fields)


def title(kind: str | None = NO_TOOLS, **fields: Any) -> Turn:
    return ask([TITLE, user("fix it")], "A fix", side_call=kind, **fields)


def runs_of(*turns: Turn) -> list[list[Turn]]:
    by_id = {turn.turn_id: turn for turn in turns}
    partition = partition_runs([turn_facts(turn, START, offset) for offset, turn in enumerate(turns)], [])
    return [[by_id[turn.turn_id] for turn in run.turns] for run in partition.runs]


def test_side_calls_are_apart_from_the_run_in_any_order() -> None:
    first = task()
    more = ask(after(first, user("more")), "ok")
    turns = [title(), first, more, title(kind="memory")]
    for order in itertools.permutations(turns):
        divided = {frozenset(turn.turn_id for turn in run) for run in runs_of(*order)}
        assert divided == {
            frozenset((first.turn_id, more.turn_id)),
            *(frozenset((turn.turn_id,)) for turn in turns[::3]),
        }


def test_guess_holds_only_beside_calls_with_tools_that_begin_otherwise() -> None:
    only_chat = [title(), ask([TITLE, user("fix it"), said("A fix"), user("again")], "B", side_call=NO_TOOLS)]
    assert runs_of(*only_chat) == [only_chat], "an agent without tools has no other calls"
    last_step = ask([AGENT, user("fix it"), said("done"), user("sum up")], "all done", side_call=NO_TOOLS)
    assert len(runs_of(task(), last_step)) == 1, "the system prompt is the agent's own"
    assert len(runs_of(title(kind="title"))) == 1


def test_side_calls_of_one_conversation_are_one_run() -> None:
    first = title(kind="memory")
    second = ask(after(first, user("shorter")), "Fix", side_call="memory")
    assert runs_of(task(), first, second)[1:] == [[first, second]]


def test_sub_agents_are_runs_of_their_own() -> None:
    main, more = task(), task("more")
    explorers = [ask([user("look")], "seen", sub_agent=SubAgent(agent=name)) for name in ("a", "b", "a")]
    assert runs_of(main, explorers[0], explorers[1], more, explorers[2]) == [
        [main, more],
        [explorers[0], explorers[2]],
        [explorers[1]],
    ]


def test_sub_agents_of_named_runs_stay_apart() -> None:
    turns = [task(run_id=run) for run in ("0", "1")]
    turns += [ask([user("look")], "x", run_id=run, sub_agent=SubAgent(agent="a")) for run in ("0", "1")]
    assert runs_of(*turns) == [[turn] for turn in turns]


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

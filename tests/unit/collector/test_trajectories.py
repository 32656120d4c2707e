"""Tests of the fields of trajectories, and of turns that refer to an earlier turn.

The fields include names, context, and omitted turns with their reasons. A turn that stores only its difference to an
earlier turn gives the same trajectory in fewer bytes, and a reference that cannot be resolved is named.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy import func, select

from headrace_collector import handlers, schema, store, upkeep
from headrace_collector.closing import build_trajectory
from headrace_collector.facts import turn_facts
from headrace_collector.retries import superseded_turns
from headrace_collector.settings import CollectorSettings
from headrace_schemas import (
    Choice,
    DeadLetter,
    Feedback,
    FunctionDefinition,
    Grammar,
    Message,
    Sampling,
    Tool,
    Trajectory,
    Turn,
)
from headrace_schemas.events.chat import LogitShift
from headrace_schemas.rules.turn_history import UNRESOLVED
from tests.support.streams import Bench
from tests.support.turns import START, VERSION, after, ask, end, extending, feedback, said, tool, user
from tests.unit.collector.conftest import Open, pass_time


def assembled(
    *turns: Turn, run: tuple[Feedback, ...] = (), session: tuple[Feedback, ...] = (), models: int = 1
) -> Trajectory:
    return build_trajectory(
        turns,
        superseded=superseded_turns([turn_facts(turn, START, offset) for offset, turn in enumerate(turns)]),
        about_run=run,
        about_session=session,
        reason="end_call",
        models=models,
        turns_from=0,
        now=START,
    )


def left_out(trajectory: Trajectory) -> dict[str, str]:
    return {item.turn_id: item.reason for item in trajectory.left_out}


def no_logprobs(trajectory: Trajectory) -> list[str | None]:
    return [span.no_logprobs for branch in trajectory.branches for span in branch.spans]


def tool_named(name: str, description: str = "") -> Tool:
    return Tool(function=FunctionDefinition(name=name, description=description))


def test_trajectory_id_is_derived_from_its_first_turn() -> None:
    a, b = ask([user("q")], at=0), ask([user("p")], at=1)
    assert assembled(a, b).trajectory_id == assembled(a).trajectory_id
    assert assembled(b).trajectory_id != assembled(a).trajectory_id
    assert assembled(a, b).started_at == a.started_at
    assert assembled(b, a).trajectory_id == assembled(b).trajectory_id, (
        "the first that was captured, whatever clocks say"
    )


def test_each_turn_is_in_a_branch_or_left_out() -> None:
    lost = ask([user("q")], "lost", at=0, delivered=False)
    retry = ask([user("q")], "call", at=5, retry=1)
    greedy = ask(after(retry, tool("r")), "x", at=6, sampling=Sampling(temperature=0.0))
    empty = ask([user("e")], "", at=7, stop=False)
    undelivered = ask([user("g")], "gone", at=8, delivered=False)
    trajectory = assembled(lost, retry, greedy, empty, undelivered)
    assert left_out(trajectory) == {
        lost.turn_id: "retried",
        empty.turn_id: "empty",
        undelivered.turn_id: "undelivered",
    }
    assert [branch.turn_ids for branch in trajectory.branches] == [(retry.turn_id, greedy.turn_id)]
    assert set(trajectory.turn_ids) == {turn.turn_id for turn in (lost, retry, greedy, empty, undelivered)}
    assert trajectory.versions == (VERSION,)


def test_truncated_sampling_has_no_logprobs() -> None:
    for sampling in (
        Sampling(top_p=0.9),
        Sampling(top_k=40),
        Sampling(temperature=0.0, presence_penalty=0.5),
    ):
        assert no_logprobs(assembled(ask([user("q")], sampling=sampling))) == ["truncated_sampling"]
    assert no_logprobs(assembled(ask([user("q")], sampling=Sampling(temperature=0.6, top_k=0)))) == [None]


def test_penalties_and_bias_are_in_the_span() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={7: 1.5, 9: 0.0})
    (branch,) = assembled(ask([user("q")], sampling=sampling)).branches
    (span,) = branch.spans
    shift = LogitShift(presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={7: 1.5, 9: 0.0})
    assert (span.no_logprobs, span.logit_shift, span.token_kind) == (None, shift, "shifted")
    (branch,) = assembled(ask([user("q")], sampling=Sampling(logit_bias={7: 0.0}))).branches
    assert (branch.spans[0].logit_shift, branch.spans[0].token_kind) == (None, "free")


def test_turn_under_a_grammar_has_no_logprobs_for_that_reason() -> None:
    first = ask([user("q")], "call", at=0)
    constrained = ask(
        after(first, tool("r")), "{}", at=1, sampling=Sampling(grammar=Grammar(response_format={"type": "json"}))
    )
    last = ask(after(constrained, user("go on")), "done", at=2)
    trajectory = assembled(first, constrained, last)
    (branch,) = trajectory.branches
    assert branch.turn_ids == (first.turn_id, constrained.turn_id, last.turn_id)
    assert branch.token_ids == last.prompt_token_ids + last.choices[0].token_ids
    assert no_logprobs(trajectory) == [None, "truncated_sampling (grammar)", None]
    assert trajectory.left_out == ()


def test_run_without_logprobs_has_a_branch_and_its_version() -> None:
    trajectory = assembled(ask([user("q")], "yes", sampling=Sampling(temperature=0.0)))
    assert no_logprobs(trajectory) == ["truncated_sampling"]
    assert (trajectory.final_answer, trajectory.versions) == ("yes", (VERSION,))


def test_choice_without_tokens_has_no_span() -> None:
    turn = ask([user("q")], "a")
    nothing = Choice(index=1, token_ids=(), logprobs=(), finish_reason="abort", message=said(""))
    turn = turn.model_copy(update={"choices": (*turn.choices, nothing)})
    trajectory = assembled(turn)
    assert [[span.choice for span in branch.spans] for branch in trajectory.branches] == [[0]]
    assert trajectory.left_out == ()


def test_run_id_comes_from_listing_feedback_then_turns_then_session_feedback() -> None:
    turn = ask([user("q")], task_id="turn")
    plain = ask([user("q")])
    about = feedback("s", turn, task_id="listed", run_id="1")
    general = feedback("s", task_id="session", run_id="2")
    assert (assembled(turn, run=(about,), session=(general,)).task_id) == "listed"
    assert (assembled(turn, session=(general,)).task_id, assembled(turn, session=(general,)).run_id) == ("turn", "2")
    assert assembled(plain, session=(general,)).task_id == "session"


def test_context_is_merged_and_the_newest_wins() -> None:
    turn = ask([user("q")])
    old = feedback("s", turn, at=1, context={"expected": "a", "kept": 1})
    new = feedback("s", turn, at=2, context={"expected": "b"})
    assert assembled(turn, run=(old, new)).context == {"expected": "b", "kept": 1}


def test_oversized_context_drops_the_oldest() -> None:
    turn = ask([user("q")])
    sets: list[dict[str, Any]] = [{f"{name}{n}": n for n in range(40)} for name in "ab"]
    trajectory = assembled(turn, session=tuple(feedback("s", context=context) for context in sets)).context
    assert len(trajectory) == 64
    assert all(f"b{n}" in trajectory for n in range(40))


def test_parts_count_sessions_and_models_of_a_run() -> None:
    first_session, second_session = ask([user("q")], session="here"), ask([user("q")], session="there")
    assert assembled(first_session, run=(feedback("here", first_session, second_session),)).parts == 2
    assert assembled(first_session, run=(feedback("here", first_session, second_session),), models=2).parts == 4
    assert assembled(first_session, run=(feedback("here", first_session),)).parts == 1


def test_purpose_of_evaluation_traffic_is_kept() -> None:
    assert assembled(ask([user("q")], at=0), ask([user("q")], at=1, purpose="eval")).purpose == "eval"


def test_shadow_trajectory_names_its_original_session() -> None:
    trajectory = assembled(ask([user("q")], purpose="eval", shadow_of="a" * 16))
    assert (trajectory.purpose, trajectory.shadow_of) == ("eval", "a" * 16)
    assert assembled(ask([user("q")])).shadow_of is None


def test_trajectory_states_that_a_registered_version_answered() -> None:
    assert assembled(ask([user("q")], at=0), ask([user("q")], at=1, untrained="registered")).untrained == "registered"
    assert assembled(ask([user("q")])).untrained is None


def test_tools_are_those_of_all_turns() -> None:
    first = ask([user("q")], at=0, tools=(tool_named("a", "old"), tool_named("b")))
    second = ask([user("q")], at=1, tools=(tool_named("a", "new"),))
    trajectory = assembled(first, second).tools
    assert [(estimate.function.name, estimate.function.description) for estimate in trajectory] == [
        ("a", "new"),
        ("b", ""),
    ]


LOOKUP = Tool.model_validate({"type": "function", "function": {"name": "lookup"}})


def conversation(turns: int, session: str = "s") -> list[Turn]:
    """Return the turns of one conversation, each with its complete prompt."""
    whole_turns = [ask([user("the rules of the house " * 20)], "yes", session=session, tools=(LOOKUP,))]
    for at in range(1, turns):
        whole_turns.append(
            ask(after(whole_turns[-1], user(f"result {at}")), "yes", session=session, at=at, tools=(LOOKUP,))
        )
    return whole_turns


def chained(whole_turns: list[Turn]) -> list[Turn]:
    """Return the turns with each turn stored as an extension of the previous turn."""
    return [whole_turns[0], *(extending(turn, before) for before, turn in itertools.pairwise(whole_turns))]


async def trajectory_of(stream: Bench, turns: list[Turn]) -> Trajectory:
    await stream.deliver(*turns, end(turns[0].session_id))
    return stream.sent(Trajectory)[-1]


def without_names(trajectory: Trajectory) -> str:
    """Return the trajectory as JSON, without the fields that depend on the session."""
    names = {"trajectory_id", "session_key", "session_id", "turns_from", "time"}
    text = trajectory.model_dump_json(exclude=names)
    for number, turn_id in enumerate(trajectory.turn_ids):
        text = text.replace(turn_id, str(number))
    return text


async def test_p2_run_of_extending_turns_has_the_trajectory_of_its_whole_turns(stream: Bench) -> None:
    whole_turns = await trajectory_of(stream, conversation(40, "a"))
    extended = await trajectory_of(stream, chained(conversation(40, "b")))
    assert without_names(extended) == without_names(whole_turns)
    assert len(extended.branches) == 1
    assert len(extended.branches[0].spans) == 40
    assert stream.sent(DeadLetter) == []


async def test_collector_stores_what_a_turn_adds(stream: Bench) -> None:
    await stream.deliver(*chained(conversation(40)))
    row_bytes = func.length(schema.turns.c.payload) + func.length(schema.turns.c.prefixes)
    async with stream.processor.database.transaction() as tx:
        sizes = (await tx.execute(select(row_bytes).order_by(schema.turns.c.place))).scalars().all()
    assert max(sizes[1:]) < 1.1 * min(sizes[1:]), sizes
    assert sizes[-1] < sizes[0]


async def test_facts_of_extending_turns_are_those_of_whole_turns(stream: Bench) -> None:
    """The facts are equal even if system messages, which conversations omit, are between the shared messages."""
    clock = Message(role="system", content="It is noon.")
    lines: dict[str, list[Turn]] = {}
    for name in ("a", "b"):
        turns = [ask([clock, user("the rules of the house " * 20)], "yes", session=name)]
        turns.append(ask([*after(turns[0]), clock, user("m")], "no", session=name, at=1))
        turns.append(ask([*after(turns[1]), clock], "maybe", session=name, at=2))
        turns.append(ask(after(turns[2], user("n")), "end", session=name, at=3))
        turns.append(ask([*turns[1].messages, said("rewritten"), user("o")], "fork", session=name, at=4))
        lines[name] = turns
    whole_turns = lines["b"]
    stored = [
        whole_turns[0],
        *(extending(turn, base) for turn, base in zip(whole_turns[1:], whole_turns, strict=False)),
    ]
    await stream.deliver(*lines["a"], *stored)
    async with stream.processor.database.transaction() as tx:
        facts = [await store.facts_of_session(tx, turns[0].session_key, 0) for turns in lines.values()]
    for expected, fact in zip(*facts, strict=True):
        assert list(fact.newest_prefixes()) == list(expected.newest_prefixes()) == list(reversed(expected.prefixes))
        assert (fact.replies, fact.opening, fact.messages) == (expected.replies, expected.opening, expected.messages)
        assert (fact.tokens, fact.order[:2]) == (expected.tokens, expected.order[:2])
    assert sum(len(fact.prefixes) for fact in facts[1]) < sum(len(fact.prefixes) for fact in facts[0])


async def test_forks_and_runs_of_extending_turns_stay_apart(stream: Bench) -> None:
    """Two runs of an implied session with equal first messages extend the same turn, and one of the runs has a fork."""
    first = ask([user("q")], "call", session_source="implicit", run_id="1")
    second = ask([user("q")], "call", session_source="implicit", run_id="2", at=1)
    left = ask(after(first, user("a")), "left", session_source="implicit", run_id="1", at=2)
    right = ask(after(second, user("b")), "right", session_source="implicit", run_id="2", at=3)
    fork = ask(after(first, user("c")), "fork", session_source="implicit", run_id="1", at=4)
    turns = [first, second, extending(left, first), extending(right, first), extending(fork, left)]
    await stream.deliver(*turns, end())
    runs = {frozenset(trajectory.turn_ids): trajectory for trajectory in stream.sent(Trajectory)}
    assert set(runs) == {frozenset(t.turn_id for t in run) for run in ((first, left, fork), (second, right))}
    assert [len(runs[frozenset({second.turn_id, right.turn_id})].branches)] == [1]
    assert (
        sum(len(branch.spans) for branch in runs[frozenset({first.turn_id, left.turn_id, fork.turn_id})].branches) == 3
    )


async def test_turn_that_extends_an_unknown_turn_is_dead_lettered_by_name(stream: Bench) -> None:
    first, second, third = chained(conversation(3))
    other = ask([user("q")], session="other")
    foreign = extending(ask([user("q"), said("ok"), user("more")], session="s"), other)
    await stream.deliver(first, third, foreign, end())
    letters = stream.sent(DeadLetter)
    assert {(letter.source_id, letter.reason) for letter in letters} == {
        (third.turn_id, UNRESOLVED),
        (foreign.turn_id, UNRESOLVED),
    }
    assert second.turn_id in letters[0].error
    assert "not a turn of this session" in letters[0].error
    assert stream.sent(Trajectory)[0].turn_ids == (first.turn_id,)


@pytest.mark.parametrize("damage", ["digest", "tokens", "messages", "choice"])
async def test_reference_that_does_not_fit_is_dead_lettered_alone(stream: Bench, damage: str) -> None:
    whole_turns = conversation(4)
    turns = chained(whole_turns)
    reference = turns[2].extends
    assert reference is not None
    tokens_too_many = turns[2].usage.prompt_tokens + 7
    changes: dict[str, dict[str, object]] = {
        "digest": {"digest": "0" * 64},
        "tokens": {"tokens": tokens_too_many},
        "messages": {"messages": 99},
        "choice": {"choice": 3},
    }
    damaged = turns[2].model_copy(update={"extends": reference.model_copy(update=changes[damage])})
    if damage == "tokens":
        counts = {"prompt_tokens": tokens_too_many + len(damaged.prompt_token_ids)}
        damaged = damaged.model_copy(update={"usage": damaged.usage.model_copy(update=counts)})
    await stream.deliver(turns[0], turns[1], damaged, whole_turns[3], end())
    (letter,) = stream.sent(DeadLetter)
    assert (letter.source_id, letter.reason) == (damaged.turn_id, UNRESOLVED)
    (trajectory,) = stream.sent(Trajectory)
    assert trajectory.turn_ids == (turns[0].turn_id, turns[1].turn_id, whole_turns[3].turn_id)


async def test_turn_that_extends_a_closed_turn_is_trained_after_its_content_was_deleted(with_settings: Open) -> None:
    whole_turns = conversation(6)
    turns = chained(whole_turns)
    async with with_settings(retention_s=10.0) as stream:
        await stream.deliver(*turns[:3], end())
        await stream.deliver(turns[3])
        settings = CollectorSettings(retention_s=10.0)
        stream.clock.advance(60)
        await stream.step(lambda tx, now: upkeep.delete_old_rows(tx, now, settings))
        await stream.deliver(*turns[4:], end(at=60))
        _first, second = stream.sent(Trajectory)
        assert second.turn_ids == tuple(turn.turn_id for turn in turns[3:])
        assert second.branches[0].token_ids == whole_turns[5].prompt_token_ids + whole_turns[5].choices[0].token_ids
        assert second.messages == (*whole_turns[5].messages, whole_turns[5].choices[0].message)
        assert stream.sent(DeadLetter) == []


async def test_open_turn_survives_the_end_of_the_run_that_it_extends(with_settings: Open) -> None:
    """A turn extends a turn of another run, which is closed and deleted first."""
    first = ask([user("q")], "call", session_source="implicit", run_id="1")
    second = ask(after(first, user("b")), "right", session_source="implicit", run_id="2", at=3)
    async with with_settings(retention_s=10.0) as stream:
        await stream.deliver(first, extending(second, first))
        await stream.deliver(feedback("s", first, ends_session=True, at=4))
        settings = CollectorSettings(retention_s=10.0)
        stream.clock.advance(60)
        await stream.step(lambda tx, now: upkeep.delete_old_rows(tx, now, settings))
        await stream.deliver(end(at=60))
        assert [trajectory.turn_ids for trajectory in stream.sent(Trajectory)] == [(first.turn_id,), (second.turn_id,)]
        assert stream.sent(Trajectory)[1].messages == (*second.messages, second.choices[0].message)
        assert stream.sent(DeadLetter) == []


async def test_long_session_of_extending_turns_is_one_trajectory(
    with_settings: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete turns reach the session's limit after 20 completions here; turns that extend each other do not."""
    monkeypatch.setattr(handlers, "SEQUENCES_MAX", 20)
    async with with_settings() as stream:
        await stream.deliver(*conversation(50, "whole"), end("whole"))
        limited = [trajectory.end_reason for trajectory in stream.sent(Trajectory)]
        await stream.deliver(*chained(conversation(50, "extended")), end("extended"))
        extended = stream.sent(Trajectory)[len(limited) :]
        assert limited == ["limit", "limit", "end_call"]
        assert [
            (trajectory.end_reason, len(trajectory.branches), len(trajectory.turn_ids)) for trajectory in extended
        ] == [("end_call", 1, 50)]
        forks = ask([user("q")], session="forks")
        lines = [ask(after(forks, user(f"m{at}")), session="forks", at=at) for at in range(1, 30)]
        await stream.deliver(forks, *(extending(turn, forks) for turn in lines))
        assert stream.sent(Trajectory)[-1].end_reason == "limit", "forks need a branch each"


async def test_idle_session_of_extending_turns_is_closed(stream: Bench) -> None:
    await stream.deliver(*chained(conversation(3)))
    await pass_time(stream, 301.0)
    await pass_time(stream, 1.0)
    assert [trajectory.end_reason for trajectory in stream.sent(Trajectory)] == ["idle"]

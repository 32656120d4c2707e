"""Tests of the collector service: invalid records, feedback of other tenants, retention, any order, many ends."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from prometheus_client import REGISTRY
from sqlalchemy import Connection, RowMapping, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import closing, ends, schema, store, upkeep
from headrace_collector.settings import CollectorSettings
from headrace_schemas import DeadLetter, Event, Message, Sampling, Trajectory, Turn
from tests.support.streams import Bench
from tests.support.turns import START, after, ask, commit, end, feedback, tool, user
from tests.unit.collector.conftest import Open, pass_time, turns_of


async def test_migrations_create_the_schema_of_the_code(stream: Bench) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"version_table": "schema_version"})
        return list(compare_metadata(context, schema.metadata))

    async with stream.processor.database.transaction() as tx:
        assert await tx.run_sync(differences) == []


@pytest.mark.parametrize("topic", ["turns", "feedback", "session-ends"])
async def test_invalid_record_is_dead_lettered_and_others_processed(stream: Bench, topic: str) -> None:
    poison = [stream.append(topic, value) for value in (b"{", b"[]", b'{"time": 1}', None)]
    turn = ask([user("q")])
    await stream.deliver(*poison, turn)
    await stream.deliver(end())
    assert len(stream.sent(DeadLetter)) == 4
    assert turns_of(stream) == [("end_call", [turn.turn_id])]


async def test_p2_turn_with_unequal_lengths_is_dead_lettered(stream: Bench) -> None:
    turn = ask([user("q")])
    broken = turn.to_json().replace(b'"completion_tokens":3', b'"completion_tokens":4')
    assert broken != turn.to_json()
    await stream.deliver(stream.append("turns", broken, turn))
    (letter,) = stream.sent(DeadLetter)
    assert letter.reason == "invalid_event"
    assert "usage.completion_tokens = 4" in letter.error


async def test_turn_too_long_for_a_branch_is_dead_lettered_at_once(stream: Bench) -> None:
    long = ask([user("q")], prompt_token_ids=(1,) * 1_048_575)
    chatty = ask([user("q")] * 8192, prompt_token_ids=(1, 2))
    await stream.deliver(long, chatty)
    assert [letter.reason for letter in stream.sent(DeadLetter)] == ["too_long", "too_long"]


async def test_run_without_a_valid_trajectory_is_dead_lettered(stream: Bench) -> None:
    bad, good = ask([user("q")], session="bad"), ask([user("q")], session="good")
    await stream.deliver(bad, good)
    async with stream.processor.database.transaction() as tx:
        chatty = bad.model_copy(update={"messages": bad.messages * 8192}).to_json()  # as if it had been let in
        await tx.execute(text("UPDATE turns SET payload = :p WHERE turn_id = :t"), {"p": chatty, "t": bad.turn_id})
    await stream.deliver(end("bad"), end("good"))
    assert turns_of(stream) == [("end_call", [good.turn_id])]
    (letter,) = stream.sent(DeadLetter)
    assert (letter.reason, letter.source_id, letter.value) == ("invalid_trajectory", bad.turn_id, chatty)
    assert (letter.source_partition, letter.source_offset) == (None, None), "of no record"
    await stream.deliver(end("bad"))
    assert len(stream.sent(DeadLetter)) == 1


async def test_left_out_turns_are_counted(stream: Bench) -> None:
    def counted() -> list[float]:
        turns = REGISTRY.get_sample_value("headrace_collector_left_out_total", {"reason": "undelivered"})
        kinds = ("free", "left_out")
        tokens = [REGISTRY.get_sample_value("headrace_collector_tokens_total", {"kind": kind}) for kind in kinds]
        return [value or 0.0 for value in (turns, *tokens)]

    before = counted()
    greedy = ask([user("q")], "yes", sampling=Sampling(temperature=0.0))
    free = ask(after(greedy, user("m")), "a longer answer", at=1)
    await stream.deliver(greedy, free, ask(after(free, user("n")), at=2, delivered=False), end())
    lengths = [len(turn.choices[0].token_ids) for turn in (free, greedy)]
    assert counted() == [before[0] + 1, before[1] + lengths[0], before[2] + lengths[1]]

    evaluated = ask([user("q")], session="examined", delivered=False).model_copy(update={"purpose": "eval"})
    await stream.deliver(evaluated, end("examined"))
    assert counted()[0] == before[0] + 1, "an evaluation that a gate cut short is nobody's trouble"


async def test_feedback_without_a_target_is_dead_lettered(stream: Bench) -> None:
    ghost = ask([user("q")])
    await stream.deliver(feedback("s", ghost), feedback("nobody"), ask([user("q")], session="real"))
    await stream.deliver(feedback("real", ghost), feedback("real"))
    await pass_time(stream, 599)
    assert stream.sent(DeadLetter) == []
    await pass_time(stream, 2)
    letters = stream.sent(DeadLetter)
    assert [(letter.reason, letter.source_topic) for letter in letters] == [("unknown_target", "feedback")] * 2
    assert [letter.source_offset for letter in letters] == [0, 1]
    assert ghost.turn_id.encode() in letters[0].value, "whole, to be retried"
    await pass_time(stream, 700)
    assert len(stream.sent(DeadLetter)) == 2


async def test_retried_feedback_counts_after_its_turn(stream: Bench) -> None:
    turn = ask([user("q")])
    await stream.deliver(feedback("s", turn, task_id="t"))
    await pass_time(stream, 601)
    (letter,) = stream.sent(DeadLetter)
    await stream.deliver(turn, stream.append("feedback", letter.value))
    await stream.deliver(end())
    assert stream.sent(Trajectory)[0].task_id == "t"


async def test_feedback_may_arrive_before_its_turn(stream: Bench) -> None:
    turn = ask([user("q")])
    await stream.deliver(feedback("s", turn, task_id="t"))
    await stream.deliver(turn)
    await pass_time(stream, 700)
    assert [letter.reason for letter in stream.sent(DeadLetter)] == []
    await stream.deliver(end())
    assert stream.sent(Trajectory)[0].task_id == "t"


async def test_feedback_of_another_tenant_is_dead_lettered(stream: Bench) -> None:
    turn = ask([user("q")], session_source="implicit")
    forged = feedback("s", turn, tenant="b", task_id="stolen", ends_session=True)
    await stream.deliver(turn, forged.model_copy(update={"session_key": turn.session_key}))
    assert turns_of(stream) == []
    await stream.deliver(end())
    assert stream.sent(Trajectory)[0].task_id is None
    await pass_time(stream, 601)
    assert [letter.reason for letter in stream.sent(DeadLetter)] == ["unknown_target"]


async def test_feedback_about_one_run_does_not_apply_to_the_next(stream: Bench) -> None:
    first = ask([user("q")], at=0)
    await stream.deliver(first)
    await stream.deliver(end())
    await stream.deliver(feedback(at=5, context={"expected": "late, for the first"}))
    second = ask([user("p")], at=10)
    await stream.deliver(second, feedback(at=15, context={"expected": "second"}))
    await stream.deliver(end(at=20))
    assert [trajectory.context for trajectory in stream.sent(Trajectory)] == [{}, {"expected": "second"}]


async def test_earlier_feedback_does_not_apply_to_a_later_run(with_settings: Open) -> None:
    limits = {"retention_s": 10.0}
    async with with_settings(**limits) as stream:
        await stream.deliver(ask([user("q")], at=0), feedback(at=5, context={"expected": "yesterday's"}))
        await stream.deliver(end())
        stream.clock.advance(86_400)
        async with stream.processor.database.transaction() as tx:
            await upkeep.delete_old_rows(tx, stream.clock.now(), CollectorSettings.model_validate(limits))
        await stream.deliver(ask([user("q")], at=86_400))
        await stream.deliver(end())
        assert [trajectory.context for trajectory in stream.sent(Trajectory)] == [{"expected": "yesterday's"}, {}]


async def test_feedback_is_marked_used_once_its_runs_are_closed(stream: Bench) -> None:
    async def in_use() -> int:
        async with stream.processor.database.transaction() as tx:
            return len((await tx.execute(text("SELECT 1 FROM feedback WHERE used_ms IS NULL"))).all())

    a, b = (ask([user("q")], name, at=at, session_source="implicit") for at, name in enumerate("ab"))
    await stream.deliver(a, b, feedback("s", a, ends_session=True), feedback("s", b), feedback("s", ask([user("q")])))
    assert await in_use() == 2, "b is open, and the third names a turn that may yet come"
    await stream.deliver(feedback(at=60))
    await stream.deliver(end())
    assert await in_use() == 1


async def test_feedback_context_may_precede_the_session(stream: Bench) -> None:
    await stream.deliver(feedback(at=-5, value=None, context={"expected": "x"}))
    await stream.deliver(ask([user("q")], at=0))
    await stream.deliver(end())
    assert stream.sent(Trajectory)[0].context == {"expected": "x"}


async def test_upkeep_deletes_content_before_turn_ids(with_settings: Open) -> None:
    limits = {"retention_s": 100.0, "remember_s": 1000.0}
    async with with_settings(**limits) as stream:
        chosen = CollectorSettings.model_validate(limits)
        open_turn = ask([user("q")], session="open")
        await stream.deliver(ask([user("q")]), feedback(), end())
        await stream.deliver(open_turn)

        async def stored_turns() -> tuple[int, int]:
            async with stream.processor.database.transaction() as tx:
                await upkeep.delete_old_rows(tx, stream.clock.now(), chosen)
                rows = (await tx.execute(text("SELECT payload IS NULL FROM turns"))).scalars().all()
            return len(rows), sum(not payload for payload in rows)

        assert await stored_turns() == (2, 2)
        stream.clock.advance(101)
        assert await stored_turns() == (2, 1)
        stream.clock.advance(1000)
        await pass_time(stream, 0, feedback_wait_s=10, idle_s=1e6)
        assert await stored_turns() == (1, 1), "what is open is kept"
        assert await stream.count("sessions") == 1
        assert await stream.count("feedback") == 0


async def test_surplus_sessions_are_closed_longest_idle_first(with_settings: Open) -> None:
    limits = {"open_sessions_max": 2}
    async with with_settings(**limits) as stream:
        turns = [ask([user("q")], session=f"s{n}") for n in range(4)]
        for turn in turns:
            stream.clock.advance(1)
            await stream.deliver(turn)
        async with stream.processor.database.transaction() as tx:
            await upkeep.close_surplus_sessions(tx, stream.clock.now(), CollectorSettings.model_validate(limits))
        await pass_time(stream, 0)
        assert turns_of(stream) == [("limit", [turns[0].turn_id]), ("limit", [turns[1].turn_id])]


async def test_surplus_sessions_of_a_tenant_leave_those_of_others_open(with_settings: Open) -> None:
    limits = {"open_sessions_max": 4}
    async with with_settings(**limits) as stream:
        modest = ask([user("q")], session="modest", tenant="modest")
        greedy = [ask([user("q")], session=f"s{n}", tenant="greedy") for n in range(6)]
        for turn in (modest, *greedy):
            stream.clock.advance(1)
            await stream.deliver(turn)
        async with stream.processor.database.transaction() as tx:
            await upkeep.close_surplus_sessions(tx, stream.clock.now(), CollectorSettings.model_validate(limits))
        await pass_time(stream, 0)
        assert turns_of(stream) == [("limit", [turn.turn_id]) for turn in greedy[:3]]


@pytest.mark.parametrize("seed", range(200))
def test_a_surplus_levels_the_largest_tenants(seed: int) -> None:
    rng = random.Random(seed)
    counts = {f"t{n}": rng.choice((1, 2, 3, 50)) for n in range(rng.randint(1, 6))}
    surplus = rng.randint(1, sum(counts.values()))
    lost = upkeep.divide_surplus(counts, surplus)
    remaining = {name: count - lost.get(name, 0) for name, count in counts.items()}
    assert sum(lost.values()) == surplus
    assert all(number > 0 for number in lost.values())
    most = max(remaining.values())
    assert all(remaining[name] >= most - 1 for name in lost), "the others had fewer from the beginning"


async def test_equal_conversations_are_told_apart_by_tokens(stream: Bench) -> None:
    a = ask([user("q")], "same", at=0, session_source="implicit")
    b = ask([user("q")], "same", at=1, session_source="implicit", stop=False)
    exact = b.prompt_token_ids + b.choices[0].token_ids + (9, 9)
    heir = ask(after(b, tool("x")), at=2, session_source="implicit", prompt_token_ids=exact)
    first, second, third = stream.produce(a, b, heir)
    await stream.deliver(third, first, second)
    await stream.deliver(end())
    assert [turns for _, turns in turns_of(stream)] == [[a.turn_id], [b.turn_id, heir.turn_id]]


def history(seed: int) -> list[Event]:
    """Return the turns, feedback and ends of a session with two runs."""
    choose = random.Random(seed)
    events: list[Event] = []
    runs = []
    for name in "ab":
        messages: list[Message] = [user("q")]
        turns = []
        for at in range(choose.randint(1, 4)):
            turn = ask(messages, f"{name}{at}", at=at + choose.random(), session_source="implicit")
            turns.append(turn)
            messages = after(turn, tool(choose.choice("xy")))
        runs.append(turns)
        events += turns
    for at, turns in enumerate(runs):
        if choose.random() < 0.7:
            events.append(feedback("s", *turns, at=20 + at, run_id=str(at), context={"run": at}))
    return events


@pytest.mark.parametrize("seed", range(4))
async def test_duplicates_and_reordering_change_no_trajectory(with_settings: Open, seed: int) -> None:
    print("seed", seed)
    events = history(seed)
    outcomes = []
    for attempt in range(3):
        choose = random.Random(f"{seed}/{attempt}")
        async with with_settings() as stream:
            stream.produce(*events, end(at=40))
            logs = [stream.log[topic][0] for topic in ("turns", "feedback", "session-ends")]
            at = [0, 0, 0]
            while any(position < len(log) for position, log in zip(at, logs, strict=True)):
                which = choose.randrange(3)
                if choose.random() < 0.2:
                    at[which] = choose.randint(0, at[which])  # a rebalance: read again from an older offset
                size = choose.randint(1, 3)
                await stream.deliver(*logs[which][at[which] : at[which] + size])
                at[which] += size
            await pass_time(stream, 1)
            assert await stream.count("ends") == 0
            trajectories = [trajectory.model_copy(update={"time": START}) for trajectory in stream.sent(Trajectory)]
            outcomes.append(sorted(trajectories, key=lambda closed: closed.trajectory_id))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert {turn for trajectory in outcomes[0] for turn in trajectory.turn_ids} == {
        event.turn_id for event in events if isinstance(event, Turn)
    }


async def test_end_before_its_session_is_harmless(stream: Bench) -> None:
    await stream.deliver(commit(), end())
    assert (turns_of(stream), await stream.count("ends")) == ([], 0)


@pytest.mark.parametrize("word", ["label", "edit", "facts"])
async def test_commit_closes_runs_with_feedback_in_any_form(stream: Bench, word: str) -> None:
    turn = ask([user("q")])
    feedback_by_form = {
        "label": feedback("s", value=None, label="good"),
        "edit": feedback("s", turn, value=None, edit=Message(role="assistant", content="better")),
        "facts": feedback("s", value=None, comment="seen"),
    }[word]
    await stream.deliver(turn, feedback_by_form)
    await stream.deliver(commit())
    assert [trajectory.end_reason for trajectory in stream.sent(Trajectory)] == ([] if word == "facts" else ["commit"])


async def test_feedback_about_a_task_is_ignored(stream: Bench) -> None:
    await stream.deliver(feedback("any", level="task", task_id="t", partition=0))
    assert await stream.count("feedback") == 0


async def test_commits_in_a_row_store_one_end_for_each_session(stream: Bench) -> None:
    """Each commit would add an end for each open session, and the ends of all other tenants wait behind them."""
    sessions = [f"s{n}" for n in range(20)]
    await stream.deliver(*(ask([user("q")], session=name) for name in sessions))
    await stream.deliver(*(feedback(name, value=None, context={"a": 1}) for name in sessions[:10]))
    stored: list[int] = []
    replace = ends._replace_by_session_ends

    async def counted(tx: AsyncConnection, row: RowMapping) -> None:
        await replace(tx, row)
        number = select(func.count()).select_from(schema.ends).where(schema.ends.c.session_key.is_not(None))
        stored.append(await tx.scalar(number) or 0)

    with mock.patch.object(ends, "_replace_by_session_ends", counted):
        await stream.deliver(commit(), commit(), commit(before=60), commit())
    assert stored == [10, 10, 10, 10], "sessions without feedback get none"
    await stream.deliver(feedback(sessions[0]))
    await stream.deliver(commit())
    assert [reason for reason, _ in turns_of(stream)] == ["commit"]


async def test_a_commit_with_a_later_time_is_not_dropped_for_one_with_an_earlier_time(stream: Bench) -> None:
    turn = ask([user("q")], at=20)
    await stream.deliver(turn, feedback())
    await stream.deliver(commit(before=10), commit(before=40))
    assert turns_of(stream) == [("commit", [turn.turn_id])]


async def test_end_of_turns_that_are_not_open_reads_no_session(stream: Bench) -> None:
    """An end for each of many wrong ids would read the whole session each time."""
    turn = ask([user("q")])
    await stream.deliver(turn)
    read = mock.AsyncMock(side_effect=AssertionError("the session is read"))
    with mock.patch.object(closing, "load_session", read):
        await stream.deliver(feedback("s", ask([user("another")]), ends_session=True))
    assert await stream.count("ends") == 0
    await stream.deliver(feedback("s", turn, ends_session=True))
    assert turns_of(stream) == [("feedback", [turn.turn_id])]


async def test_a_session_is_closed_with_the_newest_of_its_feedback(
    stream: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feedback waits for its turns for minutes. To read 1,000 events of 1 MB took all memory, at each start again."""
    monkeypatch.setattr(store, "_FEEDBACK_MAX", 8)
    turn = ask([user("q")])
    events = [feedback("s", turn, task_id=f"t{n}", context={f"k{n}": n}) for n in range(20)]
    await stream.deliver(*events)
    monkeypatch.setattr(store, "_FEEDBACK_BYTES_MAX", 6 * len(events[-1].to_json()) + 10)
    await stream.deliver(turn)
    await stream.deliver(end())
    trajectory = stream.sent(Trajectory)[0]
    assert (trajectory.task_id, list(trajectory.context)) == ("t19", [f"k{n}" for n in range(14, 20)])
    await stream.deliver(ask([user("q")], session="large"), feedback("large", context={"large": "x" * 10_000}))
    await stream.deliver(end("large"))
    assert list(stream.sent(Trajectory)[1].context) == ["large"], "the newest counts, whatever its size"

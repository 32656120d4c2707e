"""Tests of the end of sessions by call, feedback, commit or idleness. A session ends only after all earlier turns
arrived."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import text

from headrace_collector import handlers
from headrace_collector.settings import CollectorSettings
from headrace_collector.upkeep import end_idle_runs
from headrace_runtime.clock import epoch_ms
from headrace_schemas import DeadLetter, SessionEnd, Trajectory
from tests.support.streams import Bench
from tests.support.turns import START, after, ask, commit, end, feedback, tool, user
from tests.unit.collector.conftest import Open, pass_time, turns_of


async def test_end_call_closes_the_session(stream: Bench) -> None:
    first = ask([user("q")], "a", at=0)
    second = ask(after(first, tool("r")), "b", at=1)
    await stream.deliver(first, second)
    assert turns_of(stream) == []
    await stream.deliver(end())
    assert turns_of(stream) == [("end_call", [first.turn_id, second.turn_id])]


async def test_end_waits_for_its_only_turn(stream: Bench) -> None:
    (turn,) = stream.produce(ask([user("q")]))
    await stream.deliver(end())
    assert await stream.count("ends") == 1
    await stream.deliver(turn)
    assert [len(turns) for _, turns in turns_of(stream)] == [1]


async def test_end_waits_for_its_turns(stream: Bench) -> None:
    first, second = stream.produce(ask([user("q")], at=0), ask([user("p")], at=1))
    await stream.deliver(end())
    await stream.deliver(first)
    assert turns_of(stream) == []
    await stream.deliver(second)
    assert [len(turns) for _, turns in turns_of(stream)] == [2]


async def test_end_in_the_batch_of_its_turns_closes_at_once(stream: Bench) -> None:
    turn = ask([user("q")])
    await stream.deliver(end(), turn)
    assert turns_of(stream) == [("end_call", [turn.turn_id])]


async def test_ends_of_partitions_are_independent(stream: Bench) -> None:
    stream.produce(ask([user("q")], session="elsewhere"), partition=1)
    await stream.deliver(ask([user("q")]))
    await stream.deliver(end())
    assert len(turns_of(stream)) == 1


async def test_end_waits_for_earlier_feedback(stream: Bench) -> None:
    a, b = (ask([user("q")], name, at=at, session_source="implicit") for at, name in enumerate("xy"))
    await stream.deliver(a, b)
    judged = stream.produce(feedback("s", a, run_id="7"))[0]
    await stream.deliver(end())
    assert turns_of(stream) == []
    await stream.deliver(judged)
    assert sorted(trajectory.run_id or "" for trajectory in stream.sent(Trajectory)) == ["", "7"]


async def test_feedback_may_end_its_session(stream: Bench) -> None:
    turn = ask([user("q")])
    await stream.deliver(turn, feedback())
    assert turns_of(stream) == []
    await stream.deliver(feedback(ends_session=True, context={"expected": "x"}))
    assert turns_of(stream) == [("feedback", [turn.turn_id])]
    assert stream.sent(Trajectory)[0].context == {"expected": "x"}


async def test_feedback_with_turns_ends_their_run_only(stream: Bench) -> None:
    a, b = (ask([user("q")], name, at=at, session_source="implicit") for at, name in enumerate("xy"))
    await stream.deliver(a, b, feedback("s", b, ends_session=True))
    assert turns_of(stream) == [("feedback", [b.turn_id])]
    async with stream.processor.database.transaction() as tx:
        check_ms = (await tx.execute(text("SELECT check_ms FROM sessions"))).scalar_one()
    assert check_ms == epoch_ms(START + timedelta(seconds=300)), "when the run that is left may be idle"
    await stream.deliver(end())
    assert turns_of(stream)[1:] == [("end_call", [a.turn_id])]


async def test_commit_closes_runs_with_feedback(stream: Bench) -> None:
    judged, silent = ask([user("q")], session="judged"), ask([user("q")], session="silent")
    other = ask([user("q")], session="other", tenant="b")
    feedback_events = [
        feedback("judged"),
        feedback("other", tenant="b"),
        feedback("silent", value=None, context={"a": 1}),
    ]
    await stream.deliver(judged, silent, other, *feedback_events)
    await stream.deliver(commit())
    assert turns_of(stream) == [("commit", [judged.turn_id])]


async def test_commit_may_name_a_time(stream: Bench) -> None:
    old, new = ask([user("q")], session="old", at=9), ask([user("q")], session="new", at=9.001)  # each takes 1 s
    await stream.deliver(old, new, feedback("old"), feedback("new"))
    await stream.deliver(commit(before=10))
    assert turns_of(stream) == [("commit", [old.turn_id])]


async def test_commit_applies_to_its_partition(stream: Bench) -> None:
    turn = ask([user("q")])
    await stream.deliver(turn, feedback(), partition=1)
    await stream.deliver(commit(0), partition=0)
    assert turns_of(stream) == []
    await stream.deliver(commit(1), partition=1)
    assert len(turns_of(stream)) == 1


async def test_commit_closes_thousands_of_sessions_in_steps(with_settings: Open) -> None:
    async with with_settings() as stream:
        sessions = [f"s{n}" for n in range(450)]
        await stream.deliver(*(ask([user("q")], session=name) for name in sessions))
        await stream.deliver(*(feedback(name) for name in sessions))
        await stream.deliver(commit())
        after_batch = stream.processor.after_batch
        assert after_batch is not None
        assert [await stream.processor.step(after_batch) for _ in range(2)] == [True, False], (
            "whether there is more to do"
        )
        assert len(turns_of(stream)) == 450
        assert await stream.count("ends") == 0


async def test_idle_run_ends(stream: Bench) -> None:
    first = ask([user("q")])
    stream.clock.advance(400)
    await stream.deliver(first)
    await pass_time(stream, 200)
    second = ask(after(first, user("m")))
    await stream.deliver(second)
    await pass_time(stream, 200)
    assert turns_of(stream) == [], "seen 200 s ago"
    await pass_time(stream, 100)
    assert turns_of(stream) == [("idle", [first.turn_id, second.turn_id])]


async def test_idleness_is_measured_for_each_run(stream: Bench) -> None:
    stream.clock.advance(400)
    quiet, busy = (ask([user("q")], name, at=at, session_source="implicit") for at, name in enumerate("xy"))
    await stream.deliver(quiet, busy)
    await pass_time(stream, 200)
    await stream.deliver(ask(after(busy, user("m")), session_source="implicit"))
    await pass_time(stream, 150)
    assert turns_of(stream) == [("idle", [quiet.turn_id])]


async def test_restart_splits_no_session(stream: Bench) -> None:
    await stream.deliver(ask([user("q")]))
    await pass_time(stream, 299)
    assert turns_of(stream) == [], "the service has not been here for idle_s"
    await pass_time(stream, 1)
    assert len(turns_of(stream)) == 1


async def test_idleness_is_counted_from_the_start_of_the_service(stream: Bench) -> None:
    turn = ask([user("q")])
    await stream.deliver(turn)
    stream.clock.advance(10_000)
    started = stream.clock.now()
    await pass_time(stream, 299, started=started)
    assert turns_of(stream) == [], "what was sent while it was away may still be on its way"
    await pass_time(stream, 2, started=started)
    assert turns_of(stream) == [("idle", [turn.turn_id])]


async def test_lag_splits_no_session(stream: Bench) -> None:
    first = ask([user("q")], at=0)
    second = stream.produce(first, ask(after(first, user("m")), at=1))[1]
    stream.clock.advance(400)
    await stream.deliver(stream.log["turns"][0][0])
    await pass_time(stream, 350)
    assert turns_of(stream) == [], "a turn that was sent has yet to be read"
    await stream.deliver(second)
    await pass_time(stream, 100)
    assert turns_of(stream) == [], "and it has only just been seen"
    await pass_time(stream, 250)
    assert [len(turns) for _, turns in turns_of(stream)] == [2]


async def test_unreachable_end_is_applied_after_end_wait_s(stream: Bench) -> None:
    for number, session in enumerate(("at the start", "later")):
        turn = ask([user("q")], session=session)
        await stream.deliver(turn)
        stream.append("turns", None)  # say, a transaction marker, which no consumer ever sees
        await stream.deliver(end(session))
        await pass_time(stream, 899)
        assert len(turns_of(stream)) == number
        await pass_time(stream, 1)
        assert turns_of(stream)[number:] == [("end_call", [turn.turn_id])]


async def test_turns_after_the_end_start_a_new_trajectory(stream: Bench) -> None:
    first = ask([user("q")], "a", at=0)
    await stream.deliver(first)
    await stream.deliver(end())
    late = ask(after(first, user("m")), "b", at=1)
    more = ask(after(late, user("n")), "c", at=2)
    await stream.deliver(late, more)
    await stream.deliver(end())
    early, later = stream.sent(Trajectory)
    assert early.trajectory_id != later.trajectory_id
    assert later.turn_ids == (late.turn_id, more.turn_id)
    (branch,) = later.branches
    assert branch.spans[0].start == len(late.prompt_token_ids), "its history is context"


async def test_turns_that_continue_a_closed_run_are_one_run(stream: Bench) -> None:
    closed = ask([user("q")], "a", at=0, session_source="implicit")
    await stream.deliver(closed)
    await stream.deliver(end())
    left, right = (ask(after(closed, user(name)), at=1, session_source="implicit") for name in "lr")
    await stream.deliver(left, right)
    await stream.deliver(end())
    assert turns_of(stream)[1:] == [("end_call", [left.turn_id, right.turn_id])]


async def test_end_of_another_tenant_has_no_effect(stream: Bench) -> None:
    turn = ask([user("q")])
    forged = end(tenant="b").model_copy(update={"session_key": turn.session_key})
    await stream.deliver(turn)
    await stream.deliver(forged, commit(tenant="b"))
    assert turns_of(stream) == []


async def test_end_without_a_session_is_dead_lettered(stream: Bench) -> None:
    await stream.deliver(SessionEnd(time=START, end_id="e"))
    assert [letter.reason for letter in stream.sent(DeadLetter)] == ["invalid_event"]


async def test_session_beyond_the_completion_limit_is_closed(
    with_settings: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "SEQUENCES_MAX", 3)
    async with with_settings() as stream:
        turns = [ask([user(f"q{at}")], at=at) for at in range(5)]
        await stream.deliver(*turns)
        assert turns_of(stream) == [("limit", [turn.turn_id for turn in turns[:3]])]
        await stream.deliver(end())
        assert turns_of(stream)[1:] == [("end_call", [turn.turn_id for turn in turns[3:]])]


async def test_large_session_closes_the_longest_idle_runs(with_settings: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "SEQUENCES_MAX", 4)
    async with with_settings() as stream:
        runs = [ask([user("q")], name, at=at, session_source="implicit") for at, name in enumerate("abc")]
        for turn in runs:
            stream.clock.advance(1)
            await stream.deliver(turn)
        stream.clock.advance(1)
        more = ask(after(runs[0], user("m")), session_source="implicit")
        await stream.deliver(more)
        assert sorted(turns_of(stream)) == sorted(("limit", [turn.turn_id]) for turn in runs[1:])
        await stream.deliver(end())
        assert turns_of(stream)[2:] == [("end_call", [runs[0].turn_id, more.turn_id])]


async def test_session_beyond_the_token_limit_is_closed(with_settings: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_BRANCH_TOKENS_MAX", 20)
    async with with_settings() as stream:
        await stream.deliver(ask([user("x" * 30)]))
        assert [reason for reason, _ in turns_of(stream)] == ["limit"]


async def test_token_limit_applies_to_the_longest_branch(with_settings: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_BRANCH_TOKENS_MAX", 200)
    async with with_settings() as stream:
        turns = [ask([user("q" * 20)], at=0)]
        while len(turns) < 8:
            turns.append(ask(after(turns[-1], user("m")), at=len(turns)))
        lengths = [len(turn.prompt_token_ids) + len(turn.choices[0].token_ids) for turn in turns]
        assert max(lengths) < 200 < sum(lengths)
        await stream.deliver(*turns)
        assert turns_of(stream) == []
        too_long = ask(after(turns[-1], user("y" * 200)), at=len(turns))
        await stream.deliver(too_long)
        assert turns_of(stream) == [("limit", [turn.turn_id for turn in [*turns, too_long]])]
        ids = stream.sent(Trajectory)[0].branches[0].token_ids
        assert tuple(ids[: len(too_long.prompt_token_ids)]) == tuple(too_long.prompt_token_ids)


async def test_long_run_does_not_close_other_runs_of_its_key(
    with_settings: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_BRANCH_TOKENS_MAX", 100)
    async with with_settings() as stream:
        short = ask([user("s")], at=0, session_source="implicit")
        long = ask([user("l" * 120)], at=1, session_source="implicit")
        await stream.deliver(short)
        stream.clock.advance(1)
        await stream.deliver(long)
        assert turns_of(stream) == [("limit", [long.turn_id])]


async def test_session_beyond_the_limit_of_new_tokens_is_closed(stream: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_ADDED_TOKENS_MAX", 100)
    turns = [ask([user("q" * 40)], at=at) for at in range(3)]
    lengths = [len(turn.prompt_token_ids) + len(turn.choices[0].token_ids) for turn in turns]
    assert sum(lengths[:2]) < 100 <= sum(lengths)
    await stream.deliver(*turns)
    assert turns_of(stream) == [("limit", [turn.turn_id for turn in turns])]


async def test_runs_whose_new_tokens_exceed_the_limit_together_are_closed(
    stream: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_ADDED_TOKENS_MAX", 100)
    runs = [ask([user(name * 40)], at=at, session_source="implicit") for at, name in enumerate("abc")]
    for turn in runs:
        stream.clock.advance(1)
        await stream.deliver(turn)
    assert sorted(turns_of(stream)) == sorted(("limit", [turn.turn_id]) for turn in runs[:2])


@pytest.mark.parametrize("times", [1, 3])
async def test_redelivered_end_closes_nothing_twice(stream: Bench, times: int) -> None:
    turn = ask([user("q")])
    await stream.deliver(turn)
    record = stream.produce(end())[0]
    for _ in range(times):
        await stream.deliver(record)
    assert len(turns_of(stream)) == 1


async def test_idle_run_gets_one_end(stream: Bench) -> None:
    quiet, busy = ask([user("q")], session="quiet"), ask([user("q")], session="busy")
    await stream.deliver(quiet)
    idle = partial(end_idle_runs, settings=CollectorSettings(idle_s=300), started=START, turns_end={0: 9})
    stream.clock.advance(100)
    await stream.deliver(busy)
    stream.clock.advance(200)
    for _ in range(2):
        await stream.step(idle)
        assert await stream.count("ends") == 1
    stream.clock.advance(99)
    await stream.step(idle)
    assert await stream.count("ends") == 1
    stream.clock.advance(1)
    await stream.step(idle)
    assert await stream.count("ends") == 2


async def test_idle_check_is_scheduled_for_each_run(stream: Bench) -> None:
    quiet, busy = (ask([user("q")], name, at=at, session_source="implicit") for at, name in enumerate("xy"))
    await stream.deliver(quiet)
    stream.clock.advance(200)
    await stream.deliver(busy)
    idle = partial(end_idle_runs, settings=CollectorSettings(idle_s=300), started=START, turns_end={0: 9})
    for seconds, runs_expected in ((100, 1), (199, 1), (1, 2)):
        stream.clock.advance(seconds)
        await stream.step(idle)
        assert await stream.count("ends") == runs_expected


async def test_idle_runs_are_ended_in_steps(stream: Bench) -> None:
    turns = [ask([user("q")], session=f"s{number}") for number in range(60)]
    await stream.deliver(*turns)
    stream.clock.advance(300)
    idle = partial(end_idle_runs, settings=CollectorSettings(idle_s=300), started=START, turns_end={0: 60})
    assert [await stream.processor.step(idle) for _ in range(2)] == [True, False], "whether there is more to do"
    assert await stream.count("ends") == 60


async def test_restart_delays_idleness(stream: Bench) -> None:
    await stream.deliver(ask([user("q")]))
    stream.clock.advance(10_000)  # it was away, and the client's next turn waits on the bus
    restarted = stream.clock.now()
    settings = CollectorSettings()
    idle = partial(end_idle_runs, settings=settings, started=restarted, turns_end={0: 1})
    for seconds in (0, settings.idle_s - 1):
        stream.clock.advance(seconds)
        await stream.step(idle)
        assert await stream.count("ends") == 0
    stream.clock.advance(2)
    for _ in range(2):
        await stream.step(idle)
        assert await stream.count("ends") == 1

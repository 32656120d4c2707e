"""Tests that many ends and much feedback of one session cost a bounded amount of work."""

from __future__ import annotations

from unittest import mock

import pytest
from sqlalchemy import RowMapping, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import closing, ends, schema, store
from headrace_schemas import Trajectory
from tests.support.streams import Bench
from tests.support.turns import ask, commit, end, feedback, user
from tests.unit.collector.conftest import turns_of


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

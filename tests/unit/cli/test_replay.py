"""Times of a range, and the JSON line of an entry.

Commands that read topics do not end because of one record, whatever a producer wrote into it.

Traces from a version to its training data, and from a session to its versions, on generated histories.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import topics
from headrace.errors import UsageError
from headrace.topics import Entry
from headrace_cli.commands.ranges import parse_time
from headrace_cli.commands.replay import entry_as_json
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import trace_version
from headrace_operations.turn_account import TurnAccountBuilder
from headrace_schemas import Trajectory
from tests.support.account_events import START, trajectory
from tests.support.lineage_questions import assert_traces_agree, in_memory, made_up
from tests.support.training_history import History
from tests.support.turns import ask, user


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        (None, None),
    ],
)
def test_times(text: str | None, expected: datetime | None) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5min", 300), ("5m", 300), ("1.5h", 5400), ("7d", 604_800)]
)
def test_times_ago(text: str, seconds: float) -> None:
    time = parse_time(text)
    assert time is not None
    assert abs((datetime.now(UTC) - time) - timedelta(seconds=seconds)) < timedelta(seconds=5)


def test_nonsense_is_no_time() -> None:
    with pytest.raises(UsageError, match="'yesterday' is not a time"):
        parse_time("yesterday")


def test_a_line_has_the_position_of_the_record_and_the_complete_event() -> None:
    event = trajectory("T", ("ü",))
    line = entry_as_json(Entry("trajectories", 1, 7, START, event.key, event))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("event") == json.loads(event.to_json())
    assert fields == {
        "topic": "trajectories", "partition": 1, "offset": 7, "time": "2026-01-01T00:00:00+00:00", "key": event.key,
        "id": event.event_id, "type": "headrace.trajectory.v1",
    }  # fmt: skip


def test_a_line_about_a_record_that_is_no_event() -> None:
    fields = json.loads(entry_as_json(Entry("turns", 0, 1, START, "k", None, "value: Invalid JSON")))
    assert fields["problem"] == "value: Invalid JSON"
    assert "event" not in fields


@pytest.mark.parametrize("timestamp", [2**62, -(2**62), -1, 0, None, 1e300])
@pytest.mark.parametrize("value", [b"", b"{", b"[" * 200_000, b"\xff", None, b'{"time": 1e308}'], ids=range(6))
async def test_an_entry_of_any_record(timestamp: Any, value: bytes | None) -> None:
    message: Any = SimpleNamespace(
        topic="turns", partition=0, offset=7, key=b"\xff\x00", value=value, headers=(), timestamp=timestamp
    )
    entry = await topics._entry(message)
    assert (entry.offset, entry.event) == (7, None)
    assert entry.problem


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, KeyError, UnicodeError])
def test_an_event_that_breaks_the_account_is_a_problem_of_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    turns = [ask([user(f"q{number}")], session=f"s{number}", at=number) for number in range(3)]
    real = TurnAccountBuilder.add

    def add(self: TurnAccountBuilder, event: Any) -> None:
        if event.event_id == turns[1].event_id:
            raise error("poison \x1b[31m \ud83d")
        real(self, event)

    monkeypatch.setattr(TurnAccountBuilder, "add", add)
    builder = TurnAccountBuilder()
    for number, turn in enumerate(turns):
        builder.add_or_note(turn, f"turns[0]@{number}")
    account = builder.close()
    assert (account.captured, account.problems_total) == (2, 1)
    assert "turns[0]@1" in account.problems[0]


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

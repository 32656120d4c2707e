"""Times of a range, and the JSON line of an entry."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from headrace.errors import UsageError
from headrace.topics import Entry
from headrace_cli.commands.replay import entry_as_json
from headrace_cli.commands.times import parse_time
from tests.support.account_events import START, trajectory


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

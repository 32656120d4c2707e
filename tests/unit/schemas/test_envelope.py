"""CloudEvents in headers; producers that send none are served all the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from headrace_schemas import Feedback, Reward
from headrace_schemas.events.envelope import Envelope, type_of

REWARD = Reward(
    time=datetime(2026, 11, 20, tzinfo=UTC), trajectory_id="t-1", session_key="a" * 16, source="mine", value=0.5
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_headers_round_trip() -> None:
    envelope = Envelope.of(REWARD, "headrace/scorer", TRACE)
    headers = envelope.headers()
    assert dict(headers)["ce_specversion"] == b"1.0"
    assert dict(headers)["ce_time"] == b"2026-11-20T00:00:00Z"
    assert type_of(headers) == "headrace.reward.v1"
    assert Envelope.read(headers, REWARD) == envelope


def test_a_bare_record_gets_the_events_own_id() -> None:
    envelope = Envelope.read([], REWARD)
    assert envelope.id == REWARD.event_id
    assert envelope.source == "unknown"
    assert envelope.traceparent is None


def test_malformed_headers_do_no_harm() -> None:
    envelope = Envelope.read([("traceparent", b"00-junk"), ("ce_id", None), ("ce_source", b"\xff\xfe")], REWARD)
    assert envelope.traceparent is None
    assert envelope.id == REWARD.event_id


def test_places_survive_the_way_and_what_is_none_is_as_if_it_was_not_sent() -> None:
    event = Feedback(time=REWARD.time, feedback_id="f", session_key="a" * 16)
    sent = replace(Envelope.of(event, "test", after={"turns": 12, "trajectories": 0}), sequence=7)
    read = Envelope.read(sent.headers(), event)
    assert (read.after, read.sequence) == ({"turns": 12, "trajectories": 0}, 7)
    for bad in ("turns", "turns=-1", "turns=x,trajectories=2", ""):
        envelope = Envelope.read([("ce_after", bad.encode()), ("ce_sequence", bad.encode())], event)
        assert (envelope.after, envelope.sequence) == (None, None)

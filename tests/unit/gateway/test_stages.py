"""What of a spool may go to the bus together."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.stages import in_stages
from headrace_schemas import Event, Feedback, SessionEnd
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow

KEYS = [ids.session_key("default", name) for name in ("a", "b", "c")]


def feedback(key: str) -> Feedback:
    return Feedback(time=utcnow(), feedback_id="f", session_key=key, value=1.0)


def end(key: str) -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id="e", session_key=key)


def commit() -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id="c", scope="tenant", reason="commit")


def stages(events: list[Event]) -> list[list[int]]:
    """As places in `events`."""
    return in_stages(list(range(len(events))), lambda place: events[place])


def test_sessions_owe_each_other_nothing_and_an_end_waits_for_its_own_events() -> None:
    a, b, _ = KEYS
    assert stages([feedback(a), end(a), feedback(b), feedback(b), end(b), feedback(a)]) == [[0, 2, 3], [1, 4], [5]]


def test_the_end_of_a_tenant_stands_alone() -> None:
    a, b, _ = KEYS
    assert stages([feedback(a), feedback(b), end(b), commit(), feedback(a), end(b)]) == [[0, 1], [2], [3], [4, 5]]


events = st.one_of(st.builds(feedback, st.sampled_from(KEYS)), st.builds(end, st.sampled_from(KEYS)), st.builds(commit))


@given(st.lists(events, max_size=30))
def test_a_session_keeps_its_order_in_as_few_stages_as_its_topics_take_turns(sent: list[Event]) -> None:
    found = stages(sent)
    assert sorted(itertools.chain(*found)) == list(range(len(sent)))
    assert all(found)
    at = {place: number for number, stage in enumerate(found) for place in stage}
    assert all(stage == sorted(stage) for stage in found)
    for first, second in itertools.combinations(range(len(sent)), 2):
        if sent[first].key == sent[second].key:
            assert at[first] + (sent[first].topic != sent[second].topic) <= at[second]
        if "c" in (getattr(sent[first], "end_id", ""), getattr(sent[second], "end_id", "")):
            assert at[first] < at[second]
    assert len(found) <= _turns_taken(sent)


def _turns_taken(sent: list[Event]) -> int:
    """The longest alternation of topics in a session between two commits, and one for each commit."""
    total, between = 0, list[Event]()
    for event in [*sent, commit()]:
        if isinstance(event, SessionEnd) and event.scope == "tenant":
            runs = [[topic for topic, _ in itertools.groupby(e.topic for e in between if e.key == key)] for key in KEYS]
            total, between = total + max(map(len, runs)) + 1, []
        else:
            between.append(event)
    return total - 1

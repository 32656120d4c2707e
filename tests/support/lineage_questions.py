"""Comparison of `models why` and `sessions where` with a generated training history."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.topics import Entry, Range
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import VersionTrace, trace_version
from headrace_schemas import Checkpoint, Event, Experience, TrainingMetrics, Trajectory
from tests.support.account_events import START
from tests.support.training_history import History, fate

TOPICS = (Checkpoint.topic, TrainingMetrics.topic, Experience.topic, Trajectory.topic)


@dataclass
class Recorded:
    """Entries that were read from the bus once, by topic and by key, so that a thousand queries need not read them."""

    entries: dict[str, list[Entry]]
    keyed: dict[tuple[str, str], list[Entry]]

    async def read(self, entries: Range) -> AsyncIterator[Entry]:
        with_keys = [entry for key in entries.keys for entry in self.keyed.get((entries.topic, key), [])]
        for entry in with_keys if entries.keys else self.entries[entries.topic]:
            yield entry


def recorded(entries: dict[str, list[Entry]]) -> Recorded:
    keyed: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for topic, several in entries.items():
        for entry in several:
            keyed[topic, entry.key].append(entry)
    return Recorded(entries, keyed)


def made_up(seed: int, sessions: int, saves: int) -> History:
    history = History(random.Random(seed))
    history.begin()
    for number in range(sessions):
        history.session(number)
        while history.chance.random() < saves / sessions:
            history.save()
    history.save()
    return history


def in_memory(events: list[Event]) -> Recorded:
    entries: dict[str, list[Entry]] = {topic: [] for topic in TOPICS}
    for event in events:
        several = entries[event.topic]
        several.append(Entry(event.topic, 0, len(several), START, event.key, event))
    return recorded(entries)


async def trace_in_pages(topics: Recorded, version: str, *, everything: bool) -> VersionTrace:
    """Read the trace of a version in several pages and join them."""
    first = await trace_version(topics, version, everything=everything, after=0, limit=7)
    entries = list(first.entries)
    while len(entries) < first.total:
        page = await trace_version(topics, version, everything=everything, after=len(entries), limit=1000)
        entries += page.entries
    return dataclasses.replace(first, entries=tuple(entries))


async def assert_traces_agree(topics: Recorded, history: History) -> None:
    """Assert that the traces of all versions and sessions agree with the history."""
    for version, contents in history.contents.items():
        parent = history.contents.get(history.parents[version] or "", {})
        since_parent = {name: account for name, account in contents.items() if name not in parent}
        for everything, expected in ((True, contents), (False, since_parent)):
            trace = await trace_in_pages(topics, version, everything=everything)
            assert {(entry.experience_id, entry.revision): entry.account for entry in trace.entries} == expected
            for entry in trace.entries:
                experience = history.experiences[entry.experience_id, entry.revision]
                assert (entry.session_id, entry.reward) == (experience.session_id, experience.reward)
    for session, names in history.sessions.items():
        if not names and not any(e.session_id == session for e in history.events if isinstance(e, Trajectory)):
            continue
        session_trace = await trace_session(topics, session, tenant="default", after=0, limit=1000)
        assert {(entry.experience_id, entry.revision) for entry in session_trace.entries} == set(names)
        for revision in session_trace.entries:
            statuses = [(status.outcome, status.version) for status in revision.fates]
            expected_fate = fate(history, (revision.experience_id, revision.revision))
            assert statuses == ([expected_fate] if expected_fate else []), (session, revision)

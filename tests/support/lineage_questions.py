"""Asks `models why` and `sessions where` about a made-up history, and compares with what it says of itself."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.topics import Entry, Range
from headrace_operations.lineage.sessions import where
from headrace_operations.lineage.versions import Why, why
from headrace_schemas import Checkpoint, Event, Experience, TrainingMetrics, Trajectory
from tests.support.account_events import START
from tests.support.training_history import History, Name, fate

TOPICS = (Checkpoint.topic, TrainingMetrics.topic, Experience.topic, Trajectory.topic)


@dataclass
class Recorded:
    """What was read from the bus once, by topic and by key: a thousand questions need not read it a thousand times."""

    entries: dict[str, list[Entry]]
    keyed: dict[tuple[str, str], list[Entry]]

    async def read(self, wanted: Range) -> AsyncIterator[Entry]:
        found = [one for key in wanted.keys for one in self.keyed.get((wanted.topic, key), [])]
        for entry in found if wanted.keys else self.entries[wanted.topic]:
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


async def everything(topics: Recorded, version: str, *, whole: bool) -> Why:
    """All pages, which together are what one page of all would be."""
    first = await why(topics, version, whole=whole, after=0, limit=7)
    entries = list(first.entries)
    while len(entries) < first.total:
        entries += (await why(topics, version, whole=whole, after=len(entries), limit=1000)).entries
    return dataclasses.replace(first, entries=tuple(entries))


async def agrees(topics: Recorded, history: History) -> None:
    for version, held in history.contents.items():
        before = history.contents.get(history.parents[version] or "", {})
        for whole, expected in ((True, held), (False, {n: a for n, a in held.items() if n not in before})):
            found = await everything(topics, version, whole=whole)
            assert {(one.experience_id, one.revision): one.account for one in found.entries} == expected
            for one in found.entries:
                experience = history.experiences[one.experience_id, one.revision]
                assert (one.session_id, one.reward) == (experience.session_id, experience.reward)
    for session, names in history.sessions.items():
        if not names and not any(e.session_id == session for e in history.events if isinstance(e, Trajectory)):
            continue
        found_where = await where(topics, session, tenant="default", after=0, limit=1000)
        shown: dict[Name, object] = {(one.experience_id, one.revision): one for one in found_where.entries}
        assert set(shown) == set(names)
        for shown_one in found_where.entries:
            told = [(told.outcome, told.version) for told in shown_one.fates]
            expected_fate = fate(history, (shown_one.experience_id, shown_one.revision))
            assert told == ([expected_fate] if expected_fate else []), (session, shown_one)

"""Reads dead letters together with what was decided about them."""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from headrace.errors import UsageError
from headrace.topics import Range, Topics
from headrace_schemas import DeadLetter, DeadLetterDecision
from headrace_schemas.events.dead_letter_decision import RETRY_HEADER

State = Literal["open", "retried", "discarded"]


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter and every decision about it, in order."""

    letter: DeadLetter
    decisions: tuple[DeadLetterDecision, ...] = ()

    @property
    def id(self) -> str:
        return self.letter.event_id

    @property
    def state(self) -> State:
        return self.decisions[-1].action if self.decisions else "open"

    @property
    def retry_of(self) -> str | None:
        """The letter whose retry was refused, when this is what came of it."""
        return self.letter.headers.get(RETRY_HEADER)

    @property
    def position(self) -> str:
        """Where the record was, as `topic[partition]@offset`; less where it never was on a topic."""
        letter = self.letter
        where = f"[{letter.source_partition}]" if letter.source_partition is not None else ""
        return letter.source_topic + where + (f"@{letter.source_offset}" if letter.source_offset is not None else "")

    def without_value(self) -> Letter:
        """The same without the refused bytes, to be kept in numbers."""
        return Letter(self.letter.model_copy(update={"value_base64": ""}), self.decisions)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant. What is left empty does not matter; offsets and partitions are those of the refused."""

    ids: tuple[str, ...] = ()
    """Ids or their first characters."""
    states: Collection[State] = ()
    reasons: Collection[str] = ()
    topics: Collection[str] = ()
    services: Collection[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    partitions: Collection[int] = ()
    from_offset: int | None = None
    to_offset: int | None = None

    @property
    def chooses(self) -> bool:
        """Whether anything but the state narrows it down."""
        return any(
            value not in ((), None)
            for value in (self.ids, self.reasons, self.topics, self.services, self.since, self.until, self.partitions,
                          self.from_offset, self.to_offset)
        )  # fmt: skip

    def matches(self, one: Letter) -> bool:
        letter = one.letter
        return (
            (not self.ids or one.id.startswith(self.ids))
            and (not self.states or one.state in self.states)
            and (not self.reasons or letter.reason in self.reasons)
            and (not self.topics or letter.source_topic in self.topics)
            and (not self.services or letter.service in self.services)
            and (self.since is None or letter.time >= self.since)
            and (self.until is None or letter.time < self.until)
            and (not self.partitions or letter.source_partition in self.partitions)
            and self._offset_matches(letter.source_offset)
        )

    def _offset_matches(self, offset: int | None) -> bool:
        if self.from_offset is None and self.to_offset is None:
            return True
        if offset is None:
            return False
        return (self.from_offset or 0) <= offset and (self.to_offset is None or offset < self.to_offset)


@dataclass(slots=True)
class Cut:
    """Where the letters end and what is decided, at one moment: letters that come later are not in it."""

    ends: Mapping[int, int]
    decisions: Mapping[str, tuple[DeadLetterDecision, ...]]
    unreadable: dict[str, str] = field(default_factory=dict)
    """Records on `dead-letters` that could not be parsed: position to problem."""


async def cut(topics: Topics) -> Cut:
    """Raises `UsageError` when the topics do not exist."""
    ends = (await topics.ends([DeadLetter.topic]))[DeadLetter.topic]
    found: dict[str, dict[str, DeadLetterDecision]] = collections.defaultdict(dict)
    if await topics.partitions(DeadLetterDecision.topic):  # a bus of an older release has no such topic
        async for entry in topics.read(Range(DeadLetterDecision.topic)):
            if isinstance(entry.event, DeadLetterDecision):
                found[entry.event.dead_letter_id].setdefault(entry.event.event_id, entry.event)
    made = {name: tuple(sorted(all_of.values(), key=lambda one: one.number)) for name, all_of in found.items()}
    return Cut(ends, made)


async def read(topics: Topics, wanted: Selection, at: Cut) -> AsyncIterator[Letter]:
    """The letters of `wanted`, each once, in the order of each partition."""
    told: set[str] = set()
    async for entry in topics.read(Range(DeadLetter.topic), ends=at.ends):
        if not isinstance(entry.event, DeadLetter):
            at.unreadable[f"{entry.topic}[{entry.partition}]@{entry.offset}"] = entry.problem or "no dead letter"
            continue
        one = Letter(entry.event, at.decisions.get(entry.event.event_id, ()))
        if one.id not in told and wanted.matches(one):
            told.add(one.id)
            yield one


def check_ids(wanted: Selection, found: Collection[str]) -> None:
    """Every id that was named means exactly one of `found`. Raises `UsageError`."""
    for name in wanted.ids:
        meant = sorted(one for one in found if one.startswith(name))
        if not meant:
            kind = f"{' or '.join(wanted.states)} dead letter" if wanted.states else "dead letter"
            raise UsageError(f"there is no {kind} here whose id begins with {name!r}")
        if len(meant) > 1:
            raise UsageError(f"{len(meant)} dead letters have ids that begin with {name!r}: {', '.join(meant[:5])}")

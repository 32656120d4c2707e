"""Listing, retrying and discarding of dead letters. No record is removed from the log.

A letter is open until a decision about it is on `dead-letter-decisions`, which is kept forever. A record that is
refused again after a retry is a new letter, because it is at a new offset.
"""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from headrace.errors import HeadraceError, UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import Range, Topics, connected, event_of
from headrace_schemas import DeadLetter, DeadLetterDecision, Event
from headrace_schemas.events.dead_letter import RETRY_HEADER
from headrace_schemas.rules.training import permanent_problem, retry_headers
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.text import printable_lines

State = Literal["open", "retried", "discarded"]
_HEX_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter with all decisions about it, in order."""

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
        """Id of the dead letter whose retry was refused again as this letter, or None if no retry led to it."""
        return self.letter.headers.get(RETRY_HEADER)

    @property
    def position(self) -> str:
        """Position of the refused record as `topic[partition]@offset`, or the topic alone if the record was never on
        it.
        """
        letter = self.letter
        partition = f"[{letter.source_partition}]" if letter.source_partition is not None else ""
        return (
            letter.source_topic + partition + (f"@{letter.source_offset}" if letter.source_offset is not None else "")
        )

    def without_value(self) -> Letter:
        """Return a copy of the letter without the refused bytes, to save memory."""
        return Letter(self.letter.model_copy(update={"value_base64": ""}), self.decisions)


@dataclass(frozen=True, slots=True)
class Selection:
    """Filter of dead letters. An empty field matches all letters.

    Offsets and partitions are those of refused records.
    """

    ids: tuple[str, ...] = ()
    """Ids or prefixes of ids."""
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
    def has_conditions(self) -> bool:
        """Whether there is a condition besides that on the states of letters."""
        return any(
            value not in ((), None)
            for value in (self.ids, self.reasons, self.topics, self.services, self.since, self.until, self.partitions,
                          self.from_offset, self.to_offset)
        )  # fmt: skip

    def matches(self, letter: Letter) -> bool:
        record = letter.letter
        return (
            (not self.ids or letter.id.startswith(self.ids))
            and (not self.states or letter.state in self.states)
            and (not self.reasons or record.reason in self.reasons)
            and (not self.topics or record.source_topic in self.topics)
            and (not self.services or record.service in self.services)
            and (self.since is None or record.time >= self.since)
            and (self.until is None or record.time < self.until)
            and (not self.partitions or record.source_partition in self.partitions)
            and self._offset_matches(record.source_offset)
        )

    def _offset_matches(self, offset: int | None) -> bool:
        if self.from_offset is None and self.to_offset is None:
            return True
        if offset is None:
            return False
        return (self.from_offset or 0) <= offset and (self.to_offset is None or offset < self.to_offset)


@dataclass(slots=True)
class Snapshot:
    """Snapshot of the dead letters for one command: end offsets of the topic `dead-letters`, after which no letter is
    read, and all decisions of operators.
    """

    ends: Mapping[int, int]
    decisions: Mapping[str, tuple[DeadLetterDecision, ...]]
    unreadable: dict[str, str] = field(default_factory=dict)
    """Records on `dead-letters` that could not be parsed: position to problem."""


async def read_snapshot(topics: Topics) -> Snapshot:
    """Read the operators' decisions about dead letters so far, and the present end offsets of the topic `dead-letters`.

    Letters that arrive later are not part of the snapshot.

    Raises:
        UsageError: the topics do not exist.
    """
    ends = (await topics.ends([DeadLetter.topic]))[DeadLetter.topic]
    by_letter: dict[str, dict[str, DeadLetterDecision]] = collections.defaultdict(dict)
    if await topics.partitions(DeadLetterDecision.topic):  # the bus of an older release does not have the topic
        async for entry in topics.read(Range(DeadLetterDecision.topic)):
            if isinstance(entry.event, DeadLetterDecision):
                by_letter[entry.event.dead_letter_id].setdefault(entry.event.event_id, entry.event)
    decisions = {
        name: tuple(sorted(events.values(), key=lambda decision: decision.number)) for name, events in by_letter.items()
    }
    return Snapshot(ends, decisions)


async def read(topics: Topics, selection: Selection, at: Snapshot) -> AsyncIterator[Letter]:
    """Yield each dead letter in the snapshot `at` that matches `selection`, in the order of its partition."""
    seen_ids: set[str] = set()
    async for entry in topics.read(Range(DeadLetter.topic), ends=at.ends):
        if not isinstance(entry.event, DeadLetter):
            at.unreadable[f"{entry.topic}[{entry.partition}]@{entry.offset}"] = entry.problem or "no dead letter"
            continue
        letter = Letter(entry.event, at.decisions.get(entry.event.event_id, ()))
        if letter.id not in seen_ids and selection.matches(letter):
            seen_ids.add(letter.id)
            yield letter


def check_ids(selection: Selection, ids: Collection[str]) -> None:
    """Check that every id in `selection`, which may be shortened, is the beginning of exactly one of `ids`.

    Raises:
        UsageError: a selected id matches none or several.
    """
    for name in selection.ids:
        matches = sorted(letter_id for letter_id in ids if letter_id.startswith(name))
        if not matches:
            kind = f"{' or '.join(selection.states)} dead letter" if selection.states else "dead letter"
            raise UsageError(f"no {kind} has an id that begins with {name!r}")
        if len(matches) > 1:
            raise UsageError(f"{len(matches)} dead letters have ids that begin with {name!r}: {', '.join(matches[:5])}")


def as_json(letter: Letter, *, with_value: bool = False) -> dict[str, Any]:
    """Return all fields of a letter as JSON values.

    Args:
        letter: the letter.
        with_value: add the refused bytes in base64 and, if they are JSON, as JSON.
    """
    fields: dict[str, Any] = {"id": letter.id, "state": letter.state, "retry_of": letter.retry_of}
    fields |= letter.letter.model_dump(mode="json", exclude_none=True, exclude={"value_base64"})
    fields["decisions"] = [decision.model_dump(mode="json", exclude_none=True) for decision in letter.decisions]
    if with_value:
        fields["value_base64"] = letter.letter.value_base64
        with contextlib.suppress(ValueError, RecursionError):
            fields["value"] = json.loads(letter.letter.value)
    return fields


def count_letters(letters: Iterable[Letter]) -> list[dict[str, Any]]:
    """Return groups of letters by service, topic, reason and state, with their number and first and last time.

    The largest group is first.
    """
    groups: dict[tuple[str, str, str], list[Letter]] = collections.defaultdict(list)
    for letter in letters:
        groups[letter.letter.service, letter.letter.source_topic, letter.letter.reason].append(letter)
    rows = []
    for (service, topic, reason), members in groups.items():
        states = collections.Counter(letter.state for letter in members)
        times = sorted(letter.letter.time for letter in members)
        rows.append(
            {
                "service": service, "topic": topic, "reason": reason, "total": len(members),
                "open": states["open"], "retried": states["retried"], "discarded": states["discarded"],
                "first": times[0].isoformat(), "last": times[-1].isoformat(),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: (-row["total"], row["service"], row["topic"], row["reason"]))


def decode_value(value: bytes) -> str:
    """Return the refused bytes as text: JSON indented, other text unchanged, and anything else in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        prefix = value[:_HEX_BYTES_MAX]
        lines = [f"{at:08x}  {prefix[at : at + 16].hex(' ')}" for at in range(0, len(prefix), 16)]
        return "\n".join([*lines, *([f"... {len(value)} bytes in total"] if len(value) > len(prefix) else [])])
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return escape_control_characters(text)


def escape_control_characters(text: str) -> str:
    """Return `text` with control characters escaped, because a refused record may contain anything."""
    return printable_lines(text, len(text))


_SOURCE = "headrace/dead-letters"
_GROUP_SIZE_MAX = 50
Report = Callable[[int, int], None]


@dataclass(slots=True)
class Plan:
    """The letters that an action applies to, without the refused bytes, and those that it cannot apply to."""

    at: Snapshot
    chosen: dict[str, Letter] = field(default_factory=dict)
    not_retriable: dict[str, tuple[Letter, str]] = field(default_factory=dict)
    """Letters that cannot be retried, with the reason."""


async def plan(
    topics: Topics, action: Literal["retry", "discard"], selection: Selection, *, force: bool = False
) -> Plan:
    """Select the letters of `selection` to retry or discard, and those that cannot be retried. Nothing is published.

    Args:
        topics: connection to the bus.
        action: the planned action.
        selection: the letters to consider.
        force: retry also letters that would be refused again.

    Raises:
        UsageError: an id matches no letter or several letters.
    """
    result = Plan(await read_snapshot(topics))
    async for letter in read(topics, selection, result.at):
        problem = await retry_problem(letter, force=force) if action == "retry" else None
        if problem is None:
            result.chosen[letter.id] = letter.without_value()
        else:
            result.not_retriable[letter.id] = letter.without_value(), problem
    check_ids(selection, [*result.chosen, *result.not_retriable])
    return result


async def retry_problem(letter: Letter, *, force: bool = False) -> str | None:
    """Return the reason why a letter cannot be retried, or None if it can.

    Args:
        letter: the letter.
        force: whether to retry a letter even if its record would be refused again.
    """
    problem = permanent_problem(letter.letter)
    if problem is not None:
        return problem
    if force:
        return None
    try:
        await _parse_event(letter)
    except (HeadraceError, OSError, ValueError) as error:
        return f"would be refused again: {error}"
    return None


async def retry(bus: str, plan: Plan, by: str, report: Report = lambda _completed, _total: None) -> None:
    """Publish the records of `plan.chosen` again with key, headers and partition, and record the decisions in groups.

    After a crash, letters may still be open whose records were published; when they are retried again, consumers
    recognize the ids.
    """
    await _publish_decisions(bus, plan, lambda letter: _decision(letter, "retried", None, by), report)


async def discard(bus: str, plan: Plan, reason: str, by: str, report: Report = lambda _completed, _total: None) -> None:
    """Record that the letters of `plan.chosen` will not be retried."""
    await _publish_decisions(bus, plan, lambda letter: _decision(letter, "discarded", reason, by), report)


async def _publish_decisions(
    bus: str, plan: Plan, decide: Callable[[Letter], DeadLetterDecision], report: Report
) -> None:
    if not plan.chosen:
        return
    async with connected(bus) as topics, producing(bus) as producer:
        if not await topics.partitions(DeadLetterDecision.topic):
            raise UsageError(f"topic {DeadLetterDecision.topic!r} does not exist yet; start a service of this release")
        source_topics = {letter.letter.source_topic for letter in plan.chosen.values()}
        partitions = {topic: await topics.partitions(topic) for topic in source_topics}
        published = 0
        async for group in _read_groups(topics, plan):
            decisions = [decide(letter) for letter in group]
            if decisions[0].action == "retried":
                records = [await _restore_record(letter, partitions[letter.letter.source_topic]) for letter in group]
                await producer.send(records)
            await producer.send([Outgoing.of(decision, _SOURCE) for decision in decisions])
            published += len(group)
            report(published, len(plan.chosen))


async def _read_groups(topics: Topics, plan: Plan) -> AsyncIterator[list[Letter]]:
    group: list[Letter] = []
    async for letter in read(topics, Selection(ids=tuple(plan.chosen)), plan.at):
        group.append(letter)
        if len(group) == _GROUP_SIZE_MAX:
            yield group
            group = []
    if group:
        yield group


async def _restore_record(letter: Letter, partitions: tuple[int, ...]) -> Outgoing:
    """Return the refused record, ready to be published on its source topic.

    A record without a key, such as one that was refused before it was published, gets the key of its event.

    Raises:
        UsageError: the source topic does not exist.
    """
    record = letter.letter
    if not partitions:
        raise UsageError(f"letter {letter.id}: its topic {record.source_topic!r} does not exist")
    partition = record.source_partition if record.source_partition in partitions else None
    key = record.source_key.encode() if record.source_key else None
    if key is None and partition is None:
        with contextlib.suppress(HeadraceError, OSError, ValueError):  # forced: a value that is no event has no key
            key = (await _parse_event(letter)).key.encode()
    headers = retry_headers(record, keeps_partition=partition is not None)
    return Outgoing(record.source_topic, key, record.value, headers, partition)


async def _parse_event(letter: Letter) -> Event:
    headers = [(name, text.encode()) for name, text in letter.letter.headers.items()]
    return await event_of(letter.letter.source_topic, letter.letter.value, headers)


def _decision(
    letter: Letter, action: Literal["retried", "discarded"], reason: str | None, by: str
) -> DeadLetterDecision:
    return DeadLetterDecision(
        time=utcnow(), dead_letter_id=letter.id, number=len(letter.decisions) + 1, action=action, reason=reason, by=by
    )

"""Reading of dead letters together with the decisions about them, and their rendering as JSON and as text."""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from headrace.errors import UsageError
from headrace.topics import Range, Topics
from headrace_schemas import DeadLetter, DeadLetterDecision
from headrace_schemas.events.dead_letter import RETRY_HEADER
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
        """Id of the letter whose retry failed with this letter; None if this is not the result of a retry."""
        return self.letter.headers.get(RETRY_HEADER)

    @property
    def position(self) -> str:
        """Position of the record as `topic[partition]@offset`; the topic alone if the record never was on it."""
        letter = self.letter
        partition = f"[{letter.source_partition}]" if letter.source_partition is not None else ""
        return (
            letter.source_topic + partition + (f"@{letter.source_offset}" if letter.source_offset is not None else "")
        )

    def without_value(self) -> Letter:
        """Return the letter without the refused bytes, so that many letters fit into memory."""
        return Letter(self.letter.model_copy(update={"value_base64": ""}), self.decisions)


@dataclass(frozen=True, slots=True)
class Selection:
    """Filter of dead letters. An empty field matches all letters; offsets and partitions are those of the record."""

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
    def chooses(self) -> bool:
        """Whether any field but the state is set."""
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
class Cut:
    """End offsets of `dead-letters` and all decisions at one moment; later letters are not read."""

    ends: Mapping[int, int]
    decisions: Mapping[str, tuple[DeadLetterDecision, ...]]
    unreadable: dict[str, str] = field(default_factory=dict)
    """Records on `dead-letters` that could not be parsed: position to problem."""


async def read_cut(topics: Topics) -> Cut:
    """Read the present end offsets and decisions.

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
    return Cut(ends, decisions)


async def read(topics: Topics, selection: Selection, at: Cut) -> AsyncIterator[Letter]:
    """Yield each letter of `selection` once, in the order of each partition."""
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
    """Check that every selected id is the prefix of exactly one of `ids`.

    Raises:
        UsageError: an id matches none or several.
    """
    for name in selection.ids:
        matches = sorted(letter_id for letter_id in ids if letter_id.startswith(name))
        if not matches:
            kind = f"{' or '.join(selection.states)} dead letter" if selection.states else "dead letter"
            raise UsageError(f"no {kind} has an id that begins with {name!r}")
        if len(matches) > 1:
            raise UsageError(f"{len(matches)} dead letters have ids that begin with {name!r}: {', '.join(matches[:5])}")


def as_json(letter: Letter, *, with_value: bool = False) -> dict[str, Any]:
    """Return all fields of a letter. `with_value` adds the refused bytes in base64 and, if they are JSON, parsed."""
    fields: dict[str, Any] = {"id": letter.id, "state": letter.state, "retry_of": letter.retry_of}
    fields |= letter.letter.model_dump(mode="json", exclude_none=True, exclude={"value_base64"})
    fields["decisions"] = [decision.model_dump(mode="json", exclude_none=True) for decision in letter.decisions]
    if with_value:
        fields["value_base64"] = letter.letter.value_base64
        with contextlib.suppress(ValueError, RecursionError):
            fields["value"] = json.loads(letter.letter.value)
    return fields


def count_letters(letters: Iterable[Letter]) -> list[dict[str, Any]]:
    """Return the number of letters by service, topic, reason and state, with the first and last time; largest first."""
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
    """Render the refused bytes: JSON indented, other text unchanged, anything else in hexadecimal."""
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

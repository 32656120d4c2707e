"""Retries dead letters by putting their records back onto their topics, or discards them. Either is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import HeadraceError, UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import Topics, connected, event_of
from headrace_operations.dead_letters.reading import Cut, Letter, Selection, check_ids, cut, read
from headrace_schemas import DeadLetterDecision, Event
from headrace_schemas.base import utcnow
from headrace_schemas.envelope import SEQUENCE_HEADER
from headrace_schemas.events.dead_letter_decision import RETRY_HEADER

TABLES = frozenset({"replicas", "routing"})
"""Compacted topics: an old record that is put back would replace the newest one."""
_CLOSED = frozenset({("collector", "invalid_trajectory")})
"""Records of these had their effect before they were refused. Put back, they would count as duplicates."""
_SOURCE = "headrace/dead-letters"
_AT_ONCE_MAX = 50
_KEY_LENGTH_MAX = 512
Report = Callable[[int, int], None]


@dataclass(slots=True)
class Plan:
    """What is going to happen. Letters are kept here without the bytes that were refused."""

    at: Cut
    chosen: dict[str, Letter] = field(default_factory=dict)
    held_back: dict[str, tuple[Letter, str]] = field(default_factory=dict)
    """Letters that cannot be retried, with the reason."""


async def plan(topics: Topics, action: Literal["retry", "discard"], wanted: Selection, *, force: bool = False) -> Plan:
    """Which letters of `wanted` are retried or discarded, and which are not and why. Changes nothing.

    `force` retries also what would be refused again as far as can be seen here. Raises `UsageError`.
    """
    made = Plan(await cut(topics))
    async for one in read(topics, wanted, made.at):
        problem = await obstacle(one, force=force) if action == "retry" else None
        if problem is None:
            made.chosen[one.id] = one.without_value()
        else:
            made.held_back[one.id] = one.without_value(), problem
    check_ids(wanted, [*made.chosen, *made.held_back])
    return made


async def obstacle(one: Letter, *, force: bool = False) -> str | None:
    """Why a letter cannot be put back as it was, None when it can."""
    letter = one.letter
    if letter.source_topic in TABLES:
        return f"{letter.source_topic} is a table: its producer publishes the newest row again, an old one would win"
    if (letter.service, letter.reason) in _CLOSED:
        return "its session is closed; what is wrong with it can only be mended by a replay"
    key = letter.source_key or ""
    if "\ufffd" in key or len(key) >= _KEY_LENGTH_MAX:
        return "its key was no text, or longer than a letter keeps"
    if force:
        return None
    try:
        await _event(one)
    except (HeadraceError, OSError, ValueError) as error:
        return f"would be refused again: {error}"
    return None


async def retry(bus: str, made: Plan, by: str, report: Report = lambda _done, _all: None) -> None:
    """Put the records of `made.chosen` back, with key, headers and partition, and say so; a bounded number at once.

    A crash leaves letters open whose records are back; retried again, consumers know their ids.
    """
    await _carry_out(bus, made, lambda one: _decision(one, "retried", None, by), report)


async def discard(bus: str, made: Plan, reason: str, by: str, report: Report = lambda _done, _all: None) -> None:
    """Record that nobody will do anything about the letters of `made.chosen`."""
    await _carry_out(bus, made, lambda one: _decision(one, "discarded", reason, by), report)


async def _carry_out(bus: str, made: Plan, decide: Callable[[Letter], DeadLetterDecision], report: Report) -> None:
    if not made.chosen:
        return
    async with connected(bus) as topics, producing(bus) as producer:
        if not await topics.partitions(DeadLetterDecision.topic):
            raise UsageError(f"there is no topic {DeadLetterDecision.topic!r} yet; start one service of this release")
        known = {one.letter.source_topic for one in made.chosen.values()}
        partitions = {topic: await topics.partitions(topic) for topic in known}
        done = 0
        async for some in _in_groups(topics, made):
            decisions = [decide(one) for one in some]
            if decisions[0].action == "retried":
                await producer.send([await _original(one, partitions[one.letter.source_topic]) for one in some])
            await producer.send([Outgoing.of(one, _SOURCE) for one in decisions])
            done += len(some)
            report(done, len(made.chosen))


async def _in_groups(topics: Topics, made: Plan) -> AsyncIterator[list[Letter]]:
    group: list[Letter] = []
    async for one in read(topics, Selection(ids=tuple(made.chosen)), made.at):
        group.append(one)
        if len(group) == _AT_ONCE_MAX:
            yield group
            group = []
    if group:
        yield group


async def _original(one: Letter, partitions: tuple[int, ...]) -> Outgoing:
    """The record as it was. What never was on a topic goes to where its event belongs. Raises `UsageError`."""
    letter = one.letter
    if not partitions:
        raise UsageError(f"letter {one.id}: there is no topic {letter.source_topic!r} to put it back on")
    partition = letter.source_partition if letter.source_partition in partitions else None
    key = letter.source_key.encode() if letter.source_key else None
    if key is None and partition is None:
        with contextlib.suppress(HeadraceError, OSError, ValueError):  # forced: no event, so no place of its own
            key = (await _event(one)).key.encode()
    headers = [(name, text.encode()) for name, text in letter.headers.items() if name != RETRY_HEADER]
    marked = [*headers, (RETRY_HEADER, one.id.encode())]
    if partition is not None and letter.source_offset is not None and SEQUENCE_HEADER not in letter.headers:
        marked.append((SEQUENCE_HEADER, str(letter.source_offset).encode()))  # what was said after it stays after it
    return Outgoing(letter.source_topic, key, letter.value, tuple(marked), partition)


async def _event(one: Letter) -> Event:
    headers = [(name, text.encode()) for name, text in one.letter.headers.items()]
    return await event_of(one.letter.source_topic, one.letter.value, headers)


def _decision(one: Letter, action: Literal["retried", "discarded"], reason: str | None, by: str) -> DeadLetterDecision:
    return DeadLetterDecision(
        time=utcnow(), dead_letter_id=one.id, number=len(one.decisions) + 1, action=action, reason=reason, by=by
    )

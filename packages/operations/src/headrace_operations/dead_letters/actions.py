"""Retrying and discarding of dead letters. Both are recorded as decisions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import HeadraceError, UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import Topics, connected, event_of
from headrace_operations.dead_letters.reading import Cut, Letter, Selection, check_ids, read, read_cut
from headrace_schemas import DeadLetterDecision, Event
from headrace_schemas.rules.training import permanent_problem, retry_headers
from headrace_schemas.values.base import utcnow

_SOURCE = "headrace/dead-letters"
_GROUP_SIZE_MAX = 50
Report = Callable[[int, int], None]


@dataclass(slots=True)
class Plan:
    """The letters that an action applies to. Letters are stored without the refused bytes."""

    at: Cut
    chosen: dict[str, Letter] = field(default_factory=dict)
    held_back: dict[str, tuple[Letter, str]] = field(default_factory=dict)
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
    result = Plan(await read_cut(topics))
    async for letter in read(topics, selection, result.at):
        problem = await retry_problem(letter, force=force) if action == "retry" else None
        if problem is None:
            result.chosen[letter.id] = letter.without_value()
        else:
            result.held_back[letter.id] = letter.without_value(), problem
    check_ids(selection, [*result.chosen, *result.held_back])
    return result


async def retry_problem(letter: Letter, *, force: bool = False) -> str | None:
    """Return why a letter cannot be retried; None if it can."""
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
    """Return the refused record as it was. A record that never was on a topic gets the key of its event.

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

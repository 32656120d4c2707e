"""Turns records of the topics into experiences to train on: copied, or scored again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from headrace.errors import HeadraceError, UsageError
from headrace.topics import Entry, Range, connected, event_of, fetch
from headrace_operations.replay.journal import Journal
from headrace_operations.replay.partition_merge import PartitionMerge, opened
from headrace_operations.replay.program import Program, started
from headrace_operations.replay.report import Report
from headrace_operations.replay.request import Request
from headrace_schemas import Event, Experience, Feedback, Reward, Trajectory
from headrace_schemas.blobs import BlobRef
from headrace_schemas.envelope import DATAREF_HEADER, Envelope, is_blob_reference
from headrace_schemas.records import parse_record
from headrace_schemas.replay import ClosedLine, FeedbackLine, JudgedLine, ScoredLine

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord

_TICK = 200


class _OfModel(BaseModel):
    """What has to be known of an experience to leave it out."""

    model: str


@dataclass(frozen=True, slots=True)
class Item:
    """An experience as it goes into the copy. `whole` is its JSON also where the record only refers to it."""

    value: bytes
    whole: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    cuts: tuple[int, ...] = ()
    """After it the original lineage cut batches of so many, in order."""
    left_out: tuple[str, ...] = ()
    """Experiences that the original lineage left out of these batches."""

    def with_cuts(self, cuts: tuple[int, ...], left_out: tuple[str, ...]) -> Item:
        """Return the item with more batches that were cut after it."""
        return replace(self, cuts=(*self.cuts, *cuts), left_out=(*self.left_out, *left_out))


Sink = Callable[[Item], Awaitable[None]]
Tick = Callable[[str, int, int], None]
"""Hears what is being done, how far it is and how far it will go."""


def decide(request: Request, report: Report, journal: Journal, merge: PartitionMerge) -> None:
    """Whether batches are cut where they once were, which only a replay of everything can do. Raises `UsageError`."""
    reason = "rewards are made again" if request.rescored else journal.gap
    if reason is None and not request.whole:
        reason = "only a part of the topic is replayed"
    if reason is None and merge.truncated:
        reason = "the topic does not reach back to its beginning any more"
    if request.cut == "rules":
        report.cut_because = "as it was asked for"
    elif reason is None:
        report.cut, report.cut_because = "recorded", f"the journal of lineage {request.of} is whole"
    elif request.cut == "recorded":
        raise UsageError(f"--cut recorded: {reason}; leave it out, or use --cut rules")
    else:
        report.cut_because = reason


@dataclass(slots=True)
class Pipeline:
    """One replay's reading. `store`: what is too large for a topic may go to the blob store."""

    request: Request
    report: Report
    sink: Sink
    tick: Tick
    store: bool = False

    async def run(self, merge: PartitionMerge, journal: Journal) -> None:
        self.report.read = merge.total
        if self.request.rescored:
            await self._rescored(merge)
        else:
            await self._taken_over(merge, journal)

    async def _taken_over(self, merge: PartitionMerge, journal: Journal) -> None:
        recorded = self.report.cut == "recorded"
        known = not journal.gap and not merge.truncated
        waiting: Item | None = None
        passed = 0
        async for place in merge.as_read(journal.stretches) if known else merge.by_time():
            passed += 1
            if passed % _TICK == 0:
                self.tick("copying experiences", merge.passed, merge.total)
            cuts, left_out = (place.cuts, place.left_out) if recorded else ((), ())
            item = await self._item(place.record)
            if item is None:  # it takes part in nothing, but the batches that were cut after it were cut
                waiting = waiting.with_cuts(cuts, left_out) if waiting else None
                continue
            if waiting is not None:
                await self._pass_on(waiting)
            waiting = item.with_cuts(cuts, left_out)
        if waiting is not None:
            await self._pass_on(waiting)
        self.tick("copying experiences", merge.total, merge.total)

    async def _item(self, record: ConsumerRecord) -> Item | None:
        event = await self._selected(record, self.report)
        if not isinstance(event, Experience):
            return None
        if event.model != self.request.model:
            self.report.other_models += 1
            return None
        self.report.kinds[event.no_reward or "rewarded"] += 1
        whole = event.to_json() if is_blob_reference(record.headers) else record.value
        return Item(record.value, whole, record.key, tuple(record.headers))

    async def _pass_on(self, item: Item) -> None:
        self.report.experiences += 1
        await self.sink(item)

    async def _selected(self, record: ConsumerRecord, report: Report) -> Event | None:
        """The record's event when it is one and is wanted."""
        try:
            event = await event_of(self.request.wanted.topic, record.value, record.headers)
        except (HeadraceError, OSError):
            report.unreadable += 1
            return None
        took_part = versions_of(event)
        if took_part and self.request.versions and not self.request.versions.intersection(took_part):
            return None  # what no version took part in, a withdrawal perhaps, may be about what is wanted
        report.selected += 1
        report.versions.update(took_part)
        return event

    async def _rescored(self, merge: PartitionMerge) -> None:
        rewards = await self._judged() if self.request.judge else []
        async with started("scorer", self.request.environ()) as program:
            await side_by_side(self._feed_scorer(program, merge, rewards), self._drain_scorer(program))

    async def _feed_scorer(self, program: Program, merge: PartitionMerge, rewards: list[bytes]) -> None:
        if self.store:
            await program.feed("store", b"{}")
        await self._feed_what_was_said(program)
        for reward in rewards:
            await program.feed("reward", reward)
        passed = 0
        async for value in self._trajectories(merge, self.report):
            await program.feed("trajectory", value)
            passed += 1
            if passed % _TICK == 0:
                self.tick("scoring trajectories", merge.passed, merge.total)
        program.close()
        self.tick("scoring trajectories", merge.total, merge.total)

    async def _feed_what_was_said(self, program: Program) -> None:
        """Feedback, others' rewards, and, where feedback is about sessions, when their trajectories were closed."""
        about_sessions = False
        keys = self.request.wanted.keys
        async with connected(self.request.bus) as topics:
            async for entry in topics.read(Range(Feedback.topic)):
                if isinstance(entry.event, Feedback) and (not keys or entry.key in keys or entry.event.level == "task"):
                    about_sessions = about_sessions or not entry.event.msg_ids
                    await program.feed("feedback", _heard(entry, entry.event).model_dump_json().encode())
            async for entry in topics.read(Range(Reward.topic, keys=keys)):
                if isinstance(entry.event, Reward) and self._counts(entry.event):
                    await program.feed("reward", entry.event.to_json())
            if about_sessions:
                async for entry in topics.read(Range(Trajectory.topic, keys=keys)):
                    await _feed_closed(program, entry)

    def _counts(self, reward: Reward) -> bool:
        """Whether a verdict on the topic is taken over: not where it is about to be made again."""
        return not (self.request.judge and reward.source.startswith("judge:"))

    async def _trajectories(self, merge: PartitionMerge, report: Report) -> AsyncIterator[bytes]:
        """JSON of those that are wanted; looked into only where that is needed, because it costs the most."""
        looks = bool(self.request.versions) or not self.store
        async for place in merge.by_time():
            record = place.record
            if looks:
                event = await self._selected(record, report)
                if event is not None:
                    yield event.to_json()
            elif record.value is not None:
                report.selected += 1
                _, found = parse_record(self.request.wanted.topic, record.value, record.headers)
                yield await asyncio.to_thread(fetch, found) if isinstance(found, BlobRef) else found

    async def _drain_scorer(self, program: Program) -> None:
        async for word, value in program.lines():
            if word == "scored":
                self.report.scored = ScoredLine.model_validate_json(value)
                self.report.kinds.update(self.report.scored.experiences)
            elif word == "stored":
                uri = BlobRef.model_validate_json(value).uri.encode()
                await self._pass_on(Item(value, value, headers=((DATAREF_HEADER, uri),)))
            elif _OfModel.model_validate_json(value).model == self.request.model:
                await self._pass_on(Item(value, value))
            else:
                self.report.other_models += 1

    async def _judged(self) -> list[bytes]:
        """What the judge says of the trajectories, as rewards."""
        rewards: list[bytes] = []

        async def drain(program: Program) -> None:
            async for word, value in program.lines():
                if word == "judged":
                    self.report.judged = JudgedLine.model_validate_json(value)
                else:
                    rewards.append(value)
                    self.tick("judging trajectories", len(rewards), self.report.read)

        async def feed(program: Program, merge: PartitionMerge) -> None:
            uncounted = Report(self.report.lineage, self.report.of, self.report.source)
            async for value in self._trajectories(merge, uncounted):
                await program.feed("trajectory", value)
            program.close()

        async with (
            opened(self.request.bus, self.request.wanted) as merge,
            started("judge", self.request.environ()) as program,
        ):
            await side_by_side(feed(program, merge), drain(program))
        return rewards


def _heard(entry: Entry, event: Feedback) -> FeedbackLine:
    after = Envelope.read(entry.headers, event).after or {}
    return FeedbackLine(
        event=event.model_dump(mode="json"),
        place=entry.sequence,
        turns_until=after.get("turns"),
        trajectories_until=after.get("trajectories"),
    )


async def _feed_closed(program: Program, entry: Entry) -> None:
    event = entry.event
    if isinstance(event, Trajectory):
        closed = ClosedLine(
            trajectory_id=event.trajectory_id,
            session_key=event.session_key,
            tenant=event.tenant,
            time_ms=round(event.time.timestamp() * 1000),
            place=entry.sequence,
            began=event.turns_from,
            partition=entry.partition,
        )
        await program.feed("closed", closed.model_dump_json().encode())


def versions_of(event: Event) -> tuple[str, ...]:
    """Every version that took part in what the event is about."""
    if isinstance(event, Trajectory):
        return event.versions
    if isinstance(event, Experience) and event.branch is not None:
        return tuple(dict.fromkeys(span.version for span in event.branch.spans))
    return ()


async def side_by_side(*works: Coroutine[Any, Any, None]) -> None:
    """All to their end, or the failure that explains the others: a broken pipe explains nothing."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        found = failures.exceptions
        raise next((one for one in found if not isinstance(one, ConnectionError)), found[0]) from None

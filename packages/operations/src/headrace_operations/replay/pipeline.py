"""Conversion of topic records to experiences for training: experiences are copied, or trajectories are scored again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from headrace.errors import HeadraceError, UsageError
from headrace.topics import Entry, Range, connected, event_of, fetch
from headrace_operations.replay.partition_merge import Journal, PartitionMerge, open_merge
from headrace_operations.replay.program import Program, start_program
from headrace_operations.replay.request import Report, Request
from headrace_schemas import Event, Experience, Feedback, Reward, Trajectory
from headrace_schemas.events.envelope import DATAREF_HEADER, Envelope, is_blob_reference, parse_record
from headrace_schemas.programs import ClosedLine, FeedbackLine, JudgedLine, ScoredLine
from headrace_schemas.values.blobs import BlobRef

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord

_TICK = 200


class _ModelField(BaseModel):
    """Parser that reads only the model's name from an experience."""

    model: str


@dataclass(frozen=True, slots=True)
class Item:
    """An experience for the topic of the replay.

    `event_json` is its content, also if the record refers to the blob store.
    """

    value: bytes
    event_json: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    cuts: tuple[int, ...] = ()
    """Sizes of the batches that the original lineage cut after the experience, in order."""
    left_out: tuple[str, ...] = ()
    """Experiences that the original lineage left out of these batches."""

    def with_cuts(self, cuts: tuple[int, ...], left_out: tuple[str, ...]) -> Item:
        """Return the item with further batches that the original lineage formed after it and before the next item.

        Args:
            cuts: number of experiences of each of these batches, added to `Item.cuts`.
            left_out: ids of the experiences that were left out of them, added to `Item.left_out`.
        """
        return replace(self, cuts=(*self.cuts, *cuts), left_out=(*self.left_out, *left_out))


Sink = Callable[[Item], Awaitable[None]]
Tick = Callable[[str, int, int], None]
"""Called with the activity, the completed amount and the total amount."""


def choose_cut(request: Request, report: Report, journal: Journal, merge: PartitionMerge) -> None:
    """Choose where a replay cuts batches: as recorded in the journal of the original lineage, or by the present
    settings.

    The choice and its reason are stored in `report`. The recorded cuts can be used only if the complete topic is
    replayed.

    Raises:
        UsageError: recorded cuts are required but not possible.
    """
    reason = "the rewards are computed again" if request.is_rescored else journal.gap
    if reason is None and not request.is_complete:
        reason = "only a part of the topic is replayed"
    if reason is None and merge.truncated:
        reason = "retention has deleted the beginning of the topic"
    if request.cut == "rules":
        report.cut_because = "as requested"
    elif reason is None:
        report.cut, report.cut_because = "recorded", f"the journal of lineage {request.of} is complete"
    elif request.cut == "recorded":
        raise UsageError(f"--cut recorded: {reason}; omit the option, or use --cut rules")
    else:
        report.cut_because = reason


@dataclass(slots=True)
class Pipeline:
    """First step of a replay: it reads the records of the range and passes experiences to `sink`.

    If `store` is true, the scorer writes large experiences to the blob store.
    """

    request: Request
    report: Report
    sink: Sink
    tick: Tick
    store: bool = False

    async def run(self, merge: PartitionMerge, journal: Journal) -> None:
        """Read all records and pass the experiences to the sink."""
        self.report.read = merge.total
        if self.request.is_rescored:
            await self._rescore(merge)
        else:
            await self._copy(merge, journal)

    async def _copy(self, merge: PartitionMerge, journal: Journal) -> None:
        recorded = self.report.cut == "recorded"
        has_order = not journal.gap and not merge.truncated
        pending: Item | None = None
        passed = 0
        async for merged in merge.in_recorded_order(journal.ranges) if has_order else merge.in_time_order():
            passed += 1
            if passed % _TICK == 0:
                self.tick("copying experiences", merge.passed, merge.total)
            cuts, left_out = (merged.cuts, merged.left_out) if recorded else ((), ())
            item = await self._item(merged.record)
            if item is None:  # the batches that were cut after a skipped record still count
                pending = pending.with_cuts(cuts, left_out) if pending else None
                continue
            if pending is not None:
                await self._emit(pending)
            pending = item.with_cuts(cuts, left_out)
        if pending is not None:
            await self._emit(pending)
        self.tick("copying experiences", merge.total, merge.total)

    async def _item(self, record: ConsumerRecord) -> Item | None:
        event = await self._select(record, self.report)
        if not isinstance(event, Experience):
            return None
        if event.model != self.request.model:
            self.report.other_models += 1
            return None
        self.report.kinds[event.no_reward or "rewarded"] += 1
        event_json = event.to_json() if is_blob_reference(record.headers) else record.value
        return Item(record.value, event_json, record.key, tuple(record.headers))

    async def _emit(self, item: Item) -> None:
        self.report.experiences += 1
        await self.sink(item)

    async def _select(self, record: ConsumerRecord, report: Report) -> Event | None:
        """Return the event of a record if it can be parsed and is selected."""
        try:
            event = await event_of(self.request.topic_range.topic, record.value, record.headers)
        except (HeadraceError, OSError):
            report.unreadable += 1
            return None
        took_part = event_versions(event)
        if took_part and self.request.versions and not self.request.versions.intersection(took_part):
            return None  # an event without versions, such as a withdrawal, may be about a selected one
        report.selected += 1
        report.versions.update(took_part)
        return event

    async def _rescore(self, merge: PartitionMerge) -> None:
        rewards = await self._judge() if self.request.judge else []
        async with start_program("scorer", self.request.environ()) as program:
            await run_together(self._feed_scorer(program, merge, rewards), self._drain_scorer(program))

    async def _feed_scorer(self, program: Program, merge: PartitionMerge, rewards: list[bytes]) -> None:
        if self.store:
            await program.feed("store", b"{}")
        await self._feed_feedback(program)
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

    async def _feed_feedback(self, program: Program) -> None:
        """Send the stored feedback and rewards to the scorer's program, which computes the rewards of its own sources.

        The rewards are those on the topic `rewards`, for example from the judge. If feedback is about sessions, the
        scorer also needs the times of their trajectories.
        """
        about_sessions = False
        keys = self.request.topic_range.keys
        async with connected(self.request.bus) as topics:
            async for entry in topics.read(Range(Feedback.topic)):
                if isinstance(entry.event, Feedback) and (not keys or entry.key in keys or entry.event.level == "task"):
                    about_sessions = about_sessions or not entry.event.msg_ids
                    await program.feed("feedback", _feedback_line(entry, entry.event).model_dump_json().encode())
            async for entry in topics.read(Range(Reward.topic, keys=keys)):
                if isinstance(entry.event, Reward) and self._is_replayed(entry.event):
                    await program.feed("reward", entry.event.to_json())
            if about_sessions:
                async for entry in topics.read(Range(Trajectory.topic, keys=keys)):
                    await _feed_closed_trajectory(program, entry)

    def _is_replayed(self, reward: Reward) -> bool:
        """Return whether a reward on the topic `rewards` is sent to the scorer.

        Rewards of the judge are not sent if the replay runs the judge again.
        """
        return not (self.request.judge and reward.source.startswith("judge:"))

    async def _trajectories(self, merge: PartitionMerge, report: Report) -> AsyncIterator[bytes]:
        """Yield the selected trajectories as JSON.

        They are parsed only if the selection requires it, because parsing is slow.
        """
        parse = bool(self.request.versions) or not self.store
        async for merged in merge.in_time_order():
            record = merged.record
            if parse:
                event = await self._select(record, report)
                if event is not None:
                    yield event.to_json()
            elif record.value is not None:
                report.selected += 1
                _, payload = parse_record(self.request.topic_range.topic, record.value, record.headers)
                yield await asyncio.to_thread(fetch, payload) if isinstance(payload, BlobRef) else payload

    async def _drain_scorer(self, program: Program) -> None:
        async for word, value in program.lines():
            if word == "scored":
                self.report.scored = ScoredLine.model_validate_json(value)
                self.report.kinds.update(self.report.scored.experiences)
            elif word == "stored":
                uri = BlobRef.model_validate_json(value).uri.encode()
                await self._emit(Item(value, value, headers=((DATAREF_HEADER, uri),)))
            elif _ModelField.model_validate_json(value).model == self.request.model:
                await self._emit(Item(value, value))
            else:
                self.report.other_models += 1

    async def _judge(self) -> list[bytes]:
        """Run the judge's program on the selected trajectories, and return its rewards as JSON."""
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
            open_merge(self.request.bus, self.request.topic_range) as merge,
            start_program("judge", self.request.environ()) as program,
        ):
            await run_together(feed(program, merge), drain(program))
        return rewards


def _feedback_line(entry: Entry, event: Feedback) -> FeedbackLine:
    after = Envelope.read(entry.headers, event).after or {}
    return FeedbackLine(
        event=event.model_dump(mode="json"),
        place=entry.sequence,
        turns_until=after.get("turns"),
        trajectories_until=after.get("trajectories"),
    )


async def _feed_closed_trajectory(program: Program, entry: Entry) -> None:
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


def event_versions(event: Event) -> tuple[str, ...]:
    """Return the ids of all versions that answered in the turns of an event."""
    if isinstance(event, Trajectory):
        return event.versions
    if isinstance(event, Experience) and event.branch is not None:
        return tuple(dict.fromkeys(span.version for span in event.branch.spans))
    return ()


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines to their ends.

    If several fail, raise the first error that is not a broken pipe, because another failure causes broken pipes.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        errors = failures.exceptions
        raise next((error for error in errors if not isinstance(error, ConnectionError)), errors[0]) from None

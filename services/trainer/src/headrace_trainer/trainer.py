"""The loop: read, admit, step, save, announce, one after the other, so that there is nothing to lock.

Only the step, the save and the loading of weights leave the event loop; they run in one thread, one at a time, while
the loop answers `/health`. The process may be killed at any point: what counts is what the last save holds. A clean
stop is the same thing, announced: the step in progress is abandoned, and the next start does it again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from headrace_runtime import disk
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import Clock
from headrace_runtime.errors import DiskFull, HeadraceError, InvalidEvent, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.metrics import EVENTS_HANDLED, RETRIES
from headrace_runtime.pausing import Refusing
from headrace_runtime.wire import Patience, Record
from headrace_schemas import Event, Experience, ModelEvent
from headrace_trainer.batches.cutting import left_out_of, marks_of
from headrace_trainer.experiences import exclusion
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import Waiting
from headrace_trainer.lineage.culprits import StepFailed
from headrace_trainer.lineage.lease import Lease
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import check_start, open_lineage
from headrace_trainer.lineage.saving import Save
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.metrics import OTHER_MODELS, UNCORRECTABLE
from headrace_trainer.report import Reporter, report_decision
from headrace_trainer.room import DiskRoom
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.source import Source

log = get_logger(__name__)
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
T = TypeVar("T")


class TrainingStopped(HeadraceError):
    """A limit of `[trainer.health]` was passed where nobody can say that training goes on."""


class Sink(Protocol):
    """Where announcements go; `headrace_runtime.producer.EventProducer`."""

    async def send(self, event: Event) -> None: ...


class Trainer:
    """Owns a lineage and everything that happens to it. `run` is called once."""

    def __init__(
        self,
        settings: TrainerSettings,
        blobs: BlobStore,
        source: Source,
        sink: Sink,
        refuse: Refusing,
        clock: Clock,
        reporter: Callable[[], Reporter],
        disk_free_bytes_min: int | None = None,
    ) -> None:
        self._settings = settings
        self._blobs = blobs
        self._source = source
        self._sink = sink
        self._refuse = refuse
        self._clock = clock
        self._make_reporter = reporter
        self.room = DiskRoom(blobs, clock, disk_free_bytes_min)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._saving: tuple[Save, asyncio.Task[None]] | None = None
        """The save that is not announced yet. There is one at a time."""
        self._stop = threading.Event()
        self._saved_at_s = 0.0
        self._store = LineageStore(blobs, settings.lineage)
        self._lease = Lease(self._store, clock, settings.lease_s, settings.owner_wait_s)
        self._resume = False
        self.lineage: Lineage | None = None
        """None until the saved state has been read."""

    @property
    def stands_by(self) -> bool:
        """Another process trains the lineage. That is ready too: the end of a rolling restart may wait for it."""
        return self._lease.waits

    @property
    def paused(self) -> str | None:
        """Why nothing is trained, or nothing read, until `resume`; None while both go on."""
        return "; ".join(filter(None, [self._refuse.paused, self.stopped, self.room.trouble])) or None

    @property
    def stopped(self) -> str | None:
        """Why nothing is trained. Decisions of the registry are followed all the same."""
        stop = self.lineage.health.stopped if self.lineage is not None else None
        return None if stop is None else f"training is stopped: {stop.reason}"

    @property
    def stray_rewards(self) -> str | None:
        """Return a sentence about the last rewards that were far outside the usual values of their sources."""
        strays = self.lineage.state.baselines.ranges.strays if self.lineage is not None else ()
        if not strays:
            return None
        named = "; ".join(map(str, strays[-3:]))
        return f"{named}. Send the rewards of a source in a single unit; see docs/guides/rewards.md"

    @property
    def saves(self) -> bool:
        """Whether something is being saved, or is saved and not announced yet."""
        return self._saving is not None

    @property
    def learner_failure(self) -> str | None:
        """Why what holds the weights cannot go on; the process ends because of it. None while all is well."""
        return self.lineage.learner.failure if self.lineage is not None else None

    def resume(self) -> None:
        """Go on with both; with training as soon as that is saved."""
        self._resume = self.stopped is not None
        if self._refuse.paused is not None:
            self._refuse.resume()

    async def run(self) -> None:
        """Until `max_steps`, or until cancelled. Raises when a restart, or somebody's help, is the only remedy."""
        try:
            await self._do(lambda: check_start(self._settings, self._blobs))
            await self._lease.acquire(self._do)
            await self._as_owner()
        finally:
            await self._end_thread()
            if self.lineage is not None:
                await asyncio.to_thread(self.lineage.close)

    async def _as_owner(self) -> None:
        """Train and show that we do, until one of the two ends."""
        both = [asyncio.create_task(self._work()), asyncio.create_task(self._lease.keep())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                if task.done():
                    task.result()
        finally:
            both[0].cancel()
            await asyncio.gather(both[0], return_exceptions=True)
            await self._end_thread()  # what it still saves is saved as the owner
            both[1].cancel()
            await asyncio.gather(both[1], return_exceptions=True)
            await self._lease.release()

    async def _work(self) -> None:
        lineage = await disk.with_room(lambda: self._in_thread(self._open))
        reporter = await self._in_thread(self._make_reporter)
        try:
            await self._announce(lineage.saved.checkpoint, lineage.saved.metrics)  # again, with the same ids
            await self._retry(lambda: self._source.start(lineage.state.offsets))
            if lineage.health.stopped is not None:
                reporter.stopped(lineage.health.stopped.reason, lineage.state)
            await self._train(lineage, reporter)
        finally:
            reporter.close()

    async def _end_thread(self) -> None:
        self._stop.set()
        if self._saving is not None:
            self._saving[1].cancel()
        for thread in (self._thread, self._writer):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    async def _train(self, lineage: Lineage, reporter: Reporter) -> None:
        self._saved_at_s = self._clock.monotonic_s()
        if lineage.state.moved:
            await self._save(lineage, reporter, publish=False)
        while not lineage.finished():
            lineage.check()
            for record in await self._source.poll(lineage.state.room):
                if lineage.finished():  # what nobody will train here is left for whoever goes on
                    break
                await self._receive(record, lineage, reporter)
                lineage.recorded_left_out = left_out_of(record)
                for mark in marks_of(record) or (None,):
                    await self._act(lineage, reporter, mark)  # after each one, not after however many came at once
            await self._act(lineage, reporter)
            if self._settings.until_end and not lineage.finished() and await self._retry(self._source.at_end):
                await self._finish(lineage, reporter)
                break
        if lineage.state.current is None:
            await self._save(lineage, reporter, publish=lineage.unpublished)
        await self._settle(lineage, reporter)
        log.info("finished", steps=lineage.state.steps)

    async def _finish(self, lineage: Lineage, reporter: Reporter) -> None:
        """Train what was left waiting for more, as far as it makes batches, and report all outcomes. Raises
        `TrainingStopped`: nobody is there to say that it goes on."""
        while await self._step(lineage, reporter, lineage.next_batch(over=True)):
            if lineage.save_due(0.0):
                await self._save(lineage, reporter, publish=lineage.version_due)
        if lineage.state.outcomes or lineage.state.read:
            await self._save(lineage, reporter, publish=lineage.unpublished)
        self._end_if_stopped(lineage)

    def _end_if_stopped(self, lineage: Lineage) -> None:
        if lineage.health.stopped is not None and self._settings.until_end:
            raise TrainingStopped(
                f"lineage {self._settings.lineage} has stopped training: {lineage.health.stopped.reason}; "
                "change the limit, or what it says, and train a new lineage"
            )

    async def _step(self, lineage: Lineage, reporter: Reporter, batch: Sequence[Waiting]) -> bool:
        """Whether there was something to train."""
        if not batch or lineage.finished():
            return False
        await self.room.wait(2 * lineage.save_bytes)  # the next save, and the one after it
        try:
            measured = await self._in_thread(partial(lineage.step, batch, self._stop))
        except StepFailed as failure:
            await self._settle(lineage, reporter)  # there is one copy of the weights at a time
            measured = await self._in_thread(partial(lineage.step_isolated, failure, self._stop))
        if measured:
            reporter.step(measured, lineage.state)
        if lineage.health.stopped is not None:
            await self._give_up(lineage, reporter, lineage.health.stopped.reason)
        return True

    async def _give_up(self, lineage: Lineage, reporter: Reporter, reason: str) -> None:
        """Undo the steps that no version holds, as a refusal would, and say so. Saved at once: after a crash before
        that, the same steps are taken again."""
        await self._settle(lineage, reporter)
        await self._undo(await self._do(lineage.give_up), lineage)
        await self._save(lineage, reporter, publish=False)
        reporter.stopped(reason, lineage.state)

    async def _act(self, lineage: Lineage, reporter: Reporter, mark: int | None = None) -> None:
        """Step and save if it is time. What was undone or restored is said before anything else becomes of it."""
        if self._saving is not None and self._saving[1].done():
            await self._settle(lineage, reporter)
        resumed = self._resume and lineage.health.stopped is not None
        self._resume = False
        if resumed:
            lineage.resume()
        if lineage.state.moved or resumed:
            await self._save(lineage, reporter, publish=False)
        if resumed:
            reporter.stopped(None, lineage.state)
        self._end_if_stopped(lineage)
        await self._step(lineage, reporter, lineage.next_batch(mark))
        if lineage.save_due(self._clock.monotonic_s() - self._saved_at_s):
            await self._save(lineage, reporter, publish=lineage.version_due)

    async def _save(self, lineage: Lineage, reporter: Reporter, *, publish: bool) -> None:
        """Durable first, then announced; the next save waits until the bus has it. With `save_beside` steps go on from
        the moment when there is a copy of the weights."""
        await self._settle(lineage, reporter)
        await self.room.wait(2 * lineage.save_bytes)  # the next save, and the one after it
        save = await self._in_thread(partial(lineage.begin_save, publish=publish))
        self._saving = save, asyncio.create_task(self._write(save))
        self._saved_at_s = self._clock.monotonic_s()
        if not self._settings.save_beside:
            await self._settle(lineage, reporter)
        if lineage.state.moved:  # more was undone or restored than one account holds
            await self._save(lineage, reporter, publish=False)

    async def _write(self, save: Save) -> None:
        loop = asyncio.get_running_loop()
        await self._retry(lambda: loop.run_in_executor(self._writer, save.write))

    async def _settle(self, lineage: Lineage, reporter: Reporter) -> None:
        """Wait until what is being saved is durable, and announce it: before anything but a step."""
        if self._saving is None:
            return
        save, writing = self._saving
        await writing
        self._saving = None
        published = lineage.end_save(save)
        checkpoint, metrics = lineage.saved.checkpoint, lineage.saved.metrics
        if published:
            reporter.published(checkpoint.version, checkpoint.step, save.moment.steps)
            await self._announce(checkpoint)
        await self._announce(metrics)
        self._saved_at_s = self._clock.monotonic_s()

    async def _announce(self, *events: Event) -> None:
        for event in events:
            await self._retry(partial(self._sink.send, event))

    async def _receive(self, record: Record, lineage: Lineage, reporter: Reporter) -> None:
        """Take one record into the state, then move the offset past it. A record that is no event is dead-lettered."""
        try:
            event = await self._decode(record)
        except InvalidEvent as error:
            EVENTS_HANDLED.labels(record.topic, "refused").inc()
            await self._retry(partial(self._refuse, record, error))
        else:
            EVENTS_HANDLED.labels(record.topic, "handled").inc()
            self._refuse.handled(event)
            if isinstance(event, Experience):
                await self._admit(event, record, lineage)
            elif isinstance(event, ModelEvent) and event.model == self._settings.model:
                await self._settle(lineage, reporter)
                await self._follow(event, lineage)
                await self._in_thread(lambda: report_decision(reporter, event, lineage.state))
        noted = record.topic == self._settings.topic
        lineage.state.passed(record.topic, record.partition, record.offset, noted=noted)

    async def _follow(self, event: ModelEvent, lineage: Lineage) -> None:
        """Go back with the weights if the registry says so. What that undoes and is still fresh is queued again, with
        its tokens as they are on the bus."""
        state = lineage.state
        excludes = event.rollout is not None and event.rollout.excludes
        if excludes or event.decision == "promoted":
            state.exclude(event.version, ends=not excludes)  # before anything is queued again
        await self._undo(await self._do(lambda: lineage.control(event)), lineage)
        if excludes:
            await self._take_back(event.version, state)

    async def _take_back(self, version: str, state: LineageState) -> None:
        """Drop what the version answered and nobody trained yet, and take what was trained out of the weights."""
        state.sweep()
        held = exclusion.held_of(state, version)
        found = await self._read_again(state.places(held))
        left = exclusion.take_back(state, held, found, self._clock.now())
        log.info("excluded", version=version, taken_back=len(held) - left, left=left)

    async def _undo(self, lost: Mapping[str, Sequence[int]], lineage: Lineage) -> None:
        if not lost:
            return
        state = lineage.state
        state.undo(lost, await self._read_again(state.places(lost)), self._clock.now())
        log.info("undone", experiences=len(lost), queued=sum(one.queued for one in state.undone))

    def _open(self) -> Lineage:
        """Known at once, so that it is closed whatever becomes of who waits for it."""
        self.lineage = open_lineage(self._settings, self._blobs, self._clock, self._store)
        return self.lineage

    async def _admit(self, experience: Experience, record: Record, lineage: Lineage) -> None:
        if experience.model != self._settings.model:
            OTHER_MODELS.inc()
            return
        whole = await self._with_branch(experience, lineage)
        lineage.state.admit(whole, (record.partition, record.offset), self._clock.now())

    async def _with_branch(self, experience: Experience, lineage: Lineage) -> Experience:
        """A withdrawal need not repeat the tokens. To undo what they did they are read again from the bus."""
        entry = lineage.state.window.get(experience.experience_id)
        if experience.branch is not None or entry is None or not entry.trained:
            return experience
        found = await self._read_again({(entry.partition, entry.offset): experience.experience_id})
        if earlier := found.get(experience.experience_id):
            return experience.model_copy(update={"branch": earlier.branch})
        UNCORRECTABLE.inc()
        log.error("tokens_are_gone", experience_id=experience.experience_id, offset=entry.offset)
        return experience

    async def _read_again(self, places: Mapping[tuple[int, int], str]) -> dict[str, Experience]:
        """The experiences of these names as they are on the bus; those that it no longer has are not in it."""
        records = await self._retry(lambda: self._source.fetch(tuple(places)))
        found: dict[str, Experience] = {}
        for place, record in records.items():
            event = await self._decode(record)
            if isinstance(event, Experience) and event.experience_id == places[place]:
                found[event.experience_id] = event
        return found

    async def _decode(self, record: Record) -> Event:
        topic = Experience.topic if record.topic == self._settings.topic else None
        patience = Patience(self._clock)
        received = await self._retry(lambda: patience.decode(record, self._blobs, topic=topic))
        return received.event

    async def _retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Until it works or `retry_s` is over, while something that we depend on is away; a full disk is waited for."""
        deadline = self._clock.monotonic_s() + self._settings.retry_s
        attempt = 0
        while True:
            try:
                return await work()
            except Unavailable as error:
                if self._clock.monotonic_s() > deadline and not isinstance(error, DiskFull):
                    raise
                RETRIES.labels("trainer").inc()
                log.warning("retrying", error=str(error), attempt=attempt)
            await self._clock.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    async def _do(self, work: Callable[[], T]) -> T:
        return await self._retry(lambda: self._in_thread(work))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

"""The training loop: read, admit, step, save and announce, one after the other, so that no lock is needed.

Only the step, the save and the loading of weights leave the event loop; they run in one thread, one at a time, while
the loop answers `/health`. The process may be killed at any point: the next start continues from the last save. A clean
stop is the same, but announced: the step in progress is abandoned, and the next start does it again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from headrace_runtime.clock import Clock
from headrace_runtime.errors import DiskFull, InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import BatchDecoder, Received, Record
from headrace_runtime.metrics import EVENTS_HANDLED, RETRIES
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.stream.pausing import DeadLetterLimiter
from headrace_schemas import Checkpoint, Event, Experience, ModelEvent
from headrace_trainer.batches.cutting import left_out_of, recorded_sizes_of
from headrace_trainer.experiences.admission import learned_signals
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.lineage import control
from headrace_trainer.lineage.culprits import StepFailed
from headrace_trainer.lineage.health import TrainingStopped
from headrace_trainer.lineage.lease import Lease
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import check_start, open_lineage
from headrace_trainer.lineage.saving import DiskRoom, Save
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.metrics import OTHER_MODELS, UNCORRECTABLE
from headrace_trainer.report import Reporter, report_decision
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.source import Sink, Source

log = get_logger(__name__)
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
T = TypeVar("T")


class Trainer:
    """Training loop of one lineage. Call `run` once."""

    def __init__(
        self,
        settings: TrainerSettings,
        blobs: BlobStore,
        source: Source,
        sink: Sink,
        refuse: DeadLetterLimiter,
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
        """The save that is not announced yet. There is at most one."""
        self._stop = threading.Event()
        self._saved_at_s = 0.0
        self._store = LineageStore(blobs, settings.lineage)
        self._lease = Lease(self._store, clock, settings.lease_s, settings.owner_wait_s)
        self._resume = False
        self.lineage: Lineage | None = None
        """None until the saved state has been read."""

    @property
    def is_standby(self) -> bool:
        """Whether this process is ready and waits because another one trains the lineage."""
        return self._lease.is_waiting

    @property
    def paused(self) -> str | None:
        """Reason why training or reading is paused until `resume`, or None while both continue."""
        return "; ".join(filter(None, [self._refuse.paused, self.stop_reason, self.room.trouble])) or None

    @property
    def stop_reason(self) -> str | None:
        """Reason why training is stopped, or None. A stopped trainer still applies decisions of the registry."""
        stop = self.lineage.health.stopped if self.lineage is not None else None
        return None if stop is None else f"training is stopped: {stop.reason}"

    @property
    def stray_rewards(self) -> str | None:
        """Sentence about recent rewards far outside of their sources' usual values, or None if there are none."""
        strays = self.lineage.state.baselines.ranges.strays if self.lineage is not None else ()
        if not strays:
            return None
        recent = "; ".join(map(str, strays[-3:]))
        return f"{recent}. Send the rewards of a source in a single unit; see docs/guides/rewards.md"

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress, or durable but not announced yet."""
        return self._saving is not None

    @property
    def learner_failure(self) -> str | None:
        """Reason why the learner has failed, so that the process will end, or None."""
        return self.lineage.learner.failure if self.lineage is not None else None

    def resume(self) -> None:
        """Let training and reading continue after a stop or a pause. Training continues once this change is saved."""
        self._resume = self.stop_reason is not None
        if self._refuse.paused is not None:
            self._refuse.resume()

    async def run(self) -> None:
        """Train until `max_steps`, or until cancelled. Raise an error if only a restart or an operator can help."""
        try:
            await self._retry_in_thread(lambda: check_start(self._settings, self._blobs))
            await self._lease.acquire(self._retry_in_thread)
            await self._train_as_owner()
        finally:
            await self._end_thread()
            if self.lineage is not None:
                await asyncio.to_thread(self.lineage.close)

    async def _train_as_owner(self) -> None:
        """Train and renew the lease at the same time, until one of the two ends."""
        work, lease = tasks = [asyncio.create_task(self._open_and_train()), asyncio.create_task(self._lease.renew())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._end_thread()  # the thread may still save, which only the owner may do
            lease.cancel()
            await asyncio.gather(lease, return_exceptions=True)
            await self._lease.release()

    async def _open_and_train(self) -> None:
        lineage = await disk.retry_while_full(lambda: self._in_thread(self._open_lineage))
        reporter = await self._in_thread(self._make_reporter)
        try:
            # Announced once more after a restart, with the same ids.
            await self._announce(lineage.saved.checkpoint, lineage.saved.metrics)
            await self._retry(lambda: self._source.start(lineage.state.offsets))
            if lineage.health.stopped is not None:
                reporter.report_stop(lineage.health.stopped.reason, lineage.state)
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
        if lineage.state.has_reversals:
            await self._save(lineage, reporter, publish=False)
        while not lineage.is_finished():
            lineage.check()
            for record in await self._source.poll(lineage.state.room):
                if lineage.is_finished():  # the remaining records are left to the process that continues the lineage
                    break
                await self._receive(record, lineage, reporter)
                lineage.recorded_left_out = left_out_of(record)
                # After each record, however many records one poll returned.
                for recorded_size in recorded_sizes_of(record) or (None,):
                    await self._step_and_save(lineage, reporter, recorded_size)
            await self._step_and_save(lineage, reporter)
            if self._settings.until_end and not lineage.is_finished() and await self._retry(self._source.at_end):
                await self._finish(lineage, reporter)
                break
        if lineage.state.current is None:
            await self._save(lineage, reporter, publish=lineage.has_unpublished_steps)
        await self._finish_save(lineage, reporter)
        log.info("finished", steps=lineage.state.steps)

    async def _finish(self, lineage: Lineage, reporter: Reporter) -> None:
        """Train the remaining complete batches, save, and report all outcomes. Raises `TrainingStopped`."""
        while await self._step(lineage, reporter, lineage.next_batch(at_end=True)):
            if lineage.is_save_due(0.0):
                await self._save(lineage, reporter, publish=lineage.is_version_due)
        if lineage.state.outcomes or lineage.state.read:
            await self._save(lineage, reporter, publish=lineage.has_unpublished_steps)
        self._end_if_stopped(lineage)

    def _end_if_stopped(self, lineage: Lineage) -> None:
        if lineage.health.stopped is not None and self._settings.until_end:
            raise TrainingStopped(
                f"lineage {self._settings.lineage} has stopped training: {lineage.health.stopped.reason}; "
                "change the limit, or the problem that it found, and train a new lineage"
            )

    async def _step(self, lineage: Lineage, reporter: Reporter, batch: Sequence[WaitingExperience]) -> bool:
        """Train the batch unless it is empty or the lineage is finished. Return whether a step was tried."""
        if not batch or lineage.is_finished():
            return False
        await self.room.wait(2 * lineage.save_bytes)  # the next save, and the one after it
        try:
            measured = await self._in_thread(partial(lineage.step, batch, self._stop))
        except StepFailed as failure:
            await self._finish_save(lineage, reporter)  # the search for the culprits needs the only copy of the weights
            measured = await self._in_thread(partial(lineage.step_isolated, failure, self._stop))
        if measured:
            reporter.report_step(measured, lineage.state)
        if lineage.health.stopped is not None:
            await self._revert_to_last_version(lineage, reporter, lineage.health.stopped.reason)
        return True

    async def _revert_to_last_version(self, lineage: Lineage, reporter: Reporter, reason: str) -> None:
        """Reset the weights to the last version, because a limit of `[trainer.health]` was exceeded; save and
        report."""
        await self._finish_save(lineage, reporter)
        await self._requeue_undone(await self._retry_in_thread(lineage.revert_to_last_version), lineage)
        await self._save(lineage, reporter, publish=False)
        reporter.report_stop(reason, lineage.state)

    async def _step_and_save(self, lineage: Lineage, reporter: Reporter, recorded_size: int | None = None) -> None:
        """Take a step and save, if it is time. Undone and restored outcomes are saved and announced first."""
        if self._saving is not None and self._saving[1].done():
            await self._finish_save(lineage, reporter)
        resumed = self._resume and lineage.health.stopped is not None
        self._resume = False
        if resumed:
            lineage.resume()
        if lineage.state.has_reversals or resumed:
            await self._save(lineage, reporter, publish=False)
        if resumed:
            reporter.report_stop(None, lineage.state)
        self._end_if_stopped(lineage)
        await self._step(lineage, reporter, lineage.next_batch(recorded_size))
        if lineage.is_save_due(self._clock.monotonic_s() - self._saved_at_s):
            await self._save(lineage, reporter, publish=lineage.is_version_due)

    async def _save(self, lineage: Lineage, reporter: Reporter, *, publish: bool) -> None:
        """Save the lineage durably, then publish the results of its steps; with `publish` also a new version."""
        await self._finish_save(lineage, reporter)
        await self.room.wait(2 * lineage.save_bytes)  # the next save, and the one after it
        save = await self._in_thread(partial(lineage.begin_save, publish=publish))
        self._saving = save, asyncio.create_task(self._write(save))
        self._saved_at_s = self._clock.monotonic_s()
        if not self._settings.save_beside:
            await self._finish_save(lineage, reporter)
        if lineage.state.has_reversals:  # there were more reversals than one event holds
            await self._save(lineage, reporter, publish=False)

    async def _write(self, save: Save) -> None:
        loop = asyncio.get_running_loop()
        await self._retry(lambda: loop.run_in_executor(self._writer, save.write))

    async def _finish_save(self, lineage: Lineage, reporter: Reporter) -> None:
        """Wait until the save in progress is durable, and publish its results. Every operation but a training step
        requires it.
        """
        if self._saving is None:
            return
        save, writing = self._saving
        await writing
        self._saving = None
        published = lineage.end_save(save)
        checkpoint, metrics = lineage.saved.checkpoint, lineage.saved.metrics
        if published:
            reporter.report_version(checkpoint.version, checkpoint.step, save.snapshot.steps)
            await self._announce(checkpoint)
        await self._announce(metrics)
        self._saved_at_s = self._clock.monotonic_s()

    async def _announce(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, Checkpoint) and not self._settings.until_end:  # a job trains no live traffic
                event = event.model_copy(update={"learns": learned_signals(self._settings)})
            await self._retry(partial(self._sink.send, event))

    async def _receive(self, record: Record, lineage: Lineage, reporter: Reporter) -> None:
        """Process one record, then move the offset past it. An invalid record is dead-lettered."""
        try:
            event = (received := await self._decode(record)).event
        except InvalidEvent as error:
            EVENTS_HANDLED.labels(record.topic, "refused").inc()
            await self._retry(partial(self._refuse, record, error))
        else:
            EVENTS_HANDLED.labels(record.topic, "handled").inc()
            self._refuse.note_handled(event)
            if isinstance(event, Experience):
                await self._admit(event, received, lineage)
            elif isinstance(event, ModelEvent) and event.model == self._settings.model:
                await self._finish_save(lineage, reporter)
                await self._follow_decision(event, lineage)
                await self._in_thread(lambda: report_decision(reporter, event, lineage.state))
        reported = record.topic == self._settings.topic
        lineage.state.record_offset(record.topic, record.partition, record.offset, reported=reported)

    async def _follow_decision(self, event: ModelEvent, lineage: Lineage) -> None:
        """Apply a decision of the registry: exclude the answers of a version, or reset the weights to another version.

        Experiences whose training is lost are read again from the bus and queued, if they are still fresh.
        """
        state = lineage.state
        excludes = event.rollout is not None and event.rollout.excludes
        if excludes or event.decision == "promoted":
            state.exclude(event.version, ends=not excludes)  # before anything is queued again
        await self._requeue_undone(await self._retry_in_thread(lambda: lineage.control(event)), lineage)
        if excludes:
            await self._remove_excluded(event.version, state)

    async def _remove_excluded(self, version: str, state: LineageState) -> None:
        """Drop waiting experiences of an excluded version, and queue reversals of those that were already trained."""
        state.sweep()
        revisions = control.find_excluded_contributions(state, version)
        experiences = await self._read_again(state.bus_positions(revisions))
        remaining = control.queue_reversals(state, revisions, experiences, self._clock.now())
        log.info("excluded", version=version, taken_back=len(revisions) - remaining, left=remaining)

    async def _requeue_undone(self, lost: Mapping[str, Sequence[int]], lineage: Lineage) -> None:
        if not lost:
            return
        state = lineage.state
        state.undo(lost, await self._read_again(state.bus_positions(lost)), self._clock.now())
        log.info("undone", experiences=len(lost), queued=sum(undone.queued for undone in state.undone))

    def _open_lineage(self) -> Lineage:
        """Open the lineage and assign it to `self.lineage`.

        The assignment is in the thread that opens it, so that it is closed even if the caller was cancelled.
        """
        self.lineage = open_lineage(self._settings, self._blobs, self._clock, self._store)
        return self.lineage

    async def _admit(self, experience: Experience, received: Received, lineage: Lineage) -> None:
        if experience.model != self._settings.model:
            OTHER_MODELS.inc()
            return
        complete = await self._with_branch(experience, lineage)
        if complete.branch is not None and any(span.restricted for span in complete.branch.spans):
            await self._in_thread(partial(lineage.state.limits.restriction_problem, complete))  # its result is cached
        position, size_bytes = (received.record.partition, received.record.offset), received.size_bytes
        lineage.state.admit(complete, position, self._clock.now(), size_bytes if complete is experience else None)

    async def _with_branch(self, experience: Experience, lineage: Lineage) -> Experience:
        """Return the experience with its branch. If a withdrawal lacks it, read it from the bus for the reversal."""
        entry = lineage.state.window.get(experience.experience_id)
        if experience.branch is not None or entry is None or not entry.trained:
            return experience
        name = experience.experience_id
        if earlier := (await self._read_again({(entry.partition, entry.offset): name})).get(name):
            return experience.model_copy(update={"branch": earlier.branch})
        UNCORRECTABLE.inc()
        log.error("tokens_are_gone", experience_id=experience.experience_id, offset=entry.offset)
        return experience

    async def _read_again(self, names_by_position: Mapping[tuple[int, int], str]) -> dict[str, Experience]:
        """Read the experiences at these bus positions again. Return by id those that the bus still has."""
        records = await self._retry(lambda: self._source.fetch(tuple(names_by_position)))
        experiences: dict[str, Experience] = {}
        for position, record in records.items():
            event = (await self._decode(record)).event
            if isinstance(event, Experience) and event.experience_id == names_by_position[position]:
                experiences[event.experience_id] = event
        return experiences

    async def _decode(self, record: Record) -> Received:
        topic = Experience.topic if record.topic == self._settings.topic else None
        budget = BatchDecoder(self._clock)
        return await self._retry(lambda: budget.decode(record, self._blobs, topic=topic))

    async def _retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`; repeat it while a dependency is unavailable, for at most `retry_s`, or while the disk is full."""
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

    async def _retry_in_thread(self, work: Callable[[], T]) -> T:
        return await self._retry(lambda: self._in_thread(work))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

"""Calls of reward functions as jobs. The handler of a trajectory adds a job; the calls run outside its transaction.

A new job is leased to this process at once, and its functions may run before the handler's transaction has ended. If
that transaction fails, the result is discarded. The leases of a process that died run out, and another process does
the jobs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

from pydantic import BaseModel, JsonValue
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.isolation import each, reason_of
from headrace_runtime.jobs import Job, Jobs, kind_of_tenant
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor, Step, StepFailed
from headrace_runtime.sources import Sources
from headrace_schemas import Event, Reward, Trajectory
from headrace_scorer import ledger, schema, store
from headrace_scorer.fair_queue import FairQueue
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.feedback_rewards import feedback_for
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.functions.protocol import CallRequest
from headrace_scorer.reward_policy import RewardPolicy
from headrace_scorer.scores import ScoreStore, TrajectoryScore
from headrace_scorer.settings import ScorerSettings

log = get_logger(__name__)
_KIND = "score"
_POLL_S = 1.0
_QUEUE_MAX = 64
_LEASED_MAX = 32
"""Room in the queue that leases fill; the rest is for trajectories that arrive."""
_REFILL_AT = 16
"""Jobs that still wait when the next are leased, if the last lease left some in the database."""
_RESERVE = 4
"""Jobs of a tenant that fit into a queue that is full of others."""
_TENANTS_MAX = 32
"""Tenants whose jobs are leased at once; the next ones follow at the next lease."""
_DONE_MAX = 50
_LEASES_MAX = 10
"""Processes that may end while they have a job; then it fails by name."""


class ScoringJob(BaseModel):
    """A job's payload. `inputs` is a digest of the feedback that the functions read."""

    trajectory_id: str
    inputs: str
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job with everything that its functions read."""

    job: Job
    order: ScoringJob
    tenant: str
    trajectory: bytes
    feedback: tuple[str, ...]
    context: dict[str, JsonValue]


Done = tuple[LoadedJob, dict[str, Outcome]]
"""A job and the outcome of each of its functions."""


class Scoring:
    """Adds jobs for handlers, does them, and enters their results."""

    def __init__(
        self, pool: FunctionPool, settings: ScorerSettings, cache: store.TrajectoryCache, scores: ScoreStore
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._cache = cache
        self._scores = scores
        self.sources = Sources()
        """The state of each function."""
        self._jobs = Jobs(schema.stream)
        self._lease = timedelta(seconds=settings.lease_s)
        self._held: dict[str, Job] = {}
        """Jobs that are leased to this process, by id."""
        self._renew_at: datetime | None = None
        self._last_tenant = ""
        self._waiting: FairQueue[LoadedJob] = FairQueue(_QUEUE_MAX, _RESERVE)
        self._done: asyncio.Queue[Done] = asyncio.Queue(_DONE_MAX)

    @property
    def functions(self) -> Sequence[RewardFunction]:
        return self._pool.functions

    @property
    def policy(self) -> RewardPolicy:
        """The policy with the functions that are loaded now."""
        return self._settings.policy([function.source for function in self.functions])

    def inputs(self, feedback_set: FeedbackSet) -> str:
        """A digest of the feedback that functions read. When it changes, those functions have to be called again."""
        seen: object = None
        if any("feedback" in function.parameters for function in self.functions):
            seen = [one.event_id for one in feedback_set.all]
        elif any("context" in function.parameters for function in self.functions):
            seen = feedback_set.context({})
        return sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16] if seen else ""

    async def add(
        self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, feedback_set: FeedbackSet, *, first: bool
    ) -> None:
        """Queue calls of the functions: all of them the `first` time, later those that read feedback."""
        names = tuple(function.name for function in self.functions if first or function.looks_at_feedback)
        if not names:
            return
        order = ScoringJob(trajectory_id=trajectory.trajectory_id, inputs=self.inputs(feedback_set), functions=names)
        job_id, payload = f"{order.trajectory_id}/{order.inputs}", order.model_dump_json().encode()
        kind = kind_of_tenant(_KIND, trajectory.tenant)
        if not self._waiting.room(trajectory.tenant):
            await self._jobs.enqueue(tx, job_id, kind, payload, now)
            return
        job = await self._jobs.start(tx, job_id, kind, payload, now + self._lease)
        if job is not None:
            self._held[job_id] = job
            self._waiting.put_nowait(trajectory.tenant, _work(job, order, trajectory, feedback_set))

    def tasks(self, processor: Processor) -> Sequence[Awaitable[None]]:
        """To be run beside the stream, until cancelled."""
        callers = [self._call_functions() for _ in range(self._settings.function_workers)]
        return [self._collect(processor), *callers, self._enter_results(processor)]

    async def _call_functions(self) -> None:
        while True:
            await self._done.put(await self.perform(await self._waiting.get()))

    async def perform(self, work: LoadedJob) -> Done:
        """Call a job's functions, those that are still loaded, one after the other."""
        outcomes = {}
        for name in work.order.functions:
            if any(function.name == name for function in self.functions):
                call = CallRequest(function=name, feedback=work.feedback, context=work.context)
                outcomes[name] = outcome = await self._call(call, work.trajectory)
                self.sources.note(f"function:{name}", outcome.outcome, outcome.reason)
        return work, outcomes

    async def _call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        try:
            return self._in_range(f"function:{call.function}", await self._pool.call(call, trajectory))
        except Exception as error:
            log.exception("call_failed", function=call.function)
            return Outcome.failed(reason_of(error))

    def _in_range(self, source: str, outcome: Outcome) -> Outcome:
        """Return the outcome, a failure in its place where a value is outside the declared range of the source."""
        values = (outcome.value, *outcome.turns.values())
        violation = next(filter(None, (self._settings.violation(source, value) for value in values)), None)
        if violation is None:
            return outcome
        return Outcome.failed(violation).model_copy(update={"judged_by": outcome.judged_by})

    async def _collect(self, processor: Processor) -> None:
        if processor.database.sqlite:  # one file, one process: the process that had the leases is dead
            async with processor.database.transaction() as tx:
                await self._jobs.release(tx, _KIND, processor.clock.now())
        interval_s = min(_POLL_S, self._settings.lease_s / 3)
        try:
            while True:
                more = False
                try:
                    more = await self.take_over(processor)
                except (Unavailable, StepFailed) as error:
                    log.warning("jobs_postponed", error=str(error))
                if more:  # there is a backlog: go on as soon as the functions have done most of this
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await self._waiting.below(_REFILL_AT)
                else:
                    await processor.clock.sleep(interval_s)
        finally:
            await self._give_back(processor)

    async def _give_back(self, processor: Processor) -> None:
        """End the leases of this process, so that they do not count as a process that died."""
        with contextlib.suppress(Unavailable):
            async with processor.database.transaction() as tx:
                for job in self._held.values():
                    await self._jobs.give_back(tx, job, processor.clock.now())

    async def take_over(self, processor: Processor) -> bool:
        """Renew the leases of this process. Lease jobs that wait: those that did not fit, those of dead processes.

        Returns whether more may wait than there was room for.
        """
        loaded: list[LoadedJob] = []
        more = False

        async def step(tx: AsyncConnection, now: datetime) -> list[Event]:
            nonlocal more
            loaded.clear()
            if self._renew_at is None or now >= self._renew_at:
                if self._held:
                    await self._jobs.renew(tx, self._held, now + self._lease)
                await self._jobs.count(tx, _KIND)
            leased, more = await self._take(tx, now)

            async def load(job: Job) -> Sequence[Event]:
                loaded.append(await self._read(tx, job))
                return ()

            async def fail(job: Job, reason: str) -> Sequence[Event]:
                order = ScoringJob.model_validate_json(job.payload)
                failed = dict.fromkeys(order.functions, Outcome.failed(reason))
                return await self._enter_job(tx, now, job, order, failed)

            return await each(tx, "scorer.load", leased, load, fail, lambda job, reason: self._drop(tx, job, reason))

        await processor.step(step)
        now = processor.clock.now()
        if self._renew_at is None or now >= self._renew_at:
            self._renew_at = now + min(timedelta(seconds=_POLL_S), self._lease / 3)
        for work in loaded:
            self._held[work.job.job_id] = work.job
            self._waiting.put_nowait(work.tenant, work)
        return more

    async def _take(self, tx: AsyncConnection, now: datetime) -> tuple[list[Job], bool]:
        """Lease jobs of the tenants in turn, each its part of the room, and return whether more may wait."""
        leased: list[Job] = []
        tenants = await self._jobs.tenants(tx, _KIND, self._last_tenant, _TENANTS_MAX)
        more = len(tenants) == _TENANTS_MAX
        for left, tenant in zip(range(len(tenants), 0, -1), tenants, strict=True):
            self._last_tenant = tenant
            room = self._waiting.room(tenant, _LEASED_MAX - len(leased))
            part = max(min(room, _RESERVE - self._waiting.count(tenant)), math.ceil(room / left))
            if part > 0:
                jobs = await self._jobs.lease(tx, kind_of_tenant(_KIND, tenant), now, self._lease, part)
                more = more or len(jobs) == part
                leased += jobs
        return leased, more

    async def _read(self, tx: AsyncConnection, job: Job) -> LoadedJob:
        if job.attempts >= _LEASES_MAX:
            raise RuntimeError(f"{_LEASES_MAX} processes ended while they had its job")
        order = ScoringJob.model_validate_json(job.payload)
        trajectory = await self._cache.get(tx, order.trajectory_id)
        if trajectory is None:  # it was deleted meanwhile: nothing is called, and the job ends
            return LoadedJob(job, order.model_copy(update={"functions": ()}), "", b"", (), {})
        feedback_set, _ = await feedback_for(tx, trajectory)
        return _work(job, order, trajectory, feedback_set)

    async def _enter_results(self, processor: Processor) -> None:
        while True:
            done = [await self._done.get()]
            while not self._done.empty():  # bounded: nothing is added meanwhile
                done.append(self._done.get_nowait())
            try:
                await processor.step(self.enter(done))
            except StepFailed as error:  # their leases run out, and the functions are called again
                log.exception("results_postponed", error=str(error))

    def enter(self, done: Sequence[Done]) -> Step:
        """The step that enters results in the ledger. It returns the rewards, and the experiences that are ready.

        What cannot be entered becomes a failed reward of each function, or else a dead letter of the trajectory.
        """

        async def step(tx: AsyncConnection, now: datetime) -> list[Event]:
            for work, _ in done:
                self._held.pop(work.job.job_id, None)

            async def enter(item: Done) -> Sequence[Event]:
                work, outcomes = item
                return await self._enter_job(tx, now, work.job, work.order, outcomes)

            async def fail(item: Done, reason: str) -> Sequence[Event]:
                work, outcomes = item
                failed = dict.fromkeys(outcomes, Outcome.failed(reason))
                return await self._enter_job(tx, now, work.job, work.order, failed)

            return await each(
                tx, "scorer.enter", done, enter, fail, lambda item, reason: self._drop(tx, item[0].job, reason)
            )

        return step

    async def _drop(self, tx: AsyncConnection, job: Job, reason: str) -> Sequence[Event]:
        """End a job without a result, and dead-letter its trajectory."""
        if not await self._jobs.finish(tx, job):
            return ()
        return await store.fail_scoring(tx, job.job_id.rpartition("/")[0], reason)

    async def _enter_job(
        self, tx: AsyncConnection, now: datetime, job: Job, order: ScoringJob, outcomes: dict[str, Outcome]
    ) -> list[Event]:
        if not await self._jobs.finish(tx, job):
            return []
        score = await self._scores.open(tx, order.trajectory_id)
        return [] if score is None else await self._enter_one(tx, now, score, order, outcomes)

    async def _enter_one(
        self,
        tx: AsyncConnection,
        now: datetime,
        score: TrajectoryScore,
        order: ScoringJob,
        outcomes: dict[str, Outcome],
    ) -> list[Event]:
        current = score.row["inputs"] == order.inputs
        outdated = set() if current else {one.name for one in self.functions if one.looks_at_feedback}
        rewards = [
            reward
            for name, outcome in outcomes.items()
            if name not in outdated
            for reward in _rewards(score, now, f"function:{name}", outcome)
        ]
        await ledger.enter(tx, now, rewards, score.entries)
        if current:
            score.change(scored_inputs=order.inputs)
        return [*rewards, *await self._scores.emit_if_ready(tx, now, score, self.policy)]


def _work(job: Job, order: ScoringJob, trajectory: Trajectory, feedback_set: FeedbackSet) -> LoadedJob:
    feedback = tuple(one.to_json().decode() for one in feedback_set.all)
    context = feedback_set.context(trajectory.context)
    return LoadedJob(job, order, trajectory.tenant, trajectory.to_json(), feedback, context)


def _rewards(score: TrajectoryScore, now: datetime, source: str, outcome: Outcome) -> Iterator[Reward]:
    """That of the run, those of its turns, and the withdrawal of what an earlier call said of other turns."""
    whole = Reward(
        time=now,
        trajectory_id=score.trajectory.trajectory_id,
        session_key=score.trajectory.session_key,
        tenant=score.trajectory.tenant,
        source=source,
        revision=score.entries.next_revision(EntryKey.reward(source)),
        outcome=outcome.outcome,
        value=outcome.value,
        criteria=outcome.criteria,
        reason=outcome.reason,
        judged_by=outcome.judged_by,
    )
    yield whole
    turns = turn_values(score.trajectory, outcome)
    current = score.entries.current()
    before = {one.turn_id for one in current if one.source == source and one.turn_id and one.outcome == "scored"}
    for turn_id in sorted({*turns, *before}):
        yield whole.model_copy(
            update={
                "turn_id": turn_id,
                "revision": score.entries.next_revision(EntryKey.reward(source, turn_id)),
                "outcome": "scored" if turn_id in turns else "withdrawn",
                "value": turns.get(turn_id),
                "criteria": {},
                "reason": None,
            }
        )


def turn_values(trajectory: Trajectory, outcome: Outcome) -> dict[str, float]:
    """What a function says of turns that are in a branch."""
    spoken = set(store.branch_turns(trajectory))
    return {turn_id: value for turn_id, value in outcome.turns.items() if turn_id in spoken}

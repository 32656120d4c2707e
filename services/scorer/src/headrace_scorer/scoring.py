"""Calls of reward functions as jobs. The handler of a trajectory adds a job; the calls run outside its transaction.

A new job is leased to this process at once, and its functions may run before the handler's transaction has ended. If
that transaction fails, the result is discarded. The leases of a process that died expire, and another process runs its
jobs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256

from pydantic import BaseModel, JsonValue
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.http.web import Sources
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import process_batch, reason_of
from headrace_runtime.stream.jobs import Job, Jobs, kind_of_tenant
from headrace_runtime.stream.processor import Processor, Step, StepFailed
from headrace_schemas import Event, Reward, Trajectory
from headrace_scorer import ledger, schema, store
from headrace_scorer.fair_queue import FairQueue
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.functions.loading import RewardFunction
from headrace_scorer.functions.outcomes import CallRequest, Outcome
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.ledger import feedback_for
from headrace_scorer.reward_policy import RewardPolicy
from headrace_scorer.scores import ScoreStore, TrajectoryScore, function_rewards
from headrace_scorer.settings import ScorerSettings

log = get_logger(__name__)
_KIND = "score"
_POLL_S = 1.0
_QUEUE_MAX = 128
_LEASED_MAX = 64
"""Jobs in the queue up to which further jobs are leased; the remaining slots are for trajectories that arrive."""
_BYTES_MAX = 64 << 20
"""Bytes of the jobs in the queue together. Some may be as large as a request: by number alone they would take 4 GB."""
_REFILL_AT = 32
"""Queue length below which the next jobs are leased, if the database has more."""
_RESERVE = 4
"""Jobs of a tenant that fit into a queue that is full of other tenants' jobs."""
_TENANTS_MAX = 32
"""Tenants whose jobs one lease covers; the other tenants follow at the next lease."""
_COMPLETED_MAX = 64
_LEASES_MAX = 10
"""Processes that may end while they run the same job; after that the job fails."""


class ScoringJob(BaseModel):
    """Payload of a stored job that calls reward functions. `inputs` is a digest of the feedback that they read."""

    trajectory_id: str
    inputs: str
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job with the trajectory, feedback and context that its functions read."""

    job: Job
    scoring_job: ScoringJob
    tenant: str
    trajectory: bytes
    feedback: tuple[str, ...]
    context: dict[str, JsonValue]

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the trajectory and of the feedback."""
        return len(self.trajectory) + sum(map(len, self.feedback))


@dataclass(frozen=True, slots=True)
class CompletedJob:
    """A job whose functions were called, with the outcome of each."""

    job: Job
    scoring_job: ScoringJob
    outcomes: dict[str, Outcome]


class Scoring:
    """Queue of reward function calls and the tasks that run them and enter their results in the ledger."""

    def __init__(
        self, pool: FunctionPool, settings: ScorerSettings, cache: store.TrajectoryCache, scores: ScoreStore
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._cache = cache
        self._scores = scores
        self.sources = Sources()
        """Health of each function, for the REST interface."""
        self._jobs = Jobs(schema.stream)
        self._lease = timedelta(seconds=settings.lease_s)
        self._leased: dict[str, Job] = {}
        """Jobs that are leased to this process, by id."""
        self._renew_at: datetime | None = None
        self._last_tenant = ""
        self._waiting: FairQueue[LoadedJob] = FairQueue(_QUEUE_MAX, _RESERVE, _BYTES_MAX)
        self._completed: asyncio.Queue[CompletedJob] = asyncio.Queue(_COMPLETED_MAX)

    @property
    def functions(self) -> Sequence[RewardFunction]:
        return self._pool.functions

    @property
    def policy(self) -> RewardPolicy:
        """Reward policy that expects rewards of the reward functions that are loaded now."""
        return self._settings.policy([function.source for function in self.functions])

    def inputs(self, feedback_set: FeedbackSet) -> str:
        """Return a digest of the feedback that reward functions take as a parameter, or an empty text without any.

        When the digest changes, the functions must be called again.
        """
        inputs: object = None
        if any("feedback" in function.parameters for function in self.functions):
            inputs = [event.event_id for event in feedback_set.all]
        elif any("context" in function.parameters for function in self.functions):
            inputs = feedback_set.context({})
        return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16] if inputs else ""

    async def add(
        self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, feedback_set: FeedbackSet, *, first: bool
    ) -> None:
        """Queue calls of the reward functions: of all functions if `first`, otherwise of those that read feedback."""
        names = tuple(function.name for function in self.functions if first or function.reads_feedback)
        if not names:
            return
        scoring_job = ScoringJob(
            trajectory_id=trajectory.trajectory_id, inputs=self.inputs(feedback_set), functions=names
        )
        job_id, payload = f"{scoring_job.trajectory_id}/{scoring_job.inputs}", scoring_job.model_dump_json().encode()
        kind = kind_of_tenant(_KIND, trajectory.tenant)
        if not self._waiting.free_slots(trajectory.tenant):
            await self._jobs.enqueue(tx, job_id, kind, payload, now)
            return
        job = await self._jobs.start(tx, job_id, kind, payload, now + self._lease)
        if job is not None:
            self._leased[job_id] = job
            work = _loaded_job(job, scoring_job, trajectory, feedback_set)
            self._waiting.put_nowait(work.tenant, work, work.size_bytes)

    def tasks(self, processor: Processor) -> Sequence[Awaitable[None]]:
        """Return the tasks that call functions and enter results in the ledger. They run until cancelled."""
        callers = [self._call_functions() for _ in range(self._settings.function_workers)]
        return [self._collect(processor), *callers, self._enter_results(processor)]

    async def _call_functions(self) -> None:
        while True:
            await self._completed.put(await self.perform(await self._waiting.get()))

    async def perform(self, work: LoadedJob) -> CompletedJob:
        """Call the reward functions of a job one after the other, and return their outcomes. Functions that are not
        loaded any more are skipped.
        """
        outcomes = {}
        for name in work.scoring_job.functions:
            if any(function.name == name for function in self.functions):
                call = CallRequest(function=name, feedback=work.feedback, context=work.context)
                outcomes[name] = outcome = await self._call(call, work.trajectory)
                self.sources.note(f"function:{name}", outcome.outcome, outcome.reason)
        return CompletedJob(work.job, work.scoring_job, outcomes)

    async def _call(self, call: CallRequest, trajectory: bytes) -> Outcome:
        try:
            return self._in_range(f"function:{call.function}", await self._pool.call(call, trajectory))
        except Exception as error:
            log.exception("call_failed", function=call.function)
            return Outcome.failed(reason_of(error))

    def _in_range(self, source: str, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure if one of its values is outside the declared range of the source."""
        values = (outcome.value, *outcome.turns.values())
        violation = next(filter(None, (self._settings.violation(source, value) for value in values)), None)
        if violation is None:
            return outcome
        return Outcome.failed(violation).model_copy(update={"judged_by": outcome.judged_by})

    async def _collect(self, processor: Processor) -> None:
        """Lease jobs from the database until cancelled. Then end the leases of this process."""
        if processor.database.sqlite:  # a SQLite file has one process, so the process that had the leases is dead
            async with processor.database.transaction() as tx:
                await self._jobs.release(tx, _KIND, processor.clock.now())
        interval_s = min(_POLL_S, self._settings.lease_s / 3)
        try:
            while True:
                more = False
                try:
                    more = await self.lease_jobs(processor)
                except (Unavailable, StepFailed) as error:
                    log.warning("jobs_postponed", error=str(error))
                if more:  # there is a backlog: continue as soon as the functions have finished most of these jobs
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await self._waiting.wait_until_below(_REFILL_AT)
                else:
                    await processor.clock.sleep(interval_s)
        finally:
            await self._end_leases(processor)

    async def _end_leases(self, processor: Processor) -> None:
        """End the leases of this process, so that no job counts this orderly stop as the death of a process."""
        with contextlib.suppress(Unavailable):
            async with processor.database.transaction() as tx:
                for job in self._leased.values():
                    await self._jobs.give_back(tx, job, processor.clock.now())

    async def lease_jobs(self, processor: Processor) -> bool:
        """Renew the leases of this process, and lease waiting jobs, including those of processes that died.

        Returns:
            Whether more jobs may wait than the queue has free slots.
        """
        loaded: list[LoadedJob] = []
        more = False

        async def step(tx: AsyncConnection, now: datetime) -> list[Event]:
            nonlocal more
            loaded.clear()
            if self._renew_at is None or now >= self._renew_at:
                if self._leased:
                    await self._jobs.renew(tx, self._leased, now + self._lease)
                await self._jobs.count(tx, _KIND)
            leased, more = await self._lease_in_turn(tx, now)

            async def load(jobs: Sequence[Job]) -> Sequence[Event]:
                loaded.extend(await self._read(tx, jobs))
                return ()

            async def fail(job: Job, reason: str) -> Sequence[Event]:
                scoring_job = ScoringJob.model_validate_json(job.payload)
                failed = dict.fromkeys(scoring_job.functions, Outcome.failed(reason))
                return await self._enter_jobs(tx, now, [CompletedJob(job, scoring_job, failed)])

            drop = partial(self._drop, tx)
            return await process_batch(tx, "scorer.load", leased, load, fail, drop)

        await processor.step(step)
        now = processor.clock.now()
        if self._renew_at is None or now >= self._renew_at:
            self._renew_at = now + min(timedelta(seconds=_POLL_S), self._lease / 3)
        for work in loaded:
            self._leased[work.job.job_id] = work.job
            self._waiting.put_nowait(work.tenant, work, work.size_bytes)
        return more

    async def _lease_in_turn(self, tx: AsyncConnection, now: datetime) -> tuple[list[Job], bool]:
        """Lease jobs of the tenants in turn, each tenant with its part of the free slots of the queue.

        Returns:
            The leased jobs, and whether more jobs may wait.
        """
        leased: list[Job] = []
        leased_bytes = 0
        tenants = await self._jobs.tenants(tx, _KIND, self._last_tenant, _TENANTS_MAX)
        more = len(tenants) == _TENANTS_MAX
        for left, tenant in zip(range(len(tenants), 0, -1), tenants, strict=True):
            self._last_tenant = tenant
            slots = self._waiting.free_slots(tenant, _LEASED_MAX - len(leased))
            part = max(min(slots, _RESERVE - self._waiting.count(tenant)), math.ceil(slots / left))
            if part > 0:
                jobs = await self._jobs.lease(tx, kind_of_tenant(_KIND, tenant), now, self._lease, part)
                fitting = await self._choose_fitting(tx, now, jobs, self._waiting.free_bytes(tenant) - leased_bytes)
                more = more or len(jobs) == part or len(fitting) < len(jobs)
                leased += fitting
                leased_bytes += sum(fitting.values())
        return leased, more

    async def _choose_fitting(
        self, tx: AsyncConnection, now: datetime, jobs: Sequence[Job], free_bytes: int
    ) -> dict[Job, int]:
        """Choose the leased jobs whose trajectories fit into `free_bytes`, in order, and end the leases of the
        others.

        The first job is chosen whatever its size, so that each tenant has its turn.

        Returns:
            Size in bytes of each chosen job.
        """
        names = {job: job.job_id.rpartition("/")[0] for job in jobs}
        sizes = await store.payload_sizes(tx, names.values())
        fitting: dict[Job, int] = {}
        for job, name in names.items():
            fits = sum(fitting.values()) + sizes.get(name, 0) <= free_bytes
            if fits or (not fitting and free_bytes > -_BYTES_MAX):
                fitting[job] = sizes.get(name, 0)
            else:
                await self._jobs.give_back(tx, job, now)
        return fitting

    async def _read(self, tx: AsyncConnection, jobs: Sequence[Job]) -> list[LoadedJob]:
        if any(job.attempts >= _LEASES_MAX for job in jobs):
            raise RuntimeError(f"{_LEASES_MAX} processes ended while they ran its job")
        scoring_jobs = [ScoringJob.model_validate_json(job.payload) for job in jobs]
        trajectories = await self._cache.get(tx, [scoring_job.trajectory_id for scoring_job in scoring_jobs])
        matched = await feedback_for(tx, list(trajectories.values()))
        loaded = []
        for job, scoring_job in zip(jobs, scoring_jobs, strict=True):
            trajectory = trajectories.get(scoring_job.trajectory_id)
            if trajectory is None:  # it was deleted in the meantime, so the job ends without a call
                loaded.append(LoadedJob(job, scoring_job.model_copy(update={"functions": ()}), "", b"", (), {}))
            else:
                loaded.append(
                    _loaded_job(job, scoring_job, trajectory, matched[scoring_job.trajectory_id].feedback_set)
                )
                await asyncio.sleep(0)  # so that large trajectories do not block the event loop together
        return loaded

    async def _enter_results(self, processor: Processor) -> None:
        while True:
            completed = [await self._completed.get()]
            while not self._completed.empty():  # this ends: no result is added before the next await
                completed.append(self._completed.get_nowait())
            try:
                await processor.step(self.result_step(completed))
            except StepFailed as error:  # the leases of these jobs expire, and the functions are called again
                log.exception("results_postponed", error=str(error))

    def result_step(self, completed: Sequence[CompletedJob]) -> Step:
        """Return the transaction step that enters the results of jobs in the ledger and publishes experiences that are
        ready.

        If the results of a job cannot be entered, the step enters a failed reward of each function. If that fails as
        well, it dead-letters the trajectory.
        """

        async def step(tx: AsyncConnection, now: datetime) -> list[Event]:
            for item in completed:
                self._leased.pop(item.job.job_id, None)

            async def enter_jobs(jobs: Sequence[CompletedJob]) -> Sequence[Event]:
                return await self._enter_jobs(tx, now, jobs)

            async def fail(item: CompletedJob, reason: str) -> Sequence[Event]:
                failed = dict.fromkeys(item.outcomes, Outcome.failed(reason))
                return await self._enter_jobs(tx, now, [replace(item, outcomes=failed)])

            async def drop(item: CompletedJob, reason: str) -> Sequence[Event]:
                return await self._drop(tx, item.job, reason)

            return await process_batch(tx, "scorer.enter", completed, enter_jobs, fail, drop)

        return step

    async def _drop(self, tx: AsyncConnection, job: Job, reason: str) -> Sequence[Event]:
        """End a job without a result, and dead-letter its trajectory."""
        if not await self._jobs.finish(tx, job):
            return ()
        return await store.fail_scoring(tx, job.job_id.rpartition("/")[0], reason)

    async def _enter_jobs(self, tx: AsyncConnection, now: datetime, completed: Sequence[CompletedJob]) -> list[Event]:
        finished = await self._jobs.finish(tx, *(item.job for item in completed))
        entered = [item for item in completed if item.job.job_id in finished]
        scores = await self._scores.open(tx, dict.fromkeys(item.scoring_job.trajectory_id for item in entered))
        rewards: list[Event] = []
        for item in entered:
            score = scores.get(item.scoring_job.trajectory_id)
            if score is not None:
                rewards += self._enter_outcomes(now, score, item.scoring_job, item.outcomes)
        return [*rewards, *await self._scores.emit_if_ready(tx, now, scores.values(), self.policy)]

    def _enter_outcomes(
        self, now: datetime, score: TrajectoryScore, scoring_job: ScoringJob, outcomes: dict[str, Outcome]
    ) -> list[Reward]:
        current = score.row["inputs"] == scoring_job.inputs
        outdated = set() if current else {function.name for function in self.functions if function.reads_feedback}
        rewards = [
            reward
            for name, outcome in outcomes.items()
            if name not in outdated
            for reward in function_rewards(score, now, f"function:{name}", outcome)
        ]
        ledger.add_rewards(now, rewards, score.entries)
        if current:
            score.change(scored_inputs=scoring_job.inputs)
        return rewards


def _loaded_job(job: Job, scoring_job: ScoringJob, trajectory: Trajectory, feedback_set: FeedbackSet) -> LoadedJob:
    feedback = tuple(event.to_json().decode() for event in feedback_set.all)
    context = feedback_set.context(trajectory.context)
    return LoadedJob(job, scoring_job, trajectory.tenant, trajectory.to_json(), feedback, context)

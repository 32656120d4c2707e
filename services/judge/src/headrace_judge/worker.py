"""The queue of judgements: the handler that fills it from the topic `trajectories`, and the worker that empties it.

The worker leases jobs, judges them, and commits each reward together with the removal of its job. The handler does not
call the model. A job that failed because of the endpoint returns to the queue, where it occupies no slot and survives a
restart. The leases of a worker that dies expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge.call_budget import TenantCircuitBreakers
from headrace_judge.endpoint import OWN_SESSIONS, CallRefused, CallTimedOut, EndpointUnavailable
from headrace_judge.metrics import IN_PROGRESS, OUTCOMES, RETRIES, SHORTENED, TIES_BY_ORDER
from headrace_judge.model_judge import BudgetSpent, ModelJudge
from headrace_judge.pairwise import PairwiseComparisons
from headrace_judge.rubric import Rubric
from headrace_judge.run_transcript import transcript_of
from headrace_judge.scoring import Judgement
from headrace_judge.settings import JudgeSettings
from headrace_judge.tables import TASK, VERDICT_JOB, PairTask, RunToJudge, SingleTask, Subject, Task, transact
from headrace_runtime.http.web import RETRIED, Sources
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process import logs
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import each, is_fatal, reason_of
from headrace_runtime.stream.jobs import Job, Jobs, kind_of_tenant
from headrace_runtime.stream.processor import Handling, Processor, StepFailed
from headrace_schemas import Event, Reward, Trajectory
from headrace_schemas.values.ids import derived_id, tenant_name

QUEUE_MAX = 50_000
"""Trajectories and pairs that may wait in the database. If the queue is full, the judge abstains."""

_QUEUED_TENANTS_MAX = 64


class TrajectoryHandler:
    """Stream handler that stores a job for each trajectory and rubric; the worker judges them later.

    Args:
        judged_by: name of the judge in the rewards of each rubric, by the rubric's name.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        rubrics: Mapping[str, Rubric],
        judged_by: Mapping[str, str],
        jobs: Jobs,
        pairwise: PairwiseComparisons,
    ) -> None:
        self._settings = settings
        self._rubrics = rubrics
        self._judged_by = judged_by
        self._jobs = jobs
        self._pairwise = pairwise
        self._counted_in: AsyncConnection | None = None
        self._waiting = 0

    async def __call__(self, trajectory: Trajectory, handling: Handling) -> list[Reward]:
        """Queue a trajectory for each rubric, and return abstentions for the rubrics by which it will not be judged.

        Evaluation trajectories that are not judged get no reward, because an abstention would count as a failure there.
        Shadow trajectories are judged like those of users, but not in pairs, which are only for training.
        """
        shadow = trajectory.shadow_of is not None
        if self._is_own_call(trajectory) or (
            trajectory.purpose == "eval" and not self._settings.judge_eval and not shadow
        ):
            return []
        rewards = []
        for rubric in self._rubrics.values():
            if shadow and rubric.mode == "pair":
                continue
            reason = await self._queue(trajectory, rubric, handling)
            if reason is not None:
                judgement = Judgement(outcome="abstained", reason=reason)
                subject = Subject.of(trajectory, rubric.name)
                rewards.append(subject.reward(judgement, handling.now, self._judged_by[rubric.name]))
                OUTCOMES.labels(rubric.source, "abstained").inc()
        return rewards

    async def _queue(self, trajectory: Trajectory, rubric: Rubric, handling: Handling) -> str | None:
        """Queue a trajectory for a rubric, or return the reason why it is not judged."""
        rate = self._settings.sample_rate
        if trajectory.purpose == "train" and not is_sampled(trajectory.trajectory_id, rate):
            return f"not in the sample (judge.sample_rate = {rate:g})"
        run = transcript_of(trajectory, rubric)
        if run is None:
            return "the trajectory has no message or call of the model among the parts that the rubric shows"
        if rubric.mode == "pair" and trajectory.task_id is None:
            return "the trajectory has no task_id, so there is nothing to compare it with"
        if await self._is_full(handling.tx, trajectory.tenant):
            return f"the queue is full ({QUEUE_MAX} jobs)"
        SHORTENED.labels(rubric.source).inc(run.shortened)
        subject = Subject.of(trajectory, rubric.name, handling.received.envelope.traceparent)
        case = RunToJudge(subject=subject, run=run)
        if rubric.mode == "pair":
            return await self._pairwise.add_run(handling.tx, handling.now, case, trajectory)
        name = tenant_name(trajectory.tenant, trajectory.trajectory_id)
        job_id = derived_id("judge-verdict", rubric.name, name)
        kind = kind_of_tenant(VERDICT_JOB, trajectory.tenant)
        await self._jobs.enqueue(handling.tx, job_id, kind, SingleTask(case=case).to_json(), handling.now)
        return None

    async def _is_full(self, tx: AsyncConnection, tenant: str) -> bool:
        """Return whether the queue accepts no further job of the tenant.

        A queue that is full of other tenants' jobs still accepts the tenant's equal share. The queue is counted once
        per transaction; jobs that this transaction adds are counted in memory.
        """
        queue_max = QUEUE_MAX
        if tx is not self._counted_in:
            self._counted_in = tx
            self._waiting = await self._jobs.count(tx, VERDICT_JOB, 2 * queue_max)
        self._waiting += 1
        if self._waiting <= queue_max or self._waiting > 2 * queue_max:
            return self._waiting > queue_max
        tenants = {tenant, *await self._jobs.tenants(tx, VERDICT_JOB, "", _QUEUED_TENANTS_MAX)}
        full = await self._jobs.count_exactly(tx, kind_of_tenant(VERDICT_JOB, tenant)) >= queue_max // len(tenants)
        self._waiting -= full
        return full

    def _is_own_call(self, trajectory: Trajectory) -> bool:
        """Return whether the trajectory is a call of the judge itself, which would be judged by further calls without
        end.
        """
        own_session = trajectory.session_id.startswith(OWN_SESSIONS) and trajectory.purpose == "eval"
        return own_session and self._settings.endpoint.is_gateway


def is_sampled(trajectory_id: str, rate: float) -> bool:
    """Return whether a trajectory is in the judged sample, a fraction `rate` of all, which is chosen by a hash of the
    id.
    """
    digest = hashlib.sha256(trajectory_id.encode()).digest()[:8]
    return int.from_bytes(digest, "big") < rate * 2**64


log = get_logger(__name__)
_POLL_S = 0.25
_LEASED_TENANTS_MAX = 32
BACKOFF_S = 1.0
"""Wait after the first failure. It grows fourfold with each failure, up to five minutes."""
_BACKOFF_MAX_S = 300.0
"""Longest wait that the judge chooses itself: an endpoint that is back is used within five minutes."""
_GROWTH = 4.0


class JudgeWorker:
    """Worker that leases jobs from the queue, and judges up to `endpoint.concurrency` of them at a time."""

    def __init__(
        self,
        settings: JudgeSettings,
        rubrics: Mapping[str, Rubric],
        judged_by: Mapping[str, str],
        jobs: Jobs,
        pairwise: PairwiseComparisons,
        processor: Processor,
        model_judge: ModelJudge,
        breakers: TenantCircuitBreakers,
        sources: Sources,
    ) -> None:
        self._settings = settings
        self._rubrics = rubrics
        self._judged_by = judged_by
        self._jobs = jobs
        self._pairwise = pairwise
        self._processor = processor
        self._model_judge = model_judge
        self._breakers = breakers
        self._last_tenant = ""
        self._sources = sources
        self._lease = timedelta(seconds=settings.lease_s)
        self._running: set[Job] = set()
        self._freed = asyncio.Event()

    async def run(self) -> None:
        """Judge queued tasks until cancelled.

        Raises errors that require a restart; the leases of running jobs then expire.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            while True:
                self._freed.clear()
                jobs = await self._lease_jobs()
                for job in jobs:
                    self._running.add(job)
                    group.create_task(self._work_isolated(job))
                IN_PROGRESS.set(len(self._running))
                if not jobs:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await self._freed.wait()

    async def _lease_jobs(self) -> list[Job]:
        limit = self._settings.endpoint.concurrency - len(self._running)
        if limit < 1:
            return []
        return await transact(self._processor, lambda tx, now: self._lease_in_turn(tx, now, limit))

    async def _lease_in_turn(self, tx: AsyncConnection, now: datetime, limit: int) -> list[Job]:
        """Lease up to `limit` jobs from the queue, shared equally among tenants.

        A tenant whose circuit breaker is open gets fewer.
        """
        leased: list[Job] = []
        tenants = await self._jobs.tenants(tx, VERDICT_JOB, self._last_tenant, _LEASED_TENANTS_MAX)
        for left, tenant in zip(range(len(tenants), 0, -1), tenants, strict=True):
            part = math.ceil((limit - len(leased)) / left)
            if not part:
                break
            kind = kind_of_tenant(VERDICT_JOB, tenant)
            running = sum(job.kind == kind for job in self._running)
            admitted = min(part, self._breakers.of(tenant).free_slots(running, running + part))
            if admitted > 0:
                self._last_tenant = tenant
                leased += await self._jobs.lease(tx, kind, now, self._lease, admitted)
        return leased

    async def _renew(self) -> None:
        async def renew(tx: AsyncConnection, now: datetime) -> None:
            for job in list(self._running):
                await self._jobs.postpone(tx, job, now + self._lease)

        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            if self._running:
                await transact(self._processor, renew)

    async def _work_isolated(self, job: Job) -> None:
        """Process a job. If its step fails, only log the error; the job is retried after its lease expires."""
        try:
            await self._work(job)
        except StepFailed as error:
            log.error("judging_postponed", job_id=job.job_id, kind=type(error.__cause__).__name__)

    async def _work(self, job: Job) -> None:
        try:
            task = TASK.validate_json(job.payload)
        except ValueError as error:
            self._running.discard(job)
            reason = reason_of(error)
            await self._processor.step(lambda tx, _now: drop(tx, self._jobs, job, reason))
            return
        with logs.span(task.traceparent):
            try:
                result = await self._try(job, task)
            finally:
                self._running.discard(
                    job
                )  # before the job is changed in the database, so that its lease is not renewed
                self._freed.set()
            if isinstance(result, Judgement):
                await self._finish(job, task, result)
            else:
                RETRIES.inc()
                await transact(self._processor, lambda tx, now: self._jobs.postpone(tx, job, now + result))

    async def _try(self, job: Job, task: Task) -> Judgement | timedelta:
        """Judge a task, and return the judgement or, after a failure, the time to wait before the next attempt."""
        limit = self._settings.retry.attempts_max
        if job.attempts >= limit:
            return Judgement(outcome="failed", reason=f"given up: {limit} tries ended without a result")
        wait_s: float | None = None
        try:
            return await self._judge(task, job.kind.partition("/")[2])
        except EndpointUnavailable as error:
            reason, wait_s = str(error), error.wait_s
        except Exception as error:  # one task must not stop all others; it is retried, and fails in the end
            if is_fatal(error):
                raise
            reason = f"internal error: {type(error).__name__}"
            frames = traceback.format_tb(error.__traceback__, limit=-5)  # the message may quote the run
            log.error("judging_failed", kind=type(error).__name__, frames=frames)
        if job.attempts + 1 >= limit:
            return Judgement(outcome="failed", reason=f"{reason}; given up after {limit} tries")
        log.warning("judging_postponed", reason=reason, attempt=job.attempts + 1)
        self._sources.note(f"judge:{task.rubric}", RETRIED, reason)
        return timedelta(seconds=backoff_s(job.attempts, wait_s))

    async def _judge(self, task: Task, tenant: str) -> Judgement:
        rubric = self._rubrics.get(task.rubric)
        if rubric is None or rubric.mode != task.kind:
            return Judgement(
                outcome="abstained", reason=f"the settings have no rubric {task.rubric!r} of this mode now"
            )
        try:
            if not isinstance(task, PairTask):
                return await self._model_judge.judge_run(rubric, task.case.run, tenant)
            runs = await transact(self._processor, lambda tx, _now: self._pairwise.load_pair(tx, task))
            if runs is None:
                return Judgement(outcome="abstained", reason="the pair was deleted")
            return await self._model_judge.judge_pair(rubric, runs[0].run, runs[1].run, tenant)
        except BudgetSpent as error:
            return Judgement(outcome="abstained", reason=str(error))
        except CallTimedOut as error:
            return Judgement(outcome="timed_out", reason=str(error))
        except CallRefused as error:
            return Judgement(outcome="failed", reason=str(error))

    async def _finish(self, job: Job, task: Task, judgement: Judgement) -> None:
        """Publish the rewards of a job and remove it, unless its lease expired and another worker has the job."""
        judged_by = self._judged_by.get(task.rubric, self._settings.endpoint.model)
        rewards: list[Reward] = []

        async def finish(tx: AsyncConnection, now: datetime, judged: Judgement) -> Sequence[Reward]:
            rewards.clear()
            if await self._jobs.finish(tx, job):
                if isinstance(task, PairTask):
                    rewards.extend(await self._pairwise.record_judgement(tx, now, task, judged, judged_by))
                else:
                    rewards.append(task.case.subject.reward(judged, now, judged_by))
            return rewards

        async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            return await each(
                tx,
                "judge.finish",
                [judgement],
                lambda judged: finish(tx, now, judged),
                lambda _, reason: finish(tx, now, Judgement(outcome="failed", reason=reason)),
                lambda _, reason: drop(tx, self._jobs, job, reason),
            )

        await self._processor.step(step)
        self._sources.note(f"judge:{task.rubric}", judgement.outcome, judgement.reason)
        for reward in rewards:
            OUTCOMES.labels(reward.source, reward.outcome).inc()
        if rewards and isinstance(task, PairTask) and judgement.reason == "order":
            TIES_BY_ORDER.labels(rewards[0].source).inc()


async def drop(tx: AsyncConnection, jobs: Jobs, job: Job, reason: str) -> Sequence[Event]:
    """Remove a job that can never have a reward from the queue, and dead-letter its payload."""
    if not await jobs.finish(tx, job):
        return ()
    record = Record("trajectories", -1, -1, None, job.payload, (("ce_id", job.job_id.encode()),))
    return [dead_letter("judge", record, "judging_failed", reason)]


def backoff_s(attempts: int, wait_s: float | None) -> float:
    """Return the seconds to wait before the next attempt, which is at least the time that the endpoint requested.

    Args:
        attempts: number of earlier attempts.
        wait_s: seconds that the endpoint requested; None if it requested none.
    """
    delay_s = min(BACKOFF_S * _GROWTH ** min(attempts, 16), _BACKOFF_MAX_S)
    return max(delay_s, wait_s or 0.0)

"""Handler of the topic `trajectories`, which queues the trajectories that are judged. It does not call the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_judge.endpoint import OWN_SESSIONS
from headrace_judge.metrics import OUTCOMES, SHORTENED
from headrace_judge.pairwise import PairwiseComparisons
from headrace_judge.rubric import Rubric
from headrace_judge.run_transcript import transcript_of
from headrace_judge.scoring import Judgement
from headrace_judge.settings import JudgeSettings
from headrace_judge.tables import VERDICT_JOB, RunToJudge, SingleTask, Subject
from headrace_runtime.stream.jobs import Jobs, kind_of_tenant
from headrace_runtime.stream.processor import Handling
from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.ids import derived_id, tenant_name

QUEUE_MAX = 50_000
"""Trajectories and pairs that may wait in the database. If the queue is full, the judge abstains."""

_TENANTS_MAX = 64


class TrajectoryHandler:
    """Stream handler that queues trajectories for the worker.

    Args:
        judged_by: name of the judge for each rubric, as rewards contain it.
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
        """Queue a trajectory for each rubric. Return abstentions for rubrics by which it will not be judged.

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

        A queue that is full of other tenants' jobs still accepts the tenant's part. The queue is counted once per
        transaction; jobs that this transaction adds are counted in memory.
        """
        queue_max = QUEUE_MAX
        if tx is not self._counted_in:
            self._counted_in = tx
            self._waiting = await self._jobs.count(tx, VERDICT_JOB, 2 * queue_max)
        self._waiting += 1
        if self._waiting <= queue_max or self._waiting > 2 * queue_max:
            return self._waiting > queue_max
        tenants = {tenant, *await self._jobs.tenants(tx, VERDICT_JOB, "", _TENANTS_MAX)}
        full = await self._jobs.count_exactly(tx, kind_of_tenant(VERDICT_JOB, tenant)) >= queue_max // len(tenants)
        self._waiting -= full
        return full

    def _is_own_call(self, trajectory: Trajectory) -> bool:
        """Return whether the trajectory is a call of the judge itself. Judging these would never end."""
        own_session = trajectory.session_id.startswith(OWN_SESSIONS) and trajectory.purpose == "eval"
        return own_session and self._settings.endpoint.is_gateway


def is_sampled(trajectory_id: str, rate: float) -> bool:
    """Return whether a trajectory belongs to the judged sample, a share `rate` of all. The id alone decides."""
    digest = hashlib.sha256(trajectory_id.encode()).digest()[:8]
    return int.from_bytes(digest, "big") < rate * 2**64

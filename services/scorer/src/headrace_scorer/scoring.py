"""Calls of reward functions as jobs. The handler of a trajectory adds a job; the calls run outside its transaction.

A new job is leased to this process at once, and its functions may run before the handler's transaction has ended. If
that transaction fails, the result is discarded. The leases of a process that died run out, and another process does
the jobs again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

from pydantic import BaseModel, JsonValue
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.database import Database
from headrace_runtime.errors import Unavailable
from headrace_runtime.jobs import Job, Jobs
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor, Step
from headrace_runtime.sources import Sources
from headrace_schemas import Event, Reward, Trajectory
from headrace_scorer import ledger, schema, store
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
_DONE_MAX = 50


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
        self._held: set[str] = set()
        """Jobs that are leased to this process."""
        self._waiting: asyncio.Queue[LoadedJob] = asyncio.Queue(_QUEUE_MAX)
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
        if self._waiting.full():
            await self._jobs.enqueue(tx, job_id, _KIND, payload, now)
            return
        job = await self._jobs.start(tx, job_id, _KIND, payload, now + self._lease)
        if job is not None:
            self._held.add(job_id)
            self._waiting.put_nowait(_work(job, order, trajectory, feedback_set))

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
                outcomes[name] = outcome = await self._pool.call(call, work.trajectory)
                self.sources.note(f"function:{name}", outcome.outcome, outcome.reason)
        return work, outcomes

    async def _collect(self, processor: Processor) -> None:
        if processor.database.sqlite:  # one file, one process: the process that had the leases is dead
            async with processor.database.transaction() as tx:
                await self._jobs.release(tx, _KIND, processor.clock.now())
        while True:
            try:
                await self.take_over(processor.database, processor.clock.now())
            except Unavailable as error:
                log.warning("jobs_postponed", error=str(error))
            await processor.clock.sleep(min(_POLL_S, self._settings.lease_s / 3))

    async def take_over(self, database: Database, now: datetime) -> None:
        """Renew the leases of this process. Lease jobs that wait: those that did not fit, those of dead processes."""
        async with database.transaction() as tx:
            if self._held:
                await self._jobs.renew(tx, self._held, now + self._lease)
            await self._jobs.count(tx, _KIND)
            room = _QUEUE_MAX // 2 - self._waiting.qsize()
            leased = await self._jobs.lease(tx, _KIND, now, self._lease, room) if room > 0 else []
            found = [await self._read(tx, job) for job in leased]
        for work in found:
            self._held.add(work.job.job_id)
            await self._waiting.put(work)

    async def _read(self, tx: AsyncConnection, job: Job) -> LoadedJob:
        order = ScoringJob.model_validate_json(job.payload)
        trajectory = await self._cache.get(tx, order.trajectory_id)
        if trajectory is None:  # it was deleted meanwhile: nothing is called, and the job ends
            return LoadedJob(job, order.model_copy(update={"functions": ()}), b"", (), {})
        feedback_set, _ = await feedback_for(tx, trajectory)
        return _work(job, order, trajectory, feedback_set)

    async def _enter_results(self, processor: Processor) -> None:
        while True:
            done = [await self._done.get()]
            while not self._done.empty():  # bounded: nothing is added meanwhile
                done.append(self._done.get_nowait())
            await processor.step(self.enter(done))

    def enter(self, done: Sequence[Done]) -> Step:
        """The step that enters results in the ledger. It returns the rewards, and the experiences that are ready."""

        async def step(tx: AsyncConnection, now: datetime) -> list[Event]:
            events: list[Event] = []
            for work, outcomes in done:
                self._held.discard(work.job.job_id)
                if not await self._jobs.finish(tx, work.job):
                    continue
                score = await self._scores.open(tx, work.order.trajectory_id)
                if score is not None:
                    events += await self._enter_one(tx, now, score, work.order, outcomes)
            return events

        return step

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
    return LoadedJob(job, order, trajectory.to_json(), feedback, feedback_set.context(trajectory.context))


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

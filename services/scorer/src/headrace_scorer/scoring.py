"""Reward functions as jobs: added by the handler that keeps a trajectory, done outside its transaction, crash-safe.

A job is leased to this process as it is added, and its functions may run before its transaction has ended: the result
is refused when that never was. A process that dies lets its leases run out; then somebody else does the job again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
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
from headrace_scorer.accounts import Account, Book
from headrace_scorer.feedback_rewards import said_about
from headrace_scorer.functions.loading import Function
from headrace_scorer.functions.pool import Pool
from headrace_scorer.functions.protocol import Call
from headrace_scorer.functions.verdicts import Outcome
from headrace_scorer.joins import Said
from headrace_scorer.policy import Policy
from headrace_scorer.settings import Settings

log = get_logger(__name__)
_KIND = "score"
_POLL_S = 1.0
_QUEUE_MAX = 64
_DONE_MAX = 50


class Order(BaseModel):
    """A job's payload. `inputs` stands for what the functions are to see of feedback."""

    trajectory_id: str
    inputs: str
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A job with all that its functions read."""

    job: Job
    order: Order
    trajectory: bytes
    feedback: tuple[str, ...]
    context: dict[str, JsonValue]


Done = tuple[Work, dict[str, Outcome]]
"""A job and what each of its functions said."""


class Scoring:
    """Adds jobs for handlers, does them, and enters what came out."""

    def __init__(self, pool: Pool, settings: Settings, library: store.Library, book: Book) -> None:
        self._pool = pool
        self._settings = settings
        self._library = library
        self._book = book
        self.sources = Sources()
        """How each function fares."""
        self._jobs = Jobs(schema.stream)
        self._lease = timedelta(seconds=settings.lease_s)
        self._held: set[str] = set()
        """Jobs that are leased to this process."""
        self._waiting: asyncio.Queue[Work] = asyncio.Queue(_QUEUE_MAX)
        self._done: asyncio.Queue[Done] = asyncio.Queue(_DONE_MAX)

    @property
    def functions(self) -> Sequence[Function]:
        return self._pool.functions

    @property
    def policy(self) -> Policy:
        """With the functions that are loaded now."""
        settings = self._settings
        sources = [function.source for function in self.functions]
        return Policy(settings.weights, settings.required, settings.expected, sources)

    def inputs(self, said: Said) -> str:
        """Stands for what the functions see of feedback: when it changes, those that look have to look again."""
        seen: object = None
        if any("feedback" in function.parameters for function in self.functions):
            seen = [one.event_id for one in said.all]
        elif any("context" in function.parameters for function in self.functions):
            seen = said.context({})
        return sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16] if seen else ""

    async def add(self, tx: AsyncConnection, now: datetime, trajectory: Trajectory, said: Said, *, first: bool) -> None:
        """Have the functions called: all of them at `first`, later those that look at feedback."""
        names = tuple(function.name for function in self.functions if first or function.looks_at_feedback)
        if not names:
            return
        order = Order(trajectory_id=trajectory.trajectory_id, inputs=self.inputs(said), functions=names)
        job_id, payload = f"{order.trajectory_id}/{order.inputs}", order.model_dump_json().encode()
        if self._waiting.full():
            await self._jobs.enqueue(tx, job_id, _KIND, payload, now)
            return
        job = await self._jobs.start(tx, job_id, _KIND, payload, now + self._lease)
        if job is not None:
            self._held.add(job_id)
            self._waiting.put_nowait(_work(job, order, trajectory, said))

    def tasks(self, processor: Processor) -> Sequence[Awaitable[None]]:
        """To be run beside the stream, until cancelled."""
        callers = [self._call_functions() for _ in range(self._settings.function_workers)]
        return [self._collect(processor), *callers, self._enter_results(processor)]

    async def _call_functions(self) -> None:
        while True:
            await self._done.put(await self.perform(await self._waiting.get()))

    async def perform(self, work: Work) -> Done:
        """Call a job's functions, those that are still loaded, one after the other."""
        outcomes = {}
        for name in work.order.functions:
            if any(function.name == name for function in self.functions):
                call = Call(function=name, feedback=work.feedback, context=work.context)
                outcomes[name] = outcome = await self._pool.call(call, work.trajectory)
                self.sources.note(f"function:{name}", outcome.outcome, outcome.reason)
        return work, outcomes

    async def _collect(self, processor: Processor) -> None:
        if processor.database.sqlite:  # one file, one process: whoever had leased is dead
            async with processor.database.transaction() as tx:
                await self._jobs.release(tx, _KIND, processor.clock.now())
        while True:
            try:
                await self.take_over(processor.database, processor.clock.now())
            except Unavailable as error:
                log.warning("jobs_postponed", error=str(error))
            await processor.clock.sleep(min(_POLL_S, self._settings.lease_s / 3))

    async def take_over(self, database: Database, now: datetime) -> None:
        """Renew what is leased to this process, and lease what waits: what did not fit, and what a dead process had."""
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

    async def _read(self, tx: AsyncConnection, job: Job) -> Work:
        order = Order.model_validate_json(job.payload)
        trajectory = await self._library.get(tx, order.trajectory_id)
        if trajectory is None:  # forgotten meanwhile: nothing is called, and the job goes
            return Work(job, order.model_copy(update={"functions": ()}), b"", (), {})
        said, _ = await said_about(tx, trajectory)
        return _work(job, order, trajectory, said)

    async def _enter_results(self, processor: Processor) -> None:
        while True:
            done = [await self._done.get()]
            while not self._done.empty():  # bounded: nobody adds to it meanwhile
                done.append(self._done.get_nowait())
            await processor.step(self.enter(done))

    def enter(self, done: Sequence[Done]) -> Step:
        """The step that enters results in the ledger and returns rewards, and the experiences that they complete."""

        async def step(tx: AsyncConnection, now: datetime) -> list[Event]:
            events: list[Event] = []
            for work, outcomes in done:
                self._held.discard(work.job.job_id)
                if not await self._jobs.finish(tx, work.job):
                    continue
                account = await self._book.open(tx, work.order.trajectory_id)
                if account is not None:
                    events += await self._enter_one(tx, now, account, work.order, outcomes)
            return events

        return step

    async def _enter_one(
        self, tx: AsyncConnection, now: datetime, account: Account, order: Order, outcomes: dict[str, Outcome]
    ) -> list[Event]:
        current = account.row["inputs"] == order.inputs
        outdated = set() if current else {one.name for one in self.functions if one.looks_at_feedback}
        rewards = [_reward(account, now, name, outcome) for name, outcome in outcomes.items() if name not in outdated]
        await ledger.enter(tx, now, [(reward, None) for reward in rewards], account.entries)
        if current:
            account.change(scored_inputs=order.inputs)
        return [*rewards, *await self._book.settle(tx, now, account, self.policy)]


def _work(job: Job, order: Order, trajectory: Trajectory, said: Said) -> Work:
    feedback = tuple(one.to_json().decode() for one in said.all)
    return Work(job, order, trajectory.to_json(), feedback, said.context(trajectory.context))


def _reward(account: Account, now: datetime, name: str, outcome: Outcome) -> Reward:
    source = f"function:{name}"
    return Reward(
        time=now,
        trajectory_id=account.trajectory.trajectory_id,
        session_key=account.trajectory.session_key,
        tenant=account.trajectory.tenant,
        source=source,
        revision=account.entries.next_revision("", source),
        outcome=outcome.outcome,
        value=outcome.value,
        criteria=outcome.criteria,
        reason=outcome.reason,
        judged_by=outcome.judged_by,
    )

"""Runs the gate's program beside the director's decisions, and again when it fails: a trial and an audit at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import evaluation, store
from headrace_registry.evaluation import AuditRoom, PlaySession
from headrace_registry.gate import GateFailed
from headrace_registry.leader import LeaderLease
from headrace_registry.lifecycle import RunAudit, RunTrial
from headrace_registry.metrics import GATE_SECONDS
from headrace_registry.records import ALONE, ModelRecord
from headrace_registry.settings import GateSettings
from headrace_registry.transition import Transition
from headrace_registry.trial import Trial
from headrace_runtime.isolation import is_fatal, reason_of
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_schemas import Event

log = get_logger(__name__)


class GateProgram(Protocol):
    """The gate's program, as it is used here."""

    configured: bool
    sha256: str

    def session(self) -> AbstractAsyncContextManager[PlaySession]: ...


@dataclass(slots=True)
class Attempts:
    """How often the runs of each version were begun, and why the versions failed that used up `gate.attempts`."""

    begun: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    def clear(self) -> None:
        self.begun.clear()
        self.failed.clear()


RunKind = type[RunTrial] | type[RunAudit]
Keep = Callable[[AsyncConnection, Transition], Awaitable[None]]
"""Stores the result of a run."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The versions of a model that a run may play. A run that plays another one is abandoned."""

    trial: set[str | None]
    audit: set[str | None]


@dataclass(slots=True)
class _Run:
    versions: frozenset[str]
    """The versions that play."""
    task: asyncio.Task[None]
    played: bool = False
    """Only the result is still to be stored, so the run is not abandoned any more."""


class Runner:
    """Runs trials and audits and stores their results in the database.

    A trial does not wait for an audit: the audit goes on beside it with a share of its plays (`AuditRoom`), and all of
    them count once. The copies of a program on a Ray cluster take its CPUs, so there one run waits for the other.
    Failed attempts and the run itself are in memory only. The error that a trial spends of its family stays spent.
    """

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        program: GateProgram,
        settings: GateSettings,
        changed: Callable[[], None],
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._program = program
        self._settings = settings
        self._changed = changed
        self._runs: dict[tuple[str, RunKind], _Run] = {}
        trials = asyncio.Semaphore(1)
        audits = trials if settings.ray.workers else asyncio.Semaphore(1)
        self._turns: dict[RunKind, asyncio.Semaphore] = {RunTrial: trials, RunAudit: audits}
        self._audit_room = AuditRoom(settings.concurrency)
        self.trials = Attempts()
        self.audits = Attempts()

    def reap(self, model: str) -> None:
        """Remove runs that are done. Raises errors that should end the process."""
        for kind in self._turns:
            run = self._runs.get((model, kind))
            if run is not None and run.task.done():
                del self._runs[model, kind]
                run.task.result()

    def abandon(self, model: str, roles: Roles) -> None:
        """Cancel runs of which a version has lost its role."""
        for kind, allowed in ((RunTrial, roles.trial), (RunAudit, roles.audit)):
            run = self._runs.get((model, kind))
            if run is not None and not run.played and not allowed >= run.versions:
                log.info("gate_run_abandoned", versions=sorted(run.versions))
                run.task.cancel()
                del self._runs[model, kind]

    def begin(self, model: str, action: RunTrial | RunAudit) -> None:
        """Start the run of the plan, unless the model has one of its kind. Call `reap` before the plan is made, so that
        no run is started again that has just ended.
        """
        kind = type(action)
        if (model, kind) in self._runs:
            return
        if isinstance(action, RunTrial):
            versions = {name for name in (action.version, action.champion, action.anchor) if name}
            work = self._guarded((model, kind), action.version, self.trials, lambda: self._try(model, action))
        else:
            versions = {action.version}
            work = self._guarded((model, kind), action.version, self.audits, lambda: self._measure(action.version))
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._changed())
        self._runs[model, kind] = _Run(frozenset(versions), task)

    async def stop(self) -> None:
        """What was under way is forgotten: who leads again begins it anew."""
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runs.clear()

    async def _guarded(
        self, key: tuple[str, RunKind], version: str, tries: Attempts, play: Callable[[], Awaitable[Keep]]
    ) -> None:
        async with self._turns[key[1]]:
            tries.begun[version] += 1
            log.info("gate_run", version=version, attempt=tries.begun[version])
            started_s = self._processor.clock.monotonic_s()
            outcome = "cancelled"
            try:
                keep = await play()
                outcome = "scored"
            except GateFailed as error:
                outcome = "failed"
                self._note_failure(tries, version, str(error))
            except Exception as error:
                if is_fatal(error):
                    raise
                outcome = "failed"
                log.exception("gate_broke", version=version)
                self._note_failure(tries, version, reason_of(error))
            finally:
                GATE_SECONDS.labels(outcome).observe(self._processor.clock.monotonic_s() - started_s)
            if outcome == "scored":
                self._runs[key].played = True
                await self._write(keep)

    def _note_failure(self, tries: Attempts, version: str, reason: str) -> None:
        log.warning("gate_failed", version=version, error=reason)
        if tries.begun[version] >= self._settings.attempts:
            tries.failed[version] = reason

    async def _write(self, keep: Keep) -> None:
        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            transition = Transition(tx, now)
            await keep(tx, transition)
            return await transition.finish()

        await self._processor.step(work)

    async def _try(self, model: str, action: RunTrial) -> Keep:
        number, record = await self._begin_trial(model)
        gate = self._settings
        trial = Trial(gate, number, action.version, action.champion, record.standing if action.anchor else ALONE)
        async with self._program.session() as session:
            with self._audit_room.trial():
                found = await evaluation.run_trial(
                    session, trial, concurrency=gate.concurrency, timeout_s=gate.timeout_s
                )
        result = replace(found, champion=record.champion)

        async def keep(_tx: AsyncConnection, transition: Transition) -> None:
            await transition.tried(action.version, self._program.sha256, result)

        return keep

    async def _begin_trial(self, model: str) -> tuple[int, ModelRecord]:
        begun: list[tuple[int, ModelRecord]] = []

        async def begin(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.model(tx, model)
            assert record is not None
            begun[:] = [(await Transition(tx, now).begin_trial(record), record)]
            return ()

        await self._processor.step(begin)
        return begun[0]

    async def _measure(self, version: str) -> Keep:
        gate = self._settings
        async with self._program.session() as session:
            found = await evaluation.run_audit(session, version, plays=gate.audit_tasks, room=self._audit_room)

        async def keep(tx: AsyncConnection, transition: Transition) -> None:
            record = await store.version(tx, version)
            assert record is not None
            await transition.evaluated(record, self._program.sha256, found.scores, found.statistics())

        return keep

"""Runs trials and audits of the gate as separate tasks, repeats failed runs, and stores the results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.gate import evaluation
from headrace_registry.gate.evaluation import AuditLimiter, PlaySession
from headrace_registry.gate.gate import GateFailed
from headrace_registry.gate.trial import Trial
from headrace_registry.metrics import GATE_SECONDS
from headrace_registry.settings import GateSettings
from headrace_registry.storage import store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, ModelRecord
from headrace_registry.versions.lifecycle import RunAudit, RunTrial
from headrace_registry.versions.transition import Transition
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event

log = get_logger(__name__)


class GateProgram(Protocol):
    """The gate's program: it can be started in advance, and opens sessions that play tasks."""

    configured: bool
    sha256: str

    def session(self, *, use_spare: bool = False) -> AbstractAsyncContextManager[PlaySession]: ...

    def prepare(self) -> None: ...


@dataclass(slots=True)
class Attempts:
    """Attempts that each version has begun, and the error of each version that has used up its attempts."""

    begun: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    def clear(self) -> None:
        self.begun.clear()
        self.failed.clear()


RunKind = type[RunTrial] | type[RunAudit]
StoreResult = Callable[[AsyncConnection, Transition], Awaitable[None]]
"""Function that stores the result of a run in a transaction."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Versions of a model that have a role. A run in which a version without a role plays is cancelled."""

    champion: str | None
    previous: str | None
    candidate: str | None
    anchor: str | None

    def of(self, kind: RunKind) -> set[str | None]:
        """Return the versions that may play in runs of one kind: trials, or audits."""
        if kind is RunAudit:
            return {self.champion, self.previous}
        return {self.champion, self.candidate, self.anchor}


@dataclass(slots=True)
class _Run:
    versions: frozenset[str]
    """Versions that play in the run."""
    task: asyncio.Task[None]
    played: bool = False
    """Whether all plays have ended and the result is about to be stored, so that the run is not cancelled any more."""


class GateRunner:
    """Runs trials of candidates and audits of champions, and stores their results.

    A trial and an audit may run at the same time; `AuditLimiter` limits the plays of the audit. If copies of the
    program run on a Ray cluster, one waits for the other, because both need the same CPUs. Progress and the number of
    failed runs are stored only in memory. The error probability that a trial has spent stays spent if it is repeated.
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
        self._audit_limiter = AuditLimiter(settings.concurrency)
        self._overtaken: set[str] = set()
        """Models whose audit under way measures the champion before the present one."""
        self.trials = Attempts()
        self.audits = Attempts()

    def reap(self, model: str) -> None:
        """Remove the runs of a model that have ended. Raises errors of runs that must end the process."""
        for kind in self._turns:
            run = self._runs.get((model, kind))
            if run is not None and run.task.done():
                del self._runs[model, kind]
                run.task.result()

    def follow_roles(self, model: str, roles: Roles) -> None:
        """Cancel runs in which a version plays that has lost its role. Give audits priority if the former champion is
        being audited.

        Without the priority, the next promotion would cancel that audit, so that no version would ever be measured if
        trials follow each other without a pause.
        """
        for kind in self._turns:
            run = self._runs.get((model, kind))
            if run is not None and not run.played and not roles.of(kind) >= run.versions:
                log.info("gate_run_abandoned", versions=sorted(run.versions))
                run.task.cancel()
                del self._runs[model, kind]
        audit = self._runs.get((model, RunAudit))
        if audit is not None and roles.champion not in audit.versions:
            self._overtaken.add(model)
        else:
            self._overtaken.discard(model)
        self._audit_limiter.prioritize_audits(bool(self._overtaken))

    def begin(self, model: str, action: RunTrial | RunAudit) -> None:
        """Start a trial or an audit, unless a run of this kind is in progress for the model.

        Call `reap` before the action is chosen, so that a run that has just ended is not started again.
        """
        kind = type(action)
        if (model, kind) in self._runs:
            return
        if isinstance(action, RunTrial):
            versions = {name for name in (action.version, action.champion, action.anchor) if name}
            work = self._run_attempts(
                (model, kind), action.version, self.trials, lambda: self._run_trial(model, action)
            )
        else:
            versions = {action.version}
            work = self._run_attempts(
                (model, kind), action.version, self.audits, lambda: self._run_audit(action.version)
            )
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._changed())
        self._runs[model, kind] = _Run(frozenset(versions), task)

    async def stop(self) -> None:
        """Cancel all runs. The next leader starts them again from the beginning."""
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runs.clear()

    async def _run_attempts(
        self, key: tuple[str, RunKind], version: str, attempts: Attempts, run: Callable[[], Awaitable[StoreResult]]
    ) -> None:
        async with self._turns[key[1]]:
            attempts.begun[version] += 1
            log.info("gate_run", version=version, attempt=attempts.begun[version])
            started_s = self._processor.clock.monotonic_s()
            outcome = "cancelled"
            try:
                store_result = await run()
                outcome = "scored"
            except GateFailed as error:
                outcome = "failed"
                self._note_failure(attempts, version, str(error))
            except Exception as error:
                if is_fatal(error):
                    raise
                outcome = "failed"
                log.exception("gate_broke", version=version)
                self._note_failure(attempts, version, reason_of(error))
            finally:
                GATE_SECONDS.labels(outcome).observe(self._processor.clock.monotonic_s() - started_s)
            if outcome == "scored":
                self._runs[key].played = True
                await self._write(store_result)
                self._program.prepare()

    def _note_failure(self, tries: Attempts, version: str, reason: str) -> None:
        log.warning("gate_failed", version=version, error=reason)
        if tries.begun[version] >= self._settings.attempts:
            tries.failed[version] = reason

    async def _write(self, store_result: StoreResult) -> None:
        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            transition = Transition(tx, now)
            await store_result(tx, transition)
            return await transition.finish()

        await self._processor.step(work)

    async def _run_trial(self, model: str, action: RunTrial) -> StoreResult:
        number, record = await self._begin_trial(model)
        gate = self._settings
        trial = Trial(
            gate, number, action.version, action.champion, record.anchor_state if action.anchor else CHAMPION_IS_ANCHOR
        )
        started_s = self._processor.clock.monotonic_s()
        async with self._program.session(use_spare=True) as session:
            ready_s = self._processor.clock.monotonic_s() - started_s
            log.info("gate_ready", version=action.version, seconds=round(ready_s, 2))
            with self._audit_limiter.trial():
                trial_result = await evaluation.run_trial(
                    session, trial, concurrency=gate.concurrency, timeout_s=gate.timeout_s
                )
        stored_result = replace(trial_result, champion=record.champion)

        async def keep(_tx: AsyncConnection, transition: Transition) -> None:
            await transition.record_trial_result(action.version, self._program.sha256, stored_result)

        return keep

    async def _begin_trial(self, model: str) -> tuple[int, ModelRecord]:
        begun: list[tuple[int, ModelRecord]] = []

        async def begin(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.load_model(tx, model)
            assert record is not None
            begun[:] = [(await Transition(tx, now).begin_trial(record), record)]
            return ()

        await self._processor.step(begin)
        return begun[0]

    async def _run_audit(self, version: str) -> StoreResult:
        gate = self._settings
        async with self._program.session() as session:
            audit = await evaluation.run_audit(session, version, plays=gate.audit_tasks, limiter=self._audit_limiter)

        async def keep(tx: AsyncConnection, transition: Transition) -> None:
            record = await store.load_version(tx, version)
            assert record is not None
            await transition.record_audit(record, self._program.sha256, audit.scores, audit.statistics())

        return keep

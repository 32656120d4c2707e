"""Carries out the actions of `lifecycle.plan`: one transaction per action; gate runs run beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import lifecycle, probe, store
from headrace_registry.leader import LeaderLease
from headrace_registry.lifecycle import (
    Action,
    Adopt,
    BeginRollout,
    Probed,
    Promote,
    Reject,
    Release,
    RollBack,
    RunAudit,
    RunTrial,
    Situation,
    Wait,
)
from headrace_registry.metrics import WAITING
from headrace_registry.records import ModelRecord, ModelView
from headrace_registry.rollouts import steps
from headrace_registry.rollouts.conductor import Conductor
from headrace_registry.rollouts.machine import NotAllowed
from headrace_registry.rollouts.reports import Reports
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.runner import GateProgram, Roles, Runner
from headrace_registry.settings import RegistrySettings
from headrace_registry.shadow.runner import ShadowAnswers, ShadowRunner
from headrace_registry.transition import Transition
from headrace_runtime.isolation import Isolated
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_schemas import Event, Replica

log = get_logger(__name__)
_REASON_MAX = 500
_STEPS_MAX = 100
"""Actions for one model in one tick; a plan that never waits is a bug."""


class Director:
    """Decides about all models. `tick` after every change and periodically; one task at a time may call it.

    Two things are in memory only and start again after a crash: how long replicas have been loading a candidate, and
    the runs of the gate.
    """

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        gate: GateProgram,
        settings: RegistrySettings,
        replicas: Callable[[], Iterable[Replica]],
        watching: Callable[[bool], bool] = lambda _wanted: False,
        reports: Reports | None = None,
        answers: ShadowAnswers | None = None,
    ) -> None:
        """`watching` is told whether live traffic is to be read, and answers whether it is. `reports` takes a picture
        of each step of a rollout. `answers` are those of a shadow, None where nobody may be asked."""
        self._processor = processor
        self._lease = lease
        self._gate = gate
        self._settings = settings
        self._replicas = replicas
        self._patience: dict[str, tuple[str, float]] = {}
        self.wake = asyncio.Event()
        """Set it when something has changed."""
        self._runner = Runner(processor, lease, gate, settings.gate, self.wake.set)
        self._conductor = Conductor(processor, lease, settings.rollout, replicas, reports)
        self._shadow = answers and ShadowRunner(processor, lease, settings.rollout, answers, self.wake.set)
        self._deciding = Isolated("registry.decide")
        self._conducting = Isolated("registry.rollouts")
        self._shadowing = Isolated("registry.shadow")
        self._watching = watching
        self._watched: dict[str, bool] = {}
        """Models, and whether they need live traffic."""

    async def run(self) -> None:
        """Run until cancelled; gate runs end with it."""
        try:
            while True:
                self.wake.clear()
                await self.tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.poll_s):
                        await self.wake.wait()
        finally:
            await self._runner.stop()
            if self._shadow:
                await self._shadow.stop()

    async def tick(self) -> None:
        """Carry out all actions that are possible now, for every model."""
        models: list[str] = []

        async def list_models(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            models.extend(await store.model_names(tx))
            return ()

        await self._processor.step(list_models)
        for model in models:
            reject = partial(self._reject_candidate, model)
            await self._deciding.run(model, partial(self._decide, model), None, reject)
            if await self._conducting.run(model, partial(self._conductor.tick, model), False):
                await self._deciding.run(model, partial(self._decide, model), None, reject)
            if self._shadow:
                await self._shadowing.run(model, partial(self._shadow.tick, model), None)

    async def _reject_candidate(self, model: str, reason: str) -> None:
        """End the candidate of a model about which nothing can be decided, so that the next one gets its turn."""

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.model(tx, model)
            if record is None or record.candidate is None:
                return ()
            transition = Transition(tx, now)
            await transition.reject(record, record.candidate, f"deciding about it failed: {reason}"[:_REASON_MAX], {})
            return await transition.finish()

        await self._processor.step(work)

    async def _decide(self, model: str) -> None:
        for _ in range(_STEPS_MAX):
            self._runner.reap(model)
            action, audit, roles = await self._step(model)
            self._runner.abandon(model, roles)
            if isinstance(action, RunTrial | RunAudit):
                self._runner.begin(model, action)
            if isinstance(action, RunTrial) and audit is not None:
                self._runner.begin(model, audit)
            if isinstance(action, RunTrial | RunAudit | Wait):
                return
        raise AssertionError(f"the plan for model {model} never waits")

    async def _step(self, model: str) -> tuple[Action, RunAudit | None, Roles]:
        """Read, decide and write in one transaction. Returns the action, the audit that may run beside a trial, and the
        versions that have a role now."""
        taken: list[tuple[Action, RunAudit | None, Roles]] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.model(tx, model)
            assert record is not None
            view = await store.view(tx, record, self._gate.sha256, now=now)
            WAITING.labels(model).set(len(view.waiting))
            situation = self._situation(view, now)
            action = lifecycle.plan(view, situation)
            transition = Transition(tx, now)
            await _apply(action, record, view, transition, self._settings.rollout)
            after = await store.model(tx, model)
            assert after is not None
            roles = Roles({after.champion, after.candidate, after.anchor}, {after.champion, after.previous})
            taken[:] = [(action, lifecycle.next_audit(view, situation), roles)]
            return await transition.finish()

        await self._processor.step(work)
        action, audit, roles = taken[0]
        if isinstance(action, Adopt):
            self._runner.trials.clear()  # a gate that failed is tried again with the next candidate
            self._runner.audits.clear()
        if not isinstance(action, Wait | RunTrial | RunAudit):
            log.info("decided", model=model, action=type(action).__name__, version=getattr(action, "version", None))
        return action, audit, roles

    def _situation(self, view: ModelView, now: datetime) -> Situation:
        alive = probe.live(self._replicas(), now)
        rollout = self._settings.rollout
        wishes = [one for one in (*view.waiting, view.candidate) if one is not None and one.rollout]
        asked = {one.version: rollout.wanted(one.rollout).kind != "rolling" for one in wishes}
        rolls_out = rollout.kind != "rolling"
        soon = bool(view.candidate or view.waiting) and (rolls_out or any(asked.values()))
        self._watched[view.model.model] = view.under_way > 0 or soon
        return Situation(
            replicas=alive,
            gate=self._gate.configured,
            minimum_score=self._settings.gate.minimum_score,
            patience_over=self._patience_over(view, alive),
            failures=self._runner.trials.failed,
            unmeasured=self._runner.audits.failed,
            rollouts=asked,
            rolls_out=rolls_out,
            watching=self._watching(any(self._watched.values())),
            slots=rollout.slots,
            per_hour_max=rollout.versions_per_hour_max,
            updates_min=rollout.check_after_updates,
        )

    def _patience_over(self, view: ModelView, alive: Sequence[Replica]) -> bool:
        """Whether live replicas have had `probe_timeout_s` for this candidate. Time without any does not count."""
        model, candidate = view.model.model, view.model.candidate
        now_s = self._processor.clock.monotonic_s()
        since = self._patience.get(model)
        if candidate is None or not alive or since is None or since[0] != candidate:
            self._patience[model] = (candidate or "", now_s)
            return False
        if probe.result(candidate, alive).state == "passed":
            self._patience[model] = (candidate, now_s)
        return now_s - since[1] > self._settings.probe_timeout_s


async def _apply(
    action: Action, model: ModelRecord, view: ModelView, transition: Transition, rollouts: RolloutSettings
) -> None:
    match action:
        case Adopt(version, skipped):
            await transition.adopt(model, version, skipped)
        case Probed(version, statistics):
            await transition.probed(model, version, statistics)
        case Promote(version, reason, statistics, standing):
            await transition.promote(model, version, reason, statistics, standing)
        case BeginRollout():
            await _begin(action, model, view, transition, rollouts)
        case Reject(version, reason, statistics, changed):
            await transition.reject(model, version, reason, statistics, changed)
        case Release(version):
            await transition.release(model, version)
        case RollBack(reason):
            await transition.roll_back(model, reason)
        case RunTrial() | RunAudit() | Wait():
            pass


async def _begin(
    action: BeginRollout, model: ModelRecord, view: ModelView, transition: Transition, rollouts: RolloutSettings
) -> None:
    wish = rollouts.wanted(view.versions[action.version].rollout)
    try:
        plan = rollouts.plan(wish)
        await steps.begin(
            transition,
            model,
            action.version,
            wish.kind or rollouts.kind,
            plan,
            standing=action.standing,
            reason=action.reason,
            statistics=action.statistics,
        )
    except (NotAllowed, ValueError) as error:
        await transition.reject(model, action.version, str(error), action.statistics)

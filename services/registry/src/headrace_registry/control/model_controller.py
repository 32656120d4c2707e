"""Controller of the models. It carries out the actions that `lifecycle.plan` chooses, each in one transaction. Runs of
the gate are separate tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.control import steps
from headrace_registry.control.rollout_controller import RolloutController
from headrace_registry.control.rollout_reports import ReportWriter
from headrace_registry.gate.gate_runner import GateProgram, GateRunner, Roles
from headrace_registry.metrics import WAITING
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.rollouts.state_machine import NotAllowed
from headrace_registry.settings import RegistrySettings
from headrace_registry.shadow.runner import ShadowAnswers, ShadowRunner
from headrace_registry.storage import store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.records import ModelRecord, ModelView
from headrace_registry.versions import lifecycle, probe
from headrace_registry.versions.lifecycle import (
    Action,
    Adopt,
    BeginRollout,
    LifecycleInputs,
    Probed,
    Promote,
    Reject,
    Release,
    RollBack,
    RunAudit,
    RunTrial,
    Wait,
)
from headrace_registry.versions.transition import Transition
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import ItemIsolation
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event, Replica

log = get_logger(__name__)
_REASON_MAX = 500
_STEPS_MAX = 100
"""Maximum number of actions for one model in one tick. More actions mean that the plan has a bug, because it must end
in `Wait`."""


class ModelController:
    """Controller that decides about the versions of all models.

    Call `tick` after each change and at intervals, from one task at a time.

    The loading time of a candidate and the runs of the gate are stored only in memory, so they begin again after a
    crash.
    """

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        gate: GateProgram,
        settings: RegistrySettings,
        replicas: Callable[[], Iterable[Replica]],
        watching: Callable[[bool], bool] = lambda _enabled: False,
        reports: ReportWriter | None = None,
        answers: ShadowAnswers | None = None,
    ) -> None:
        """Create a controller.

        Args:
            replicas: function that returns the replicas with heartbeats on the bus.
            watching: function that switches reading of live traffic on or off, and returns whether it is being read.
            reports: writer of charts, one for each step of a rollout; None for no charts.
            answers: client that calls models and tools for shadows; None if no tenant allows shadows.
        """
        self._processor = processor
        self._lease = lease
        self._gate = gate
        self._settings = settings
        self._replicas = replicas
        self._load_waits: dict[str, tuple[str, float]] = {}
        self.wake = asyncio.Event()
        """Set this event after every change."""
        self._runner = GateRunner(processor, lease, gate, settings.gate, self.wake.set)
        self._rollout_controller = RolloutController(processor, lease, settings.rollout, replicas, reports)
        self._shadow = answers and ShadowRunner(processor, lease, settings.rollout, answers, self.wake.set)
        self._isolated_decisions = ItemIsolation("registry.decide")
        self._isolated_rollouts = ItemIsolation("registry.rollouts")
        self._isolated_shadows = ItemIsolation("registry.shadow")
        self._watching = watching
        self._needs_traffic: dict[str, bool] = {}
        """Whether each model needs live traffic."""

    async def run(self) -> None:
        """Run until cancelled. Cancelling it also cancels the runs of the gate."""
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
        """Carry out all actions for all models that are possible now."""
        models: list[str] = []

        async def list_models(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            models.extend(await store.model_names(tx))
            return ()

        await self._processor.step(list_models)
        for model in models:
            reject = partial(self._reject_candidate, model)
            await self._isolated_decisions.run(model, partial(self._decide, model), None, reject)
            if await self._isolated_rollouts.run(model, partial(self._rollout_controller.tick, model), False):
                await self._isolated_decisions.run(model, partial(self._decide, model), None, reject)
            if self._shadow:
                await self._isolated_shadows.run(model, partial(self._shadow.tick, model), None)

    async def _reject_candidate(self, model: str, reason: str) -> None:
        """Reject a candidate because computing a decision about it has failed. Otherwise no later version could be
        tried."""

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.load_model(tx, model)
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
            self._runner.follow_roles(model, roles)
            if isinstance(action, RunTrial | RunAudit):
                self._runner.begin(model, action)
            if isinstance(action, RunTrial) and audit is not None:
                self._runner.begin(model, audit)
            if isinstance(action, RunTrial | RunAudit | Wait):
                return
        raise AssertionError(f"the plan for model {model} never waits")

    async def _step(self, model: str) -> tuple[Action, RunAudit | None, Roles]:
        """Load the state of a model, choose its next action, and carry it out, all in one transaction.

        Returns:
            The action, an audit that may run now even during a trial or None, and the versions with a role.
        """
        results: list[tuple[Action, RunAudit | None, Roles]] = []
        trial_ahead = False

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            nonlocal trial_ahead
            await self._lease.check(tx)
            record = await store.load_model(tx, model)
            assert record is not None
            view = await store.load_view(tx, record, self._gate.sha256, now=now)
            WAITING.labels(model).set(len(view.waiting))
            inputs = self._gather_inputs(view, now)
            action = lifecycle.plan(view, inputs)
            trial_ahead = isinstance(action, Adopt) or (isinstance(action, RunTrial) and bool(view.waiting))
            transition = Transition(tx, now)
            await _apply(action, record, view, transition, self._settings.rollout)
            updated = await store.load_model(tx, model)
            assert updated is not None
            roles = Roles(updated.champion, updated.previous, updated.candidate, updated.anchor)
            results[:] = [(action, lifecycle.next_audit(view, inputs), roles)]
            return await transition.finish()

        await self._processor.step(work)
        action, audit, roles = results[0]
        if trial_ahead:
            self._gate.prepare()  # does nothing if a copy of the program waits already
        if isinstance(action, Adopt):
            self._runner.trials.clear()  # a gate that failed is tried again with the next candidate
            self._runner.audits.clear()
        if not isinstance(action, Wait | RunTrial | RunAudit):
            log.info("decided", model=model, action=type(action).__name__, version=getattr(action, "version", None))
        return action, audit, roles

    def _gather_inputs(self, view: ModelView, now: datetime) -> LifecycleInputs:
        live_replicas = probe.live_replicas(self._replicas(), now)
        rollout = self._settings.rollout
        requested = [version for version in (*view.waiting, view.candidate) if version is not None and version.rollout]
        needs_rollout = {
            version.version: rollout.requested_rollout(version.rollout).kind != "rolling" for version in requested
        }
        rollouts_by_default = rollout.kind != "rolling"
        rollout_expected = bool(view.candidate or view.waiting) and (rollouts_by_default or any(needs_rollout.values()))
        self._needs_traffic[view.model.model] = view.under_way > 0 or rollout_expected
        return LifecycleInputs(
            replicas=live_replicas,
            gate=self._gate.configured,
            minimum_score=self._settings.gate.minimum_score,
            probe_timed_out=self._probe_timed_out(view, live_replicas),
            failures=self._runner.trials.failed,
            unmeasured=self._runner.audits.failed,
            rollouts=needs_rollout,
            rollouts_by_default=rollouts_by_default,
            watching=self._watching(any(self._needs_traffic.values())),
            slots=rollout.slots,
            per_hour_max=rollout.versions_per_hour_max,
            updates_min=rollout.check_after_updates,
        )

    def _probe_timed_out(self, view: ModelView, live_replicas: Sequence[Replica]) -> bool:
        """Return whether the live replicas have had `probe_timeout_s` to load and probe the candidate.

        Time in which no replica is alive does not count.
        """
        model, candidate = view.model.model, view.model.candidate
        now_s = self._processor.clock.monotonic_s()
        progress = self._load_waits.get(model)
        if candidate is None or not live_replicas or progress is None or progress[0] != candidate:
            self._load_waits[model] = (candidate or "", now_s)
            return False
        if probe.probe_result(candidate, live_replicas).state == "passed":
            self._load_waits[model] = (candidate, now_s)
        return now_s - progress[1] > self._settings.probe_timeout_s


async def _apply(
    action: Action, model: ModelRecord, view: ModelView, transition: Transition, rollouts: RolloutSettings
) -> None:
    match action:
        case Adopt(version, skipped):
            await transition.adopt(model, version, skipped)
        case Probed(version, statistics):
            await transition.mark_probed(model, version, statistics)
        case Promote(version, reason, statistics, anchor_state):
            await transition.promote(model, version, reason, statistics, anchor_state)
        case BeginRollout():
            await _begin_rollout(action, model, view, transition, rollouts)
        case Reject(version, reason, statistics, changed):
            await transition.reject(model, version, reason, statistics, changed)
        case Release(version):
            await transition.release(model, version)
        case RollBack(reason):
            await transition.roll_back(model, reason)
        case RunTrial() | RunAudit() | Wait():
            pass


async def _begin_rollout(
    action: BeginRollout, model: ModelRecord, view: ModelView, transition: Transition, rollouts: RolloutSettings
) -> None:
    rollout_wish = rollouts.requested_rollout(view.versions[action.version].rollout)
    try:
        plan = rollouts.plan(rollout_wish)
        await steps.begin(
            transition,
            model,
            action.version,
            rollout_wish.kind or rollouts.kind,
            plan,
            anchor_state=action.anchor_state,
            reason=action.reason,
            statistics=action.statistics,
        )
    except (NotAllowed, ValueError) as error:
        await transition.reject(model, action.version, str(error), action.statistics)

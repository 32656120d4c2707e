"""Carries out what `lifecycle.plan` says: one transaction per step, gate runs beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import lifecycle, probe, store
from headrace_registry.comparison import mean
from headrace_registry.gate import GateFailed
from headrace_registry.leader import Lease
from headrace_registry.ledger import Ledger
from headrace_registry.lifecycle import (
    Action,
    Adopt,
    Measure,
    Probed,
    Promote,
    Reject,
    Release,
    RollBack,
    Situation,
    Wait,
)
from headrace_registry.metrics import WAITING
from headrace_registry.records import ModelRecord, View
from headrace_registry.settings import RegistrySettings
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_schemas import Event, Replica

log = get_logger(__name__)
_STEPS_MAX = 100
"""Decisions about one model in one go; a plan that never comes to rest is a bug."""


class Player(Protocol):
    """The gate, as the director sees it."""

    configured: bool
    sha256: str

    async def play(self, version: str) -> dict[str, float]: ...


class Director:
    """Decides about all models. `tick` after every change and once in a while; one task at a time may call it.

    Kept in memory only, and so begun anew after a crash: how long replicas have been at a candidate, failed gate
    attempts, and the gate run itself.
    """

    def __init__(
        self,
        processor: Processor,
        lease: Lease,
        gate: Player,
        settings: RegistrySettings,
        replicas: Callable[[], Iterable[Replica]],
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._gate = gate
        self._settings = settings
        self._replicas = replicas
        self._patience: dict[str, tuple[str, float]] = {}
        self._runs: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._attempts: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._one_gate = asyncio.Semaphore(1)
        self.wake = asyncio.Event()
        """Set it when something has changed."""

    async def run(self) -> None:
        """Until cancelled, and gate runs with it."""
        try:
            while True:
                self.wake.clear()
                await self.tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.poll_s):
                        await self.wake.wait()
        finally:
            for _, task in self._runs.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._runs.values()), return_exceptions=True)

    async def tick(self) -> None:
        """Bring every model as far as it gets now."""
        models: list[str] = []

        async def list_models(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            models.extend(await store.model_names(tx))
            return ()

        await self._processor.step(list_models)
        for model in models:
            await self._settle(model)

    async def _settle(self, model: str) -> None:
        for _ in range(_STEPS_MAX):
            action, roles = await self._step(model)
            busy = self._still_measuring(model, roles)
            if isinstance(action, Measure) and not busy:
                self._measure(model, action.version)
            if isinstance(action, Measure | Wait):
                return
        raise AssertionError(f"model {model} does not come to rest")

    async def _step(self, model: str) -> tuple[Action, set[str | None]]:
        """Look, decide and write in one transaction; returns what was done and who is champion and candidate now."""
        taken: list[tuple[Action, set[str | None]]] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.model(tx, model)
            assert record is not None
            view = await store.view(tx, record, self._gate.sha256)
            WAITING.labels(model).set(len(view.waiting))
            action = lifecycle.plan(view, self._situation(view, now))
            ledger = Ledger(tx, now)
            await _apply(action, record, ledger)
            after = await store.model(tx, model)
            assert after is not None
            taken[:] = [(action, {after.champion, after.candidate})]
            return await ledger.finish()

        await self._processor.step(work)
        action, roles = taken[0]
        if isinstance(action, Adopt):
            self._failures.clear()  # a gate that failed gets its chance with the next candidate
            self._attempts.clear()
        if not isinstance(action, Wait | Measure):
            log.info("decided", model=model, action=type(action).__name__, version=getattr(action, "version", None))
        return action, roles

    def _situation(self, view: View, now: datetime) -> Situation:
        alive = probe.live(self._replicas(), now)
        rule = lifecycle.Gate(self._settings.gate.margin, self._settings.gate.minimum_score)
        return Situation(
            replicas=alive,
            gate=rule if self._gate.configured else None,
            patience_over=self._patience_over(view, alive),
            failures=self._failures,
        )

    def _patience_over(self, view: View, alive: Sequence[Replica]) -> bool:
        """Whether live replicas have had `probe_timeout_s` for this candidate; time without any does not count."""
        model, candidate = view.model.model, view.model.candidate
        now_s = self._processor.clock.monotonic_s()
        since = self._patience.get(model)
        if candidate is None or not alive or since is None or since[0] != candidate:
            self._patience[model] = (candidate or "", now_s)
            return False
        if probe.verdict(candidate, alive).state == "passed":
            self._patience[model] = (candidate, now_s)
        return now_s - since[1] > self._settings.probe_timeout_s

    def _still_measuring(self, model: str, roles: set[str | None]) -> bool:
        """Whether the gate is at work for `model`; a run whose version lost its role is abandoned."""
        version, task = self._runs.get(model, ("", None))
        if task is None:
            return False
        if task.done():
            del self._runs[model]
            task.result()  # raises what should end the process
            return False
        if version in roles:
            return True
        log.info("gate_run_abandoned", version=version)
        task.cancel()
        del self._runs[model]
        return False

    def _measure(self, model: str, version: str) -> None:
        task = asyncio.create_task(self._play(version))
        task.add_done_callback(lambda _: self.wake.set())
        self._runs[model] = (version, task)

    async def _play(self, version: str) -> None:
        async with self._one_gate:
            self._attempts[version] += 1
            log.info("gate_run", version=version, attempt=self._attempts[version])
            try:
                scores = await self._gate.play(version)
            except GateFailed as error:
                log.warning("gate_failed", version=version, error=str(error))
                if self._attempts[version] >= self._settings.gate.attempts:
                    self._failures[version] = str(error)
                return
        await self._record(version, scores)

    async def _record(self, version: str, scores: dict[str, float]) -> None:
        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.version(tx, version)
            assert record is not None
            ledger = Ledger(tx, now)
            numbers = {"score": mean(scores), "tasks": float(len(scores))}
            await ledger.evaluated(record, self._gate.sha256, scores, numbers)
            return await ledger.finish()

        await self._processor.step(work)


async def _apply(action: Action, model: ModelRecord, ledger: Ledger) -> None:
    match action:
        case Adopt(version, skipped):
            await ledger.adopt(model, version, skipped)
        case Probed(version, statistics):
            await ledger.probed(model, version, statistics)
        case Promote(version, reason, statistics):
            await ledger.promote(model, version, reason, statistics)
        case Reject(version, reason, statistics):
            await ledger.reject(model, version, reason, statistics)
        case Release(version):
            await ledger.release(model, version)
        case RollBack(reason):
            await ledger.roll_back(model, reason)
        case Measure() | Wait():
            pass

"""Controller of the rollouts of a model. It computes the metrics of units whose observation time is over, evaluates the
evidence, and applies decisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from functools import partial

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.control import steps
from headrace_registry.control.rollout_reports import ReportWriter, RolloutGauges, rollout_state
from headrace_registry.metrics import ROLLOUT_UNITS_READ, UNDER_WAY
from headrace_registry.rollouts import adaptive_split, state_machine
from headrace_registry.rollouts.evidence import Evidence, Findings
from headrace_registry.rollouts.findings import Expectations, prompt_kinds
from headrace_registry.rollouts.metrics import Metric, MetricFailed, compute_metrics
from headrace_registry.rollouts.plan import ReadingAge, UnitReading
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.rollouts.state_machine import RolloutDecision
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompt_reader import PromptReader, metric_pair
from headrace_registry.storage import rollout_store, store, unit_store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import ROLLOUTS
from headrace_registry.storage.unit_store import DueUnit
from headrace_registry.versions import probe
from headrace_registry.versions.transition import Transition
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import ItemIsolation
from headrace_runtime.stream.processor import Processor, Unfinished
from headrace_schemas import Event, Replica
from headrace_schemas.values.text import storable

_ROLLOUTS_KEPT_MAX = 50
"""Number of ended rollouts of a model whose readings (stored metric values) and charts are not deleted."""

log = get_logger(__name__)
_AT_ONCE_MAX = 20
"""Maximum number of units whose metrics one transaction computes."""
_READINGS_MAX = 2000
_SHARE_EVERY_UNITS = 20
"""Number of new units after which an adaptive split computes the shares again."""
_STORE_EVERY_S = 2.0
"""Seconds between two updates of a rollout's stored statistics and chart, if no decision is made."""
_REASON_MAX = 1000
_POINTS_MAX = 120
"""Maximum number of points of a chart. If there are more, every second point is removed."""


@dataclass(slots=True)
class _RolloutStatistics:
    """Statistics of one rollout in memory. After a restart they are computed again from the stored metric values."""

    evidence: Evidence
    last: int = 0
    """Number of the last stored reading that the statistics include."""
    last_prompt: int = -1
    """Number of the last prompt of the shadow that the statistics include."""
    shared_units: int = -_SHARE_EVERY_UNITS
    """Number of units at which an adaptive split last computed the shares."""
    shown_units: int = -1
    shown_s: float = 0.0
    chart: list[dict[str, object]] = field(default_factory=list)


class RolloutController:
    """Controller that decides about the rollouts of all models.

    Call `tick` after each round of the traffic reader, from one task at a time.
    """

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        settings: RolloutSettings,
        replicas: Callable[[], Iterable[Replica]],
        reports: ReportWriter | None = None,
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._settings = settings
        self._replicas = replicas
        self._prompts = PromptReader(processor, lease)
        self._reports = reports
        self._reported: dict[str, tuple[str, int, Fraction]] = {}
        """For each rollout with a report: phase, stage and share of the last one."""
        self._isolated = ItemIsolation("registry.rollout")
        self._gauges = RolloutGauges()
        self._statistics: dict[str, _RolloutStatistics] = {}
        self._cleared: set[str] = set()
        """Models without rows of ended rollouts that must still be deleted."""

    async def tick(self, model: str) -> bool:
        """Compute due metrics for the rollouts of a model, and decide about the rollouts. Return whether a decision was
        made."""
        async with self._processor.database.transaction() as tx:
            rollouts = await rollout_store.rollouts_under_way(tx, model)
        UNDER_WAY.labels(model).set(len(rollouts))
        self._gauges.remove_ended(model, rollouts)
        decided = False
        for rollout in rollouts:
            examine, hold = partial(self._examine, rollout), partial(self._hold, rollout)
            decided = await self._isolated.run(rollout.rollout_id, examine, False, hold) or decided
        if any(active.plan.split == "adaptive" for active in rollouts):
            decided = await self._share_out_traffic(model) or decided
        if self._reports is not None and (rollouts or self._reported):
            await self._write_reports(model, self._reports)
        if rollouts:
            self._cleared.discard(model)
        elif model not in self._cleared:
            await self._clear(model)
        return decided

    async def _examine(self, rollout: RolloutRecord) -> bool:
        """Compute the metrics of units that are due in one rollout, and decide about it. Return whether a decision was
        made."""
        try:
            await self._take_all_readings(rollout)
        except MetricFailed as error:  # a metric may come from another package: it ends its rollout, not the registry
            return await self._hold(rollout, str(error))
        return await self._decide(rollout)

    async def _hold(self, rollout: RolloutRecord, reason: str) -> bool:
        now = self._processor.clock.now()
        decision = RolloutDecision("hold", rollout.version, now, storable(reason[:_REASON_MAX]))
        return await self._apply_decision(rollout, decision)

    async def _take_all_readings(self, rollout: RolloutRecord) -> None:
        ages: list[ReadingAge] = [age for age in rollout.plan.reading_ages if age != "shadow"]
        metrics = (await self._load_statistics(rollout)).evidence.metrics
        if rollout.phase == "shadow":
            await self._prompts.read_due(rollout, metrics)
            return
        for readings_done, age in enumerate(ages):
            is_last = readings_done + 1 == len(ages)
            more = True
            while more:
                more = await self._take_readings(rollout, age, readings_done, metrics, is_last=is_last)

    async def _take_readings(
        self,
        rollout: RolloutRecord,
        age: ReadingAge,
        readings_done: int,
        metrics: Mapping[str, Metric],
        *,
        is_last: bool,
    ) -> bool:
        age_s = rollout.plan.age_s(age)
        failed: list[MetricFailed] = []
        expected = rollout.shadow.expectations
        new_readings: list[UnitReading] = []

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            units, has_more = await unit_store.due_units(tx, rollout, readings_done, round(age_s * 1000), _AT_ONCE_MAX)
            try:
                readings = await asyncio.to_thread(lambda: [_read_unit(unit, metrics, expected) for unit in units])
            except MetricFailed as error:
                failed[:] = [error]
                return ()
            await unit_store.add_readings(tx, rollout.rollout_id, age, readings, is_last=is_last)
            new_readings[:] = readings
            return Unfinished() if has_more else ()

        more = await self._processor.step(work)
        if failed:
            raise failed[0]
        for reading in new_readings if age == "maturity" else ():
            ROLLOUT_UNITS_READ.labels(rollout.model, "candidate" if reading.unit.candidate else "control").inc()
        return more

    async def _decide(self, rollout: RolloutRecord) -> bool:
        statistics = await self._load_statistics(rollout)
        findings = statistics.evidence.findings(numbers=False)
        decision = await self._decision(rollout, statistics, findings)
        now_s = self._processor.clock.monotonic_s()
        if decision is None:
            if _count_units(findings) != statistics.shown_units and now_s - statistics.shown_s >= _STORE_EVERY_S:
                await self._store_statistics(rollout, statistics)
            return False
        full_findings = await self._store_statistics(rollout, statistics)
        decision = await self._decision(rollout, statistics, full_findings)
        return decision is not None and await self._apply_decision(rollout, decision)

    async def _share_out_traffic(self, model: str) -> bool:
        """Compute and set the shares of the candidates in an adaptive split. Return whether a share has changed."""
        async with self._processor.database.transaction() as tx:
            canaries = [
                rollout for rollout in await rollout_store.rollouts_under_way(tx, model) if rollout.phase == "canary"
            ]
            record = await store.load_model(tx, model)
        if record is None or record.paused or not canaries or canaries[0].plan.split == "even":
            return False
        statistics = {rollout.rollout_id: await self._load_statistics(rollout) for rollout in canaries}
        estimates = {name: rollout.evidence.estimate() for name, rollout in statistics.items()}
        margin = canaries[0].plan.successes[0]
        probabilities = adaptive_split.probabilities_of_best(estimates, margin.margin / margin.measured.width)
        parts = adaptive_split.share_parts(probabilities, canaries[0].plan.floor)
        changed = False
        for rollout in canaries:
            share, candidate_statistics = (
                rollout.stage_share * parts[rollout.rollout_id],
                statistics[rollout.rollout_id],
            )
            if (
                share != rollout.share
                and candidate_statistics.evidence.units - candidate_statistics.shared_units >= _SHARE_EVERY_UNITS
            ):
                candidate_statistics.shared_units = candidate_statistics.evidence.units
                probability = probabilities[rollout.rollout_id]
                reason = f"adaptive split: the best of {len(canaries)} with probability {probability:.2f}"
                changed = (
                    await self._set_share(rollout, share, reason, {"best": probability, "exposure": rollout.exposure})
                    or changed
                )
        return changed

    async def _set_share(
        self, rollout: RolloutRecord, share: Fraction, reason: str, statistics: Mapping[str, float]
    ) -> bool:
        published: list[bool] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            published.clear()
            await self._lease.check(tx)
            current = await rollout_store.load_rollout(tx, rollout.rollout_id)
            if current is None or (current.phase, current.stage, current.share) != (
                rollout.phase,
                rollout.stage,
                rollout.share,
            ):
                return ()
            transition = Transition(tx, now)
            await steps.set_share(transition, current, share, reason, statistics)
            published.append(True)
            return await transition.finish()

        await self._processor.step(work)
        return bool(published)

    async def _write_reports(self, model: str, reports: ReportWriter) -> None:
        """Write a chart for each rollout whose phase, stage or share has changed, by a decision or by an operator."""
        async with self._processor.database.transaction() as tx:
            current = {rollout.rollout_id: rollout for rollout in await rollout_store.rollouts_under_way(tx, model)}
            for rollout_id in [name for name in self._reported if name not in current]:
                ended = await rollout_store.load_rollout(tx, rollout_id)
                if ended is not None and ended.model == model:
                    current[rollout_id] = ended
        for rollout_id, rollout in current.items():
            position = rollout.phase, rollout.stage, rollout.share
            if self._reported.get(rollout_id) != position:
                async with self._processor.database.transaction() as tx:
                    version_decisions = await store.decisions(tx, [rollout.version])
                decisions = tuple(
                    event for event in version_decisions if event.rollout and event.rollout.rollout_id == rollout_id
                )
                await reports.write(rollout_state(rollout, decisions, chart=True))
                self._reported[rollout_id] = position
            if not rollout.is_under_way:
                del self._reported[rollout_id]

    async def _decision(
        self, rollout: RolloutRecord, statistics: _RolloutStatistics, findings: Findings
    ) -> RolloutDecision | None:
        """Return the decision of the state machine. If the model is pinned, or all replicas refuse the version, return
        a hold instead.

        The share of a candidate does not grow while an arm has too few values of the success metrics, because no harm
        could have been detected with them.
        """
        now = self._processor.clock.now()
        async with self._processor.database.transaction() as tx:
            model = await store.load_model(tx, rollout.model)
        assert model is not None
        if model.pinned not in (None, rollout.version):
            return RolloutDecision("hold", rollout.version, now, f"the model is pinned to {model.pinned}")
        error = probe.refused_by_all(rollout.version, probe.live_replicas(self._replicas(), now))
        if error:
            return RolloutDecision(
                "hold", rollout.version, now, f"no replica can serve it: {error}", findings.statistics
            )
        decision = state_machine.decide(rollout.plan, rollout.rollout(), findings, rollout.now)
        if decision is None or decision.kind not in ("advance", "promote"):
            return decision
        grows = decision.kind == "advance" and rollout.phase == "canary"
        too_little_evidence = grows and statistics.evidence.measured < rollout.plan.stages[rollout.stage].units_min
        return None if model.paused or too_little_evidence else decision

    async def _apply_decision(self, rollout: RolloutRecord, decision: RolloutDecision) -> bool:
        """Apply a decision in one transaction, unless the rollout has left the phase and stage for which it was
        made."""
        published: list[bool] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            published.clear()
            await self._lease.check(tx)
            current = await rollout_store.load_rollout(tx, rollout.rollout_id)
            if current is None or (current.phase, current.stage) != (rollout.phase, rollout.stage):
                return ()
            transition = Transition(tx, now)
            await steps.apply_decision(transition, current, decision)
            published.append(True)
            return await transition.finish()

        await self._processor.step(work)
        if published:
            log.info("rollout_decided", version=rollout.version, kind=decision.kind, reason=decision.reason)
        return bool(published)

    async def _load_statistics(self, rollout: RolloutRecord) -> _RolloutStatistics:
        statistics = self._statistics.get(rollout.rollout_id)
        if statistics is None:
            evidence = Evidence(rollout.plan, rollout.number)
            statistics = self._statistics[rollout.rollout_id] = _RolloutStatistics(evidence, chart=rollout.points)
        while True:
            async with self._processor.database.transaction() as tx:
                readings = await unit_store.readings(tx, rollout.rollout_id, statistics.last, _READINGS_MAX)
            for number, age, reading in readings:
                statistics.evidence.add_reading(age, reading)
                statistics.last = number
            if len(readings) < _READINGS_MAX:
                break
        while True:
            async with self._processor.database.transaction() as tx:
                prompts_read = await prompts.read_prompts(tx, rollout.rollout_id, statistics.last_prompt, _READINGS_MAX)
            for prompt in prompts_read:
                statistics.evidence.add_shadow_pair(*metric_pair(prompt))
                statistics.last_prompt = prompt.number
            if len(prompts_read) < _READINGS_MAX:
                return statistics

    async def _store_statistics(self, rollout: RolloutRecord, statistics: _RolloutStatistics) -> Findings:
        """Compute the rollout's statistics from its evidence, and store them with a new point of its chart. Return the
        findings."""
        findings = await asyncio.to_thread(statistics.evidence.findings)
        findings = replace(findings, statistics={**findings.statistics, "exposure": rollout.exposure})
        self._gauges.show(rollout, findings)
        statistics.shown_units = _count_units(findings)
        statistics.shown_s = self._processor.clock.monotonic_s()
        if rollout.phase != "shadow":
            statistics.chart.append({"units": float(findings.candidates), "metrics": _intervals(findings)})
        if len(statistics.chart) > _POINTS_MAX:
            del statistics.chart[1:-1:2]

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            values = {"statistics": json.dumps(dict(findings.statistics)), "chart": json.dumps(statistics.chart)}
            await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(values))
            return ()

        await self._processor.step(work)
        return findings

    async def _clear(self, model: str) -> None:
        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            return Unfinished() if await unit_store.clear_ended(tx, model, _ROLLOUTS_KEPT_MAX) else ()

        if not await self._processor.step(work):
            self._cleared.add(model)
        async with self._processor.database.transaction() as tx:
            under_way = {rollout.rollout_id for rollout in await rollout_store.rollouts_under_way(tx)}
        for rollout_id in self._statistics.keys() - under_way:
            del self._statistics[rollout_id]


def _intervals(findings: Findings) -> dict[str, list[float]]:
    """Return the interval of each metric that has one, as a list: difference, lower end, upper end."""
    names = [name.removesuffix(".lower") for name in findings.statistics if name.endswith(".lower")]
    return {name: [findings.statistics[f"{name}.{end}"] for end in ("difference", "lower", "upper")] for name in names}


def _count_units(findings: Findings) -> int:
    return findings.candidates + findings.controls + findings.shadow_units


def _read_unit(unit: DueUnit, metrics: Mapping[str, Metric], expected: Expectations) -> UnitReading:
    """Compute the metrics of a unit (a user or a session) whose observation time is over.

    Raises:
        MetricFailed: a metric has raised an exception.
    """
    sessions = unit_store.session_records(unit.sessions)
    first_turn = next((turn for session in sessions for turn in session.turns), None)
    expected_values = expected.of(prompt_kinds(first_turn)) if first_turn is not None else {}
    return UnitReading(unit.unit, compute_metrics(sessions, metrics), expected_values)

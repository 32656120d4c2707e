"""Leads the rollouts of a model: takes the readings that are due, looks at them, and does what follows."""

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

from headrace_registry import probe, store
from headrace_registry.leader import LeaderLease
from headrace_registry.metrics import ROLLOUT_UNITS_READ, UNDER_WAY
from headrace_registry.rollout_tables import ROLLOUTS
from headrace_registry.rollouts import adapting, kept, ledger, machine, states, steps
from headrace_registry.rollouts.evidence import Evidence, Findings
from headrace_registry.rollouts.gauges import RolloutGauges
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.ledger import DueUnit
from headrace_registry.rollouts.machine import RolloutDecision
from headrace_registry.rollouts.maturity import UnitReading
from headrace_registry.rollouts.measuring import MetricFailed, measured
from headrace_registry.rollouts.metrics import Metric
from headrace_registry.rollouts.plan import Look
from headrace_registry.rollouts.reports import Reports
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.shadow import prompts
from headrace_registry.shadow.expectations import Expectations, kinds
from headrace_registry.shadow.reading import PromptReader, compared
from headrace_registry.transition import Transition
from headrace_runtime.isolation import Isolated
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor, Unfinished
from headrace_schemas import Event, Replica

log = get_logger(__name__)
_AT_ONCE_MAX = 20
"""Units that one transaction reads."""
_READINGS_MAX = 2000
_SHARE_EVERY_UNITS = 20
"""Of a candidate and its control: how many more are read before an adaptive split moves its share again."""
_LOOK_EVERY_S = 2.0
"""How often the numbers and the chart of a rollout are written while nothing is decided."""
_REASON_MAX = 1000
_POINTS_MAX = 120
"""Of a chart; beyond that every second one goes."""


@dataclass(slots=True)
class _Seen:
    """The statistics of one rollout, made again from its readings by each process."""

    evidence: Evidence
    last: int = 0
    """The reading that they have come to."""
    last_prompt: int = -1
    """The prompt of the shadow."""
    shared_units: int = -_SHARE_EVERY_UNITS
    """Units that had been read when an adaptive split last moved its share."""
    shown_units: int = -1
    shown_s: float = 0.0
    chart: list[dict[str, object]] = field(default_factory=list)


class Conductor:
    """`tick` after every round of the reader; one task at a time may call it."""

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        settings: RolloutSettings,
        replicas: Callable[[], Iterable[Replica]],
        reports: Reports | None = None,
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._settings = settings
        self._replicas = replicas
        self._prompts = PromptReader(processor, lease)
        self._reports = reports
        self._reported: dict[str, tuple[str, int, Fraction]] = {}
        """Rollouts of which pictures were taken: the phase, stage and share of the last one."""
        self._isolated = Isolated("registry.rollout")
        self._gauges = RolloutGauges()
        self._seen: dict[str, _Seen] = {}
        self._cleared: set[str] = set()
        """Models of which nothing is left to remove."""

    async def tick(self, model: str) -> bool:
        """Whether anything was decided."""
        async with self._processor.database.transaction() as tx:
            going_on = await kept.under_way(tx, model)
        UNDER_WAY.labels(model).set(len(going_on))
        self._gauges.keep(model, going_on)
        decided = False
        for rollout in going_on:
            look, hold = partial(self._look, rollout), partial(self._hold, rollout)
            decided = await self._isolated.run(rollout.rollout_id, look, False, hold) or decided
        if any(one.plan.split == "adaptive" for one in going_on):
            decided = await self._share_out(model) or decided
        if self._reports is not None and (going_on or self._reported):
            await self._take_pictures(model, self._reports)
        if going_on:
            self._cleared.discard(model)
        elif model not in self._cleared:
            await self._clear(model)
        return decided

    async def _look(self, rollout: KeptRollout) -> bool:
        """Read what is due of a rollout and decide about it. Whether anything was decided."""
        try:
            await self._take_readings(rollout)
        except MetricFailed as error:  # a metric may be anybody's: it ends its rollout, not the registry
            return await self._hold(rollout, str(error))
        return await self._judge(rollout)

    async def _hold(self, rollout: KeptRollout, reason: str) -> bool:
        now = self._processor.clock.now()
        return await self._take(rollout, RolloutDecision("hold", rollout.version, now, reason[:_REASON_MAX]))

    async def _take_readings(self, rollout: KeptRollout) -> None:
        looks: list[Look] = [look for look in rollout.plan.looks if look != "shadow"]
        metrics = (await self._evidence(rollout)).evidence.metrics
        if rollout.phase == "shadow":
            await self._prompts.take(rollout, metrics)
            return
        for taken, look in enumerate(looks):
            last = taken + 1 == len(looks)
            more = True
            while more:
                more = await self._take_some(rollout, look, taken, metrics, last=last)

    async def _take_some(
        self, rollout: KeptRollout, look: Look, taken: int, metrics: Mapping[str, Metric], *, last: bool
    ) -> bool:
        age_s = rollout.plan.age_s(look)
        failed: list[MetricFailed] = []
        expected = rollout.shadow.expectations
        read: list[UnitReading] = []

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            found = await ledger.due(tx, rollout, taken, round(age_s * 1000), _AT_ONCE_MAX)
            try:
                readings = await asyncio.to_thread(lambda: [_reading(one, metrics, expected) for one in found])
            except MetricFailed as error:
                failed[:] = [error]
                return ()
            await ledger.note(tx, rollout.rollout_id, look, readings, last=last)
            read[:] = readings
            return Unfinished() if len(found) == _AT_ONCE_MAX else ()

        more = await self._processor.step(work)
        if failed:
            raise failed[0]
        for reading in read if look == "maturity" else ():
            ROLLOUT_UNITS_READ.labels(rollout.model, "candidate" if reading.unit.candidate else "control").inc()
        return more

    async def _judge(self, rollout: KeptRollout) -> bool:
        seen = await self._evidence(rollout)
        found = seen.evidence.findings(numbers=False)
        decision = await self._decision(rollout, seen, found)
        now_s = self._processor.clock.monotonic_s()
        if decision is None:
            if _units(found) != seen.shown_units and now_s - seen.shown_s >= _LOOK_EVERY_S:
                await self._show(rollout, seen)
            return False
        full = await self._show(rollout, seen)
        decision = await self._decision(rollout, seen, full)
        return decision is not None and await self._take(rollout, decision)

    async def _share_out(self, model: str) -> bool:
        """What an adaptive split gives each candidate now; whether that is something else than before."""
        async with self._processor.database.transaction() as tx:
            canaries = [one for one in await kept.under_way(tx, model) if one.phase == "canary"]
            record = await store.model(tx, model)
        if record is None or record.paused or not canaries or canaries[0].plan.split == "even":
            return False
        seen = {one.rollout_id: await self._evidence(one) for one in canaries}
        estimates = {name: one.evidence.estimate() for name, one in seen.items()}
        margin = canaries[0].plan.successes[0]
        chances = adapting.probabilities_of_best(estimates, margin.margin / margin.measured.width)
        parts = adapting.parts(chances, canaries[0].plan.floor)
        changed = False
        for one in canaries:
            share, known = one.stage_share * parts[one.rollout_id], seen[one.rollout_id]
            if share != one.share and known.evidence.units - known.shared_units >= _SHARE_EVERY_UNITS:
                known.shared_units = known.evidence.units
                chance = chances[one.rollout_id]
                reason = f"adaptive split: the best of {len(canaries)} with probability {chance:.2f}"
                changed = await self._give(one, share, reason, {"best": chance, "exposure": one.exposure}) or changed
        return changed

    async def _give(self, one: KeptRollout, share: Fraction, reason: str, statistics: Mapping[str, float]) -> bool:
        given: list[bool] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            given.clear()
            await self._lease.check(tx)
            current = await kept.one(tx, one.rollout_id)
            if current is None or (current.phase, current.stage, current.share) != (one.phase, one.stage, one.share):
                return ()
            transition = Transition(tx, now)
            await steps.share_out(transition, current, share, reason, statistics)
            given.append(True)
            return await transition.finish()

        await self._processor.step(work)
        return bool(given)

    async def _take_pictures(self, model: str, reports: Reports) -> None:
        """Of each rollout that has come to another phase, stage or share, whoever moved it."""
        async with self._processor.database.transaction() as tx:
            now = {one.rollout_id: one for one in await kept.under_way(tx, model)}
            for rollout_id in [name for name in self._reported if name not in now]:
                ended = await kept.one(tx, rollout_id)
                if ended is not None and ended.model == model:
                    now[rollout_id] = ended
        for rollout_id, one in now.items():
            where = one.phase, one.stage, one.share
            if self._reported.get(rollout_id) != where:
                async with self._processor.database.transaction() as tx:
                    decided = await store.decisions(tx, [one.version])
                own = tuple(event for event in decided if event.rollout and event.rollout.rollout_id == rollout_id)
                await reports.write(states.of(one, own, chart=True))
                self._reported[rollout_id] = where
            if not one.going_on:
                del self._reported[rollout_id]

    async def _decision(self, rollout: KeptRollout, seen: _Seen, found: Findings) -> RolloutDecision | None:
        """By the machine, unless an operator's hold or the replicas say something else. A share does not grow while one
        of the arms says too little of what the version is promoted for: then no harm is no evidence."""
        now = self._processor.clock.now()
        async with self._processor.database.transaction() as tx:
            model = await store.model(tx, rollout.model)
        assert model is not None
        if model.pinned not in (None, rollout.version):
            return RolloutDecision("hold", rollout.version, now, f"the model is pinned to {model.pinned}")
        error = probe.refused_by_all(rollout.version, probe.live(self._replicas(), now))
        if error:
            return RolloutDecision("hold", rollout.version, now, f"no replica can serve it: {error}", found.statistics)
        decision = machine.judge(rollout.plan, rollout.rollout(), found, rollout.now)
        if decision is None or decision.kind not in ("advance", "promote"):
            return decision
        grows = decision.kind == "advance" and rollout.phase == "canary"
        silent = grows and seen.evidence.measured < rollout.plan.stages[rollout.stage].units_min
        return None if model.paused or silent else decision

    async def _take(self, rollout: KeptRollout, decision: RolloutDecision) -> bool:
        """In one transaction, if the rollout is still where it was when it was looked at."""
        taken: list[bool] = []

        async def work(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            taken.clear()
            await self._lease.check(tx)
            current = await kept.one(tx, rollout.rollout_id)
            if current is None or (current.phase, current.stage) != (rollout.phase, rollout.stage):
                return ()
            transition = Transition(tx, now)
            await steps.take(transition, current, decision)
            taken.append(True)
            return await transition.finish()

        await self._processor.step(work)
        if taken:
            log.info("rollout_decided", version=rollout.version, kind=decision.kind, reason=decision.reason)
        return bool(taken)

    async def _evidence(self, rollout: KeptRollout) -> _Seen:
        seen = self._seen.get(rollout.rollout_id)
        if seen is None:
            evidence = Evidence(rollout.plan, rollout.number)
            seen = self._seen[rollout.rollout_id] = _Seen(evidence, chart=rollout.points)
        while True:
            async with self._processor.database.transaction() as tx:
                found = await ledger.readings(tx, rollout.rollout_id, seen.last, _READINGS_MAX)
            for number, look, reading in found:
                seen.evidence.take(look, reading)
                seen.last = number
            if len(found) < _READINGS_MAX:
                break
        while True:
            async with self._processor.database.transaction() as tx:
                answered = await prompts.read(tx, rollout.rollout_id, seen.last_prompt, _READINGS_MAX)
            for one in answered:
                seen.evidence.take_shadow(*compared(one))
                seen.last_prompt = one.place
            if len(answered) < _READINGS_MAX:
                return seen

    async def _show(self, rollout: KeptRollout, seen: _Seen) -> Findings:
        """Write the numbers as they are now, and a point of the chart."""
        found = await asyncio.to_thread(seen.evidence.findings)
        found = replace(found, statistics={**found.statistics, "exposure": rollout.exposure})
        self._gauges.show(rollout, found)
        seen.shown_units = _units(found)
        seen.shown_s = self._processor.clock.monotonic_s()
        if rollout.phase != "shadow":
            seen.chart.append({"units": float(found.candidates), "metrics": _intervals(found)})
        if len(seen.chart) > _POINTS_MAX:
            del seen.chart[1:-1:2]

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            values = {"statistics": json.dumps(dict(found.statistics)), "chart": json.dumps(seen.chart)}
            await tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(values))
            return ()

        await self._processor.step(work)
        return found

    async def _clear(self, model: str) -> None:
        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            return Unfinished() if await ledger.clear(tx, model, self._settings.rollouts_kept_max) else ()

        if not await self._processor.step(work):
            self._cleared.add(model)
        async with self._processor.database.transaction() as tx:
            going_on = {one.rollout_id for one in await kept.under_way(tx)}
        for gone in self._seen.keys() - going_on:
            del self._seen[gone]


def _intervals(found: Findings) -> dict[str, list[float]]:
    """Difference, lower and upper end of each metric that has any."""
    names = [name.removesuffix(".lower") for name in found.statistics if name.endswith(".lower")]
    return {name: [found.statistics[f"{name}.{part}"] for part in ("difference", "lower", "upper")] for name in names}


def _units(found: Findings) -> int:
    return found.candidates + found.controls + found.shadow_units


def _reading(due: DueUnit, metrics: Mapping[str, Metric], expected: Expectations) -> UnitReading:
    """Raises `MetricFailed`."""
    sessions = ledger.sessions(due.sessions)
    first = next((turn for one in sessions for turn in one.turns), None)
    foretold = expected.of(kinds(first)) if first is not None else {}
    return UnitReading(due.unit, measured(sessions, metrics), foretold)

"""Elementary changes of versions, roles and decisions. They run in the caller's transaction and collect its events.

Code that changes roles (the model controller, a request of an operator, a rollback) need not handle rollouts:
`end_stale_rollouts` ends those that contradict the new roles, in the same transaction. Examples are a candidate whose
control is not the champion any more, and a candidate that was withdrawn.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import DECISIONS as DECISIONS_TOTAL
from headrace_registry.metrics import ROLLOUT_STEPS
from headrace_registry.storage import rollout_store, store
from headrace_registry.storage.records import ModelRecord, State
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_registry.storage.tables import DECISIONS, MODELS, ROLLOUTS, VERDICTS, VERSIONS
from headrace_runtime.clock import epoch_ms
from headrace_runtime.process.logs import get_logger
from headrace_schemas import Event, ModelEvent, RolloutStep
from headrace_schemas.events.checkpoint import STATISTICS_MAX, Decision
from headrace_schemas.values.ids import uuid7
from headrace_schemas.values.text import storable

log = get_logger(__name__)
_NAME_LENGTH_MAX = 512


class StateChanges:
    """Writer of the registry's tables of models, versions and decisions, within the transaction of the caller.

    Each method makes one change. `events` collects the events about decisions, which the caller must publish after the
    commit. `operator` is the name of the operator who requested the changes, or None for decisions of the registry
    itself.
    """

    def __init__(self, tx: AsyncConnection, now: datetime, operator: str | None = None) -> None:
        self.tx = tx
        self.now = now
        self._operator = operator
        self._changed_models: set[str] = set()
        self.events: list[Event] = []

    def mark_changed(self, model: str) -> None:
        """Record that the routing of the model may have to be published again."""
        self._changed_models.add(model)

    async def set_state(self, version: str, state: State, **values: str | None) -> None:
        updates = {"state": state, "changed_ms": epoch_ms(self.now), **values}
        await self.tx.execute(update(VERSIONS).where(VERSIONS.c.version == version).values(updates))
        if state == "withdrawn":
            await self.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.version == version).values(phase="rolled_back"))

    async def delete_trial_result(self, version: str) -> None:
        await self.tx.execute(delete(VERDICTS).where(VERDICTS.c.version == version))

    async def set_roles(self, model: ModelRecord, **roles: str | int | None) -> None:
        if roles:
            await self.tx.execute(update(MODELS).where(MODELS.c.model == model.model).values(roles))
        self._changed_models.add(model.model)

    async def record_decision(
        self,
        model: str,
        version: str,
        decision: Decision,
        reason: str | None = None,
        statistics: Mapping[str, float] | None = None,
        previous: str | None = None,
        step: RolloutStep | None = None,
    ) -> None:
        """Store a decision about a version, and add it as a `ModelEvent` to the events."""
        event = ModelEvent(
            time=self.now,
            decision_id=str(uuid7(epoch_ms(self.now))),
            model=model,
            version=version,
            decision=decision,
            previous=previous,
            reason=None if reason is None else storable(reason),
            statistics=_bounded(statistics or {}),
            who=self._operator,
            rollout=step,
        )
        values = {**event.model_dump(exclude={"time", "statistics", "rollout"}), "at_ms": epoch_ms(self.now)}
        values["rollout"] = step.model_dump_json() if step else None
        await self.tx.execute(insert(DECISIONS).values(**values, statistics=json.dumps(event.statistics)))
        self.events.append(event)
        DECISIONS_TOTAL.labels(decision).inc()
        if step is not None:
            ROLLOUT_STEPS.labels(model, step.kind).inc()


def _bounded(statistics: Mapping[str, float]) -> dict[str, float]:
    """Return as many finite statistics as an event can contain, in order. The names of the others are logged."""
    finite = {name[:_NAME_LENGTH_MAX]: value for name, value in statistics.items() if math.isfinite(value)}
    bounded = dict(itertools.islice(finite.items(), STATISTICS_MAX))
    if len(bounded) < len(statistics):
        left_out = [name for name in statistics if name[:_NAME_LENGTH_MAX] not in bounded]
        log.warning("statistics_left_out", names=left_out[:STATISTICS_MAX])
    return bounded


async def end_stale_rollouts(changes: StateChanges, name: str) -> None:
    """End the rollouts of a model that contradict the present roles and states of its versions.

    These are rollouts of a version that was promoted, withdrawn or requested again, and those whose control is not the
    champion any more. Call it before the routing is published.
    """
    model = await store.load_model(changes.tx, name)
    assert model is not None
    former_champion = (
        ROLLOUTS.c.model == name,
        ROLLOUTS.c.phase == "champion",
        ROLLOUTS.c.version != (model.champion or ""),
    )
    await changes.tx.execute(update(ROLLOUTS).where(*former_champion).values(phase="succeeded"))
    for rollout in await rollout_store.rollouts_under_way(changes.tx, name):
        version = await store.load_version(changes.tx, rollout.version)
        if rollout.version == model.champion:
            await end(changes, rollout, "champion", "it was promoted")
        elif version is None or version.state != "canary":
            await end(changes, rollout, "hold", "an operator requested the version again")
        elif rollout.control != model.champion:
            reason = f"{rollout.control}, which it was compared with, is not the champion any more"
            await hold(changes, rollout, reason)


async def hold(
    changes: StateChanges, rollout: RolloutRecord, reason: str, statistics: dict[str, float] | None = None
) -> None:
    """End a rollout without a promotion or a rollback: the candidate gets no more traffic, but is not withdrawn."""
    await end(changes, rollout, "hold", reason)
    await changes.set_state(rollout.version, "held", request="", rollout=None)
    step = RolloutStep(rollout_id=rollout.rollout_id, kind="hold", stage=rollout.stage, share="0")
    await changes.record_decision(rollout.model, rollout.version, "skipped", reason, statistics, rollout.control, step)
    changes.mark_changed(rollout.model)


async def end(changes: StateChanges, rollout: RolloutRecord, phase: str, reason: str) -> None:
    """Store the last phase of a rollout, for example `succeeded` or `rolled_back`, and the reason."""
    values = {"phase": phase, "reason": reason, "changed_ms": epoch_ms(changes.now)}
    await changes.tx.execute(update(ROLLOUTS).where(ROLLOUTS.c.rollout_id == rollout.rollout_id).values(values))

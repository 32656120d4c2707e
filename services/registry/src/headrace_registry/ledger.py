"""The changes of the registry's state. Each runs in its caller's transaction and returns the events that it owes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import routing, store
from headrace_registry.metrics import DECISIONS as DECISIONS_TOTAL
from headrace_registry.records import ModelRecord, Request, State, VersionRecord
from headrace_registry.tables import DECISIONS, EVALUATIONS, MODELS, VERSIONS
from headrace_runtime.clock import epoch_ms
from headrace_runtime.upsert import upsert
from headrace_schemas import Checkpoint, Event, ModelEvent
from headrace_schemas.events.model_event import Decision
from headrace_schemas.ids import uuid7
from headrace_schemas.manifest import Manifest


class Ledger:
    """One transaction's changes. `events` collects what is to be published, `finish` adds the routings that changed."""

    def __init__(self, tx: AsyncConnection, now: datetime) -> None:
        self._tx = tx
        self._now = now
        self._touched: set[str] = set()
        self.events: list[Event] = []

    async def finish(self) -> list[Event]:
        """Everything that this transaction owes to the bus."""
        for model in sorted(self._touched):
            self.events += await routing.publish(self._tx, self._now, model)
        self._touched.clear()
        return self.events

    async def register(self, checkpoint: Checkpoint, manifest: Manifest | None, problem: str | None) -> None:
        """Add a version; with a `problem` it is rejected at once. A version that is known already stays as it is."""
        if await store.version(self._tx, checkpoint.version) is not None:
            return
        await upsert(self._tx, MODELS, {"model": checkpoint.model}, {"revision": -1}, update=False)
        state: State = "rejected" if problem else "registered"
        values = {
            "version": checkpoint.version,
            "model": checkpoint.model,
            "lineage": checkpoint.lineage,
            "step": checkpoint.step,
            "parent": checkpoint.parent,
            "base": manifest.base if manifest else None,
            "manifest": checkpoint.manifest.model_dump_json(),
            "tokenizer_sha256": manifest.tokenizer_sha256 if manifest else "",
            "template_sha256": manifest.template_sha256 if manifest else "",
            "state": state,
            "request": "",
            "registered_ms": epoch_ms(self._now),
            "changed_ms": epoch_ms(self._now),
        }
        await self._tx.execute(insert(VERSIONS).values(values))
        if problem:
            await self._decide(checkpoint.model, checkpoint.version, "rejected", reason=problem)
        else:
            await self._decide(checkpoint.model, checkpoint.version, "registered", previous=checkpoint.parent)

    async def adopt(self, model: ModelRecord, version: str, skipped: tuple[str, ...]) -> None:
        """`version` becomes the candidate."""
        for name in skipped:
            await self._set_state(name, "skipped")
            await self._decide(model.model, name, "skipped", reason=f"{version} is newer", previous=model.champion)
        await self._set_state(version, "probing")
        await self._set_roles(model, candidate=version)

    async def probed(self, model: ModelRecord, version: str, statistics: Mapping[str, float]) -> None:
        """The candidate passed its probe on every live replica."""
        await self._set_state(version, "evaluating")
        await self._decide(model.model, version, "probed", statistics=statistics, previous=model.champion)

    async def evaluated(
        self, version: VersionRecord, gate_sha256: str, scores: Mapping[str, float], statistics: Mapping[str, float]
    ) -> None:
        """Record what the gate measured; it replaces what another gate or an earlier run said."""
        values = {"gate_sha256": gate_sha256, "scores": json.dumps(scores), "at_ms": epoch_ms(self._now)}
        await upsert(self._tx, EVALUATIONS, {"version": version.version}, values)
        await self._decide(version.model, version.version, "evaluated", statistics=statistics)

    async def promote(self, model: ModelRecord, version: str, reason: str, statistics: Mapping[str, float]) -> None:
        """The candidate takes over; the champion becomes `previous`."""
        await self._set_state(version, "promoted", request="", replaced=model.champion)
        previous = model.champion or model.previous
        await self._set_roles(model, champion=version, previous=previous, candidate=None)
        await self._decide(model.model, version, "promoted", reason, statistics, model.champion)

    async def reject(self, model: ModelRecord, version: str, reason: str, statistics: Mapping[str, float]) -> None:
        """The version gets no traffic. One that has been champion before and still is `previous` stays that."""
        state: State = "promoted" if version == model.previous else "rejected"
        await self._set_state(version, state, request="")
        if version == model.candidate:
            await self._set_roles(model, candidate=None)
        await self._decide(model.model, version, "rejected", reason, statistics, model.champion)

    async def roll_back(self, model: ModelRecord, reason: str) -> None:
        """`previous` takes over again, the champion is withdrawn, and whom `previous` had replaced stands behind it."""
        assert model.champion
        assert model.previous
        heir = await store.version(self._tx, model.previous)
        behind = await store.version(self._tx, heir.replaced) if heir and heir.replaced else None
        previous = behind.version if behind and behind.state == "promoted" else None
        candidate = None if model.candidate == model.previous else model.candidate
        await self._set_state(model.champion, "withdrawn", request="")
        await self._set_state(model.previous, "promoted", request="")
        await self._set_roles(model, champion=model.previous, previous=previous, candidate=candidate)
        await self._decide(model.model, model.champion, "rolled_back", reason, previous=model.previous)

    async def withdraw(self, model: ModelRecord, version: str, reason: str) -> None:
        """Any version but the champion: no turn is routed to it any more."""
        assert version != model.champion
        await self._set_state(version, "withdrawn", request="")
        roles = {role: None for role in ("previous", "candidate") if getattr(model, role) == version}
        await self._set_roles(model, **roles)
        await self._decide(model.model, version, "withdrawn", reason, previous=model.champion)

    async def request(self, version: VersionRecord, request: Request) -> None:
        """An operator wants this version promoted; it is its turn as soon as the present candidate is decided about."""
        if version.state in ("probing", "evaluating"):
            statement = update(VERSIONS).where(VERSIONS.c.version == version.version).values(request=request)
            await self._tx.execute(statement)
        else:
            await self._set_state(version.version, "registered", request=request)
        self._touched.add(version.model)

    async def _set_state(self, version: str, state: State, **values: str | None) -> None:
        changed = {"state": state, "changed_ms": epoch_ms(self._now), **values}
        await self._tx.execute(update(VERSIONS).where(VERSIONS.c.version == version).values(changed))

    async def _set_roles(self, model: ModelRecord, **roles: str | None) -> None:
        if roles:
            await self._tx.execute(update(MODELS).where(MODELS.c.model == model.model).values(roles))
        self._touched.add(model.model)

    async def _decide(
        self,
        model: str,
        version: str,
        decision: Decision,
        reason: str | None = None,
        statistics: Mapping[str, float] | None = None,
        previous: str | None = None,
    ) -> None:
        event = ModelEvent(
            time=self._now,
            decision_id=str(uuid7(epoch_ms(self._now))),
            model=model,
            version=version,
            decision=decision,
            previous=previous,
            reason=reason,
            statistics=dict(statistics or {}),
        )
        values = {**event.model_dump(exclude={"time", "statistics"}), "at_ms": epoch_ms(self._now)}
        await self._tx.execute(insert(DECISIONS).values(**values, statistics=json.dumps(event.statistics)))
        self.events.append(event)
        DECISIONS_TOTAL.labels(decision).inc()

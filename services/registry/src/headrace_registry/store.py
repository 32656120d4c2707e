"""Reads the tables into records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import RowMapping, Select, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.records import ModelRecord, ModelView, Standing, TrialResult, VersionRecord
from headrace_registry.rollouts import kept
from headrace_registry.tables import CHAMPIONS, DECISIONS, EVALUATIONS, MODELS, VERDICTS, VERSIONS
from headrace_runtime.clock import from_epoch_ms
from headrace_schemas import ModelEvent, RolloutStep
from headrace_schemas.blobs import BlobRef


async def model_names(tx: AsyncConnection) -> list[str]:
    return list((await tx.execute(select(MODELS.c.model).order_by(MODELS.c.model))).scalars())


async def model(tx: AsyncConnection, name: str) -> ModelRecord | None:
    row = (await tx.execute(select(MODELS).where(MODELS.c.model == name))).mappings().one_or_none()
    return ModelRecord(**row) if row else None


async def version(tx: AsyncConnection, name: str) -> VersionRecord | None:
    return (await _versions(tx, select(VERSIONS).where(VERSIONS.c.version == name))).get(name)


async def every(tx: AsyncConnection) -> list[VersionRecord]:
    """All versions of all models, in the order of arrival."""
    return list((await _versions(tx, select(VERSIONS).order_by(VERSIONS.c.number))).values())


async def newest(tx: AsyncConnection, name: str, limit: int) -> list[VersionRecord]:
    """A model's versions, the newest first."""
    query = select(VERSIONS).where(VERSIONS.c.model == name).order_by(VERSIONS.c.number.desc()).limit(limit)
    return list((await _versions(tx, query)).values())


async def withdrawn(tx: AsyncConnection, name: str, limit: int) -> list[str]:
    """A model's withdrawn versions, the last one first."""
    query = (
        select(VERSIONS.c.version)
        .where(VERSIONS.c.model == name, VERSIONS.c.state == "withdrawn")
        .order_by(VERSIONS.c.changed_ms.desc(), VERSIONS.c.number.desc())
        .limit(limit)
    )
    return list((await tx.execute(query)).scalars())


async def heir(tx: AsyncConnection, model: str, champion: str | None, gone: Iterable[str] = ()) -> str | None:
    """The last champion before the present one that may serve again: neither withdrawn, retired nor `gone`."""
    out = {champion, *gone}
    query = select(CHAMPIONS.c.version).where(CHAMPIONS.c.model == model).order_by(CHAMPIONS.c.id.desc())
    line = [name for name in dict.fromkeys((await tx.execute(query)).scalars()) if name not in out]
    known = await _named(tx, line)
    return next((name for name in line if name in known and _may_serve(known[name])), None)


def _may_serve(version: VersionRecord) -> bool:
    return version.state == "promoted" and not version.retired


async def children(tx: AsyncConnection, names: Iterable[str]) -> list[VersionRecord]:
    """The versions that were trained on from one of `names`."""
    return list((await _versions(tx, select(VERSIONS).where(VERSIONS.c.parent.in_(list(names))))).values())


async def ancestry(tx: AsyncConnection, name: str | None) -> set[str]:
    """A version and everything that it was trained on from, as far as it is registered."""
    line = select(VERSIONS.c.version, VERSIONS.c.parent).where(VERSIONS.c.version == name).cte(recursive=True)
    line = line.union(select(VERSIONS.c.version, VERSIONS.c.parent).join(line, VERSIONS.c.version == line.c.parent))
    return set((await tx.execute(select(line.c.version))).scalars())


async def view(
    tx: AsyncConnection,
    record: ModelRecord,
    gate_sha256: str,
    also: VersionRecord | None = None,
    *,
    now: datetime | None = None,
) -> ModelView:
    """What the next decision about one model depends on; `also` a version that somebody asks about. What nobody trains
    waits until somebody asks for it. Without `now` it is not known how many rollouts began lately."""
    query = select(VERSIONS).where(VERSIONS.c.model == record.model, VERSIONS.c.state == "registered")
    query = query.where(or_(VERSIONS.c.trained, VERSIONS.c.request != ""), VERSIONS.c.retired_ms.is_(None))
    waiting = await _versions(tx, query.order_by(VERSIONS.c.number))
    roles = [name for name in (record.champion, record.previous, record.candidate, record.anchor) if name]
    found = {**waiting, **await _named(tx, roles)}
    known = [*found.values(), *([also] if also is not None else [])]
    found |= await _named(tx, [one.base for one in known if one.base])
    tried = await trial_result(tx, record.candidate, gate_sha256) if record.candidate else None
    audited = await _audited(tx, roles, gate_sha256)
    going_on = await kept.under_way(tx, record.model)
    return ModelView(
        record,
        found,
        tuple(waiting.values()),
        tried,
        audited,
        under_way=len(going_on),
        slots=going_on[0].slots if going_on else None,
        begun_lately=await kept.begun_lately(tx, record.model, now) if now is not None else 0,
    )


async def trial_result(tx: AsyncConnection, name: str, gate_sha256: str) -> TrialResult | None:
    """What the present gate found of a candidate; None: it has no result yet."""
    query = select(VERDICTS.c.verdict).where(VERDICTS.c.version == name, VERDICTS.c.gate_sha256 == gate_sha256)
    text = (await tx.execute(query)).scalar_one_or_none()
    if text is None:
        return None
    values = json.loads(text)
    return TrialResult(**{**values, "standing": Standing(**values["standing"])})


async def _audited(tx: AsyncConnection, names: Iterable[str], gate_sha256: str) -> frozenset[str]:
    table = EVALUATIONS
    query = select(table.c.version).where(table.c.version.in_(list(names)), table.c.gate_sha256 == gate_sha256)
    return frozenset((await tx.execute(query)).scalars())


async def decisions(tx: AsyncConnection, names: Iterable[str]) -> list[ModelEvent]:
    """Everything that was ever decided about some versions, the oldest first."""
    query = select(DECISIONS).where(DECISIONS.c.version.in_(list(names))).order_by(DECISIONS.c.id)
    return [_decision(row) for row in (await tx.execute(query)).mappings()]


async def _named(tx: AsyncConnection, names: Iterable[str]) -> dict[str, VersionRecord]:
    return await _versions(tx, select(VERSIONS).where(VERSIONS.c.version.in_(list(names))))


async def _versions(tx: AsyncConnection, query: Select[tuple[object, ...]]) -> dict[str, VersionRecord]:
    return {row["version"]: _version(row) for row in (await tx.execute(query)).mappings()}


def _version(row: RowMapping) -> VersionRecord:
    return VersionRecord(
        number=row["number"],
        version=row["version"],
        model=row["model"],
        lineage=row["lineage"],
        step=row["step"],
        parent=row["parent"],
        base=row["base"],
        manifest=BlobRef.model_validate_json(row["manifest"]),
        tokenizer_sha256=row["tokenizer_sha256"],
        template_sha256=row["template_sha256"],
        state=row["state"],
        request=row["request"],
        replaced=row["replaced"],
        registered=from_epoch_ms(row["registered_ms"]),
        changed=from_epoch_ms(row["changed_ms"]),
        rollout=row["rollout"],
        trained=row["trained"],
        label=row["label"],
        served=row["served"],
        retired_at=None if row["retired_ms"] is None else from_epoch_ms(row["retired_ms"]),
        collected=row["collected_ms"] is not None,
    )


def _decision(row: RowMapping) -> ModelEvent:
    return ModelEvent(
        time=from_epoch_ms(row["at_ms"]),
        decision_id=row["decision_id"],
        model=row["model"],
        version=row["version"],
        decision=row["decision"],
        previous=row["previous"],
        reason=row["reason"],
        statistics=json.loads(row["statistics"]),
        who=row["who"],
        rollout=RolloutStep.model_validate_json(row["rollout"]) if row["rollout"] else None,
    )

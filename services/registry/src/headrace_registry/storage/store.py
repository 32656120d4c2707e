"""Functions that read models and versions from the database, with their aliases, labels, tags, notes and decisions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import ColumnElement, RowMapping, Select, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import rollout_store
from headrace_registry.storage.records import AnchorState, ModelRecord, ModelView, TrialResult, VersionRecord
from headrace_registry.storage.tables import (
    ALIASES,
    CHAMPIONS,
    DECISIONS,
    EVALUATIONS,
    MODELS,
    NOTES,
    TAGS,
    VERDICTS,
    VERSION_FILES,
    VERSIONS,
)
from headrace_runtime.clock import from_epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas import ModelEvent, RolloutStep
from headrace_schemas.http.catalog import NOTES_MAX, Note
from headrace_schemas.values.blobs import BlobRef


async def model_names(tx: AsyncConnection) -> list[str]:
    """Return the names of all models in alphabetical order."""
    return list((await tx.execute(select(MODELS.c.model).order_by(MODELS.c.model))).scalars())


async def load_model(tx: AsyncConnection, name: str) -> ModelRecord | None:
    """Return the model with this name, or None."""
    row = (await tx.execute(select(MODELS).where(MODELS.c.model == name))).mappings().one_or_none()
    return ModelRecord(**row) if row else None


async def load_version(tx: AsyncConnection, name: str) -> VersionRecord | None:
    """Return the version with this name, or None."""
    return (await _versions(tx, select(VERSIONS).where(VERSIONS.c.version == name))).get(name)


async def all_versions(tx: AsyncConnection) -> list[VersionRecord]:
    """Return all versions of all models in the order of registration."""
    return list((await _versions(tx, select(VERSIONS).order_by(VERSIONS.c.number))).values())


async def newest_versions(tx: AsyncConnection, name: str, limit: int) -> list[VersionRecord]:
    """Return up to `limit` versions of a model, newest first."""
    query = select(VERSIONS).where(VERSIONS.c.model == name).order_by(VERSIONS.c.number.desc()).limit(limit)
    return list((await _versions(tx, query)).values())


async def withdrawn_versions(tx: AsyncConnection, name: str, limit: int) -> list[str]:
    """Return up to `limit` withdrawn versions of a model, most recently withdrawn first."""
    query = (
        select(VERSIONS.c.version)
        .where(VERSIONS.c.model == name, VERSIONS.c.state == "withdrawn")
        .order_by(VERSIONS.c.changed_ms.desc(), VERSIONS.c.number.desc())
        .limit(limit)
    )
    return list((await tx.execute(query)).scalars())


async def rollback_target(
    tx: AsyncConnection, model: str, champion: str | None, excluded: Iterable[str] = ()
) -> str | None:
    """Return the latest former champion that can replace `champion`: it was not withdrawn or retired, and is not in
    `excluded`. None if there is none."""
    skipped = {champion, *excluded}
    query = select(CHAMPIONS.c.version).where(CHAMPIONS.c.model == model).order_by(CHAMPIONS.c.id.desc())
    champions = [name for name in dict.fromkeys((await tx.execute(query)).scalars()) if name not in skipped]
    records = await _named(tx, champions)
    return next((name for name in champions if name in records and _may_serve(records[name])), None)


def _may_serve(version: VersionRecord) -> bool:
    return version.state == "promoted" and not version.retired


async def children(tx: AsyncConnection, names: Iterable[str]) -> list[VersionRecord]:
    """Return the versions whose parent is one of `names`."""
    return list((await _versions(tx, select(VERSIONS).where(VERSIONS.c.parent.in_(list(names))))).values())


async def ancestry(tx: AsyncConnection, name: str | None) -> set[str]:
    """Return the names of a version and of all its registered ancestors."""
    line = select(VERSIONS.c.version, VERSIONS.c.parent).where(VERSIONS.c.version == name).cte(recursive=True)
    line = line.union(select(VERSIONS.c.version, VERSIONS.c.parent).join(line, VERSIONS.c.version == line.c.parent))
    return set((await tx.execute(select(line.c.version))).scalars())


async def load_view(
    tx: AsyncConnection,
    record: ModelRecord,
    gate_sha256: str,
    requested: VersionRecord | None = None,
    *,
    now: datetime | None = None,
) -> ModelView:
    """Load the data of a model by which its next action is chosen.

    A version that no trainer of this installation published is a candidate only if an operator requests it.

    Args:
        requested: version that an operator requests now. It and its base are part of the result.
        now: present time, by which recent rollouts are counted; None counts none.
    """
    query = select(VERSIONS).where(VERSIONS.c.model == record.model, VERSIONS.c.state == "registered")
    query = query.where(or_(VERSIONS.c.trained, VERSIONS.c.request != ""), VERSIONS.c.retired_ms.is_(None))
    waiting = await _versions(tx, query.order_by(VERSIONS.c.number))
    roles = [name for name in (record.champion, record.previous, record.candidate, record.anchor) if name]
    versions = {**waiting, **await _named(tx, roles)}
    versions_shown = [*versions.values(), *([requested] if requested is not None else [])]
    versions |= await _named(tx, [version.base for version in versions_shown if version.base])
    result = await trial_result(tx, record.candidate, gate_sha256) if record.candidate else None
    audited = await _audited(tx, roles, gate_sha256)
    rollouts = await rollout_store.rollouts_under_way(tx, record.model)
    return ModelView(
        record,
        versions,
        tuple(waiting.values()),
        result,
        audited,
        under_way=len(rollouts),
        slots=rollouts[0].slots if rollouts else None,
        rollouts_last_hour=await rollout_store.count_recent_rollouts(tx, record.model, now) if now is not None else 0,
    )


async def trial_result(tx: AsyncConnection, name: str, gate_sha256: str) -> TrialResult | None:
    """Return the result of a version's trial by the gate program with this digest, or None if there is none yet."""
    query = select(VERDICTS.c.verdict).where(VERDICTS.c.version == name, VERDICTS.c.gate_sha256 == gate_sha256)
    text = (await tx.execute(query)).scalar_one_or_none()
    if text is None:
        return None
    values = json.loads(text)
    anchor_state = AnchorState(**values.pop("standing"))
    return TrialResult(**values, anchor_state=anchor_state)


async def _audited(tx: AsyncConnection, names: Iterable[str], gate_sha256: str) -> frozenset[str]:
    table = EVALUATIONS
    query = select(table.c.version).where(table.c.version.in_(list(names)), table.c.gate_sha256 == gate_sha256)
    return frozenset((await tx.execute(query)).scalars())


async def decisions(tx: AsyncConnection, names: Iterable[str]) -> list[ModelEvent]:
    """Return all decisions about the versions `names`, oldest first."""
    query = select(DECISIONS).where(DECISIONS.c.version.in_(list(names))).order_by(DECISIONS.c.id)
    return [_decision(row) for row in (await tx.execute(query)).mappings()]


async def unreadable_manifests(tx: AsyncConnection, model: str) -> dict[str, str]:
    """Return by version the problems of the manifests that garbage collection could not read."""
    query = select(VERSION_FILES.c.version, VERSION_FILES.c.problem).where(
        VERSION_FILES.c.model == model, VERSION_FILES.c.problem.is_not(None)
    )
    return {row.version: row.problem for row in await tx.execute(query.order_by(VERSION_FILES.c.version))}


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


async def require_model(tx: AsyncConnection, name: str) -> ModelRecord:
    """Return the model with this name. Raises `Refused` 404."""
    record = await load_model(tx, name)
    if record is None:
        raise Refused(404, "model_not_found", f"there is no model {name!r}", "model")
    return record


async def require_version(tx: AsyncConnection, record: ModelRecord, name: str) -> VersionRecord:
    """Return the version of the model with this name. Raises `Refused` 404."""
    version_record = await load_version(tx, name)
    if version_record is None or version_record.model != record.model:
        raise Refused(404, "version_not_found", f"model {record.model!r} has no version {name!r}", "version")
    return version_record


async def aliases(tx: AsyncConnection, model: str) -> dict[str, str]:
    """Return the aliases of a model, each with the version that it names."""
    query = select(ALIASES.c.alias, ALIASES.c.version).where(ALIASES.c.model == model).order_by(ALIASES.c.alias)
    return dict((await tx.execute(query)).all())


async def aliases_of(tx: AsyncConnection, version: str) -> list[str]:
    """Return the aliases that name a version."""
    query = select(ALIASES.c.alias).where(ALIASES.c.version == version).order_by(ALIASES.c.alias)
    return list((await tx.execute(query)).scalars())


async def version_with_label(tx: AsyncConnection, model: str, label: str) -> str | None:
    """Return the version with this label, or None."""
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, VERSIONS.c.label == label)
    return (await tx.execute(query)).scalar_one_or_none()


async def routing_names(tx: AsyncConnection, model: str) -> dict[str, str]:
    """Return the names that the routing contains, each with its version: aliases, and labels of versions that may be
    served."""
    conditions = and_(VERSIONS.c.model == model, VERSIONS.c.label.is_not(None), _may_be_served())
    query = select(VERSIONS.c.label, VERSIONS.c.version).where(conditions).order_by(VERSIONS.c.number.desc())
    labels = await tx.execute(query)
    return dict(labels.all()) | await aliases(tx, model)


async def requested_versions(tx: AsyncConnection, model: str) -> list[str]:
    """Return the versions of a model whose serving an operator requested or that have an alias, in the order of
    registration."""
    aliased = select(ALIASES.c.version).where(ALIASES.c.model == model)
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, _may_be_served())
    query = query.where(or_(VERSIONS.c.served, VERSIONS.c.version.in_(aliased)))
    return list((await tx.execute(query.order_by(VERSIONS.c.number))).scalars())


async def all_requested_versions(tx: AsyncConnection) -> list[str]:
    """Return the versions of all models whose serving an operator requested or that have an alias, in the order of
    registration."""
    aliased = select(ALIASES.c.version)
    query = select(VERSIONS.c.version).where(_may_be_served(), or_(VERSIONS.c.served, VERSIONS.c.version.in_(aliased)))
    return list((await tx.execute(query.order_by(VERSIONS.c.number))).scalars())


async def untrained_versions(tx: AsyncConnection, model: str, limit: int) -> list[str]:
    """Return up to `limit` versions of a model that no trainer of this installation published, newest first."""
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, VERSIONS.c.trained.is_(False))
    return list((await tx.execute(query.order_by(VERSIONS.c.number.desc()).limit(limit))).scalars())


async def has_trained_version(tx: AsyncConnection, model: str) -> bool:
    """Return whether a trainer of this installation has published a version of this model."""
    query = select(VERSIONS.c.number).where(VERSIONS.c.model == model, VERSIONS.c.trained).limit(1)
    return (await tx.execute(query)).first() is not None


async def tags(tx: AsyncConnection, versions: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the tags of each version in alphabetical order."""
    query = select(TAGS.c.version, TAGS.c.tag).where(TAGS.c.version.in_(list(versions))).order_by(TAGS.c.tag)
    tags_by_version: dict[str, list[str]] = defaultdict(list)
    for version, tag in await tx.execute(query):
        tags_by_version[version].append(tag)
    return {version: tuple(version_tags) for version, version_tags in tags_by_version.items()}


async def notes(tx: AsyncConnection, version: str) -> tuple[Note, ...]:
    """Return the notes of a version, oldest first."""
    query = select(NOTES).where(NOTES.c.version == version).order_by(NOTES.c.id).limit(NOTES_MAX)
    rows = (await tx.execute(query)).mappings()
    return tuple(Note(text=row["text"], who=row["who"], at=from_epoch_ms(row["at_ms"])) for row in rows)


def _may_be_served() -> ColumnElement[bool]:
    return and_(VERSIONS.c.retired_ms.is_(None), VERSIONS.c.state.not_in(("withdrawn", "rejected")))

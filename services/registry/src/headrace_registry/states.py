"""Models and versions as the REST interface shows them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.catalog import queries
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_schemas import ModelEvent
from headrace_schemas.registry_api import ModelState, VersionState


async def of_model(tx: AsyncConnection, record: ModelRecord) -> ModelState:
    return ModelState(
        id=record.model,
        champion=record.champion,
        previous=record.previous,
        candidate=record.candidate,
        pinned=record.pinned,
        paused=record.paused,
        anchor=record.anchor or record.champion,
        trials=record.trials,
        aliases=await queries.aliases(tx, record.model),
        revision=record.revision,
    )


async def of_versions(tx: AsyncConnection, found: Sequence[VersionRecord]) -> tuple[VersionState, ...]:
    names = [version.version for version in found]
    decided = await store.decisions(tx, names)
    tags = await queries.tags(tx, names)
    return tuple(_version(version, decided, tags.get(version.version, ())) for version in found)


def _version(version: VersionRecord, decided: Sequence[ModelEvent], tags: tuple[str, ...]) -> VersionState:
    return VersionState(
        id=version.version,
        model=version.model,
        lineage=version.lineage,
        step=version.step,
        parent=version.parent,
        base=version.base,
        state=version.state,
        registered_at=version.registered,
        trained=version.trained,
        label=version.label,
        served=version.served,
        retired=version.retired,
        collected=version.collected,
        tags=tags,
        manifest=version.manifest,
        decisions=tuple(event for event in decided if event.version == version.version),
    )

"""Models and versions in the form of the REST interface."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage import queries, store
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.versions import probe
from headrace_schemas import ModelEvent, Replica
from headrace_schemas.http.registry_api import ModelState, VersionState

_TROUBLE_LENGTH_MAX = 4096


async def model_state(
    tx: AsyncConnection, record: ModelRecord, replicas: Sequence[Replica] | None = None
) -> ModelState:
    """Return the state of a model. `replicas` are the live ones; without them `trouble` is left out."""
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
        trouble=None if replicas is None else await _trouble(tx, record, replicas),
    )


async def _trouble(tx: AsyncConnection, record: ModelRecord, replicas: Sequence[Replica]) -> str | None:
    """Return why no replica serves the model, or None.

    Without a champion, the reason is the delay of the candidate, or the refusal of the newest version.
    """
    if record.champion is not None:
        reason = probe.unserved_reason(record.champion, replicas)
        return reason and f"no replica serves the champion {record.champion}: {reason}"[:_TROUBLE_LENGTH_MAX]
    if record.candidate is not None:
        reason = probe.unserved_reason(record.candidate, replicas) or "its trial is under way"
        return f"no version serves yet, the candidate is {record.candidate}: {reason}"[:_TROUBLE_LENGTH_MAX]
    newest = await store.newest_versions(tx, record.model, 1)
    decisions = await store.decisions(tx, [version.version for version in newest])
    if not decisions:
        return None
    last = decisions[-1]
    return f"no version serves, {last.version} was {last.decision}: {last.reason or 'no reason'}"[:_TROUBLE_LENGTH_MAX]


async def version_states(tx: AsyncConnection, versions: Sequence[VersionRecord]) -> tuple[VersionState, ...]:
    """Return the states of versions with their decisions and tags."""
    names = [version.version for version in versions]
    decided = await store.decisions(tx, names)
    tags = await queries.tags(tx, names)
    return tuple(_version(version, decided, tags.get(version.version, ())) for version in versions)


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

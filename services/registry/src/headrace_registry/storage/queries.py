"""Reads aliases, labels, tags and notes, and which versions operators requested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.storage.tables import ALIASES, NOTES, TAGS, VERSIONS
from headrace_runtime.clock import from_epoch_ms
from headrace_schemas.http.catalog import NOTES_MAX, Note


async def aliases(tx: AsyncConnection, model: str) -> dict[str, str]:
    """Return the version that each alias of a model names."""
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
    """Return the names in the routing: aliases, and the labels of versions that may be served."""
    conditions = and_(VERSIONS.c.model == model, VERSIONS.c.label.is_not(None), _may_be_served())
    query = select(VERSIONS.c.label, VERSIONS.c.version).where(conditions).order_by(VERSIONS.c.number.desc())
    labels = await tx.execute(query)
    return dict(labels.all()) | await aliases(tx, model)


async def requested_versions(tx: AsyncConnection, model: str) -> list[str]:
    """Return the versions that an operator serves or an alias names, in the order of arrival."""
    aliased = select(ALIASES.c.version).where(ALIASES.c.model == model)
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, _may_be_served())
    query = query.where(or_(VERSIONS.c.served, VERSIONS.c.version.in_(aliased)))
    return list((await tx.execute(query.order_by(VERSIONS.c.number))).scalars())


async def all_requested_versions(tx: AsyncConnection) -> list[str]:
    """Return the requested versions of all models."""
    aliased = select(ALIASES.c.version)
    query = select(VERSIONS.c.version).where(_may_be_served(), or_(VERSIONS.c.served, VERSIONS.c.version.in_(aliased)))
    return list((await tx.execute(query.order_by(VERSIONS.c.number))).scalars())


async def untrained_versions(tx: AsyncConnection, model: str, limit: int) -> list[str]:
    """Return up to `limit` versions of a model that no trainer of this installation made, the newest first."""
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, VERSIONS.c.trained.is_(False))
    return list((await tx.execute(query.order_by(VERSIONS.c.number.desc()).limit(limit))).scalars())


async def has_trained_version(tx: AsyncConnection, model: str) -> bool:
    """Return whether a trainer of this installation has made a version of this model."""
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
    """Return the notes of a version, the oldest first."""
    query = select(NOTES).where(NOTES.c.version == version).order_by(NOTES.c.id).limit(NOTES_MAX)
    rows = (await tx.execute(query)).mappings()
    return tuple(Note(text=row["text"], who=row["who"], at=from_epoch_ms(row["at_ms"])) for row in rows)


def _may_be_served() -> ColumnElement[bool]:
    return and_(VERSIONS.c.retired_ms.is_(None), VERSIONS.c.state.not_in(("withdrawn", "rejected")))

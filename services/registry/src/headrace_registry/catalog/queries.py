"""Reads aliases, labels, tags, notes and what is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.tables import ALIASES, NOTES, TAGS, VERSIONS
from headrace_runtime.clock import from_epoch_ms
from headrace_schemas.catalog import NOTES_MAX, Note


async def aliases(tx: AsyncConnection, model: str) -> dict[str, str]:
    """What each alias of a model names."""
    query = select(ALIASES.c.alias, ALIASES.c.version).where(ALIASES.c.model == model).order_by(ALIASES.c.alias)
    return dict((await tx.execute(query)).all())


async def aliases_of(tx: AsyncConnection, version: str) -> list[str]:
    """The aliases that name a version."""
    query = select(ALIASES.c.alias).where(ALIASES.c.version == version).order_by(ALIASES.c.alias)
    return list((await tx.execute(query)).scalars())


async def labelled(tx: AsyncConnection, model: str, label: str) -> str | None:
    """The version that has this label."""
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, VERSIONS.c.label == label)
    return (await tx.execute(query)).scalar_one_or_none()


async def names(tx: AsyncConnection, model: str) -> dict[str, str]:
    """Aliases, and the labels of what may be served."""
    labelled = and_(VERSIONS.c.model == model, VERSIONS.c.label.is_not(None), _alive())
    query = select(VERSIONS.c.label, VERSIONS.c.version).where(labelled).order_by(VERSIONS.c.number.desc())
    found = await tx.execute(query)
    return dict(found.all()) | await aliases(tx, model)


async def asked_for(tx: AsyncConnection, model: str) -> list[str]:
    """The versions that are held ready because somebody asked for them or an alias names them, in order of arrival."""
    aliased = select(ALIASES.c.version).where(ALIASES.c.model == model)
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, _alive())
    query = query.where(or_(VERSIONS.c.served, VERSIONS.c.version.in_(aliased)))
    return list((await tx.execute(query.order_by(VERSIONS.c.number))).scalars())


async def all_asked_for(tx: AsyncConnection) -> list[str]:
    """The same over all models."""
    aliased = select(ALIASES.c.version)
    query = select(VERSIONS.c.version).where(_alive(), or_(VERSIONS.c.served, VERSIONS.c.version.in_(aliased)))
    return list((await tx.execute(query.order_by(VERSIONS.c.number))).scalars())


async def untrained(tx: AsyncConnection, model: str, limit: int) -> list[str]:
    """The versions that nobody trains here, the last ones first."""
    query = select(VERSIONS.c.version).where(VERSIONS.c.model == model, VERSIONS.c.trained.is_(False))
    return list((await tx.execute(query.order_by(VERSIONS.c.number.desc()).limit(limit))).scalars())


async def any_trained(tx: AsyncConnection, model: str) -> bool:
    """Whether a trainer of ours has made a version of this model."""
    query = select(VERSIONS.c.number).where(VERSIONS.c.model == model, VERSIONS.c.trained).limit(1)
    return (await tx.execute(query)).first() is not None


async def tags(tx: AsyncConnection, versions: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By version, in order."""
    query = select(TAGS.c.version, TAGS.c.tag).where(TAGS.c.version.in_(list(versions))).order_by(TAGS.c.tag)
    found: dict[str, list[str]] = defaultdict(list)
    for version, tag in await tx.execute(query):
        found[version].append(tag)
    return {version: tuple(several) for version, several in found.items()}


async def notes(tx: AsyncConnection, version: str) -> tuple[Note, ...]:
    """The oldest first."""
    query = select(NOTES).where(NOTES.c.version == version).order_by(NOTES.c.id).limit(NOTES_MAX)
    rows = (await tx.execute(query)).mappings()
    return tuple(Note(text=row["text"], who=row["who"], at=from_epoch_ms(row["at_ms"])) for row in rows)


def _alive() -> ColumnElement[bool]:
    return and_(VERSIONS.c.retired_ms.is_(None), VERSIONS.c.state.not_in(("withdrawn", "rejected")))

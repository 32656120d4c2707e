"""Tags and notes of versions."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.records import VersionRecord
from headrace_registry.tables import NOTES, TAGS
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_runtime.storage.tables import upsert
from headrace_schemas.http.catalog import NOTES_MAX

TAGS_MAX = 64
"""Largest number of tags of one version."""


async def change_tags(tx: AsyncConnection, version: VersionRecord, add: Iterable[str], remove: Iterable[str]) -> None:
    """Add and remove tags. Existing tags may be added again, and missing tags may be removed."""
    removed = TAGS.c.tag.in_(list(remove))
    await tx.execute(delete(TAGS).where(TAGS.c.version == version.version, removed))
    for tag in add:
        await upsert(tx, TAGS, {"version": version.version, "tag": tag}, {}, update=False)
    count = (await tx.execute(select(func.count()).where(TAGS.c.version == version.version))).scalar_one()
    if count > TAGS_MAX:
        raise Refused(
            409, "too_many_tags", f"{version.version} would have {count} tags, at most {TAGS_MAX} are allowed", "add"
        )


async def add_note(tx: AsyncConnection, now: datetime, version: VersionRecord, text: str, author: str) -> None:
    """Add a note. Notes are never changed."""
    count = (await tx.execute(select(func.count()).where(NOTES.c.version == version.version))).scalar_one()
    if count >= NOTES_MAX:
        raise Refused(
            409, "too_many_notes", f"{version.version} has {count} notes, the most that a version may have", "text"
        )
    await tx.execute(insert(NOTES).values(version=version.version, text=text, who=author, at_ms=epoch_ms(now)))

"""Tags and notes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.records import VersionRecord
from headrace_registry.tables import NOTES, TAGS
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_runtime.upsert import upsert
from headrace_schemas.catalog import NOTES_MAX

TAGS_MAX = 64
"""Of one version."""


async def tag(tx: AsyncConnection, version: VersionRecord, add: Iterable[str], remove: Iterable[str]) -> None:
    """A tag that is there stays, one that is not there is not missed."""
    gone = TAGS.c.tag.in_(list(remove))
    await tx.execute(delete(TAGS).where(TAGS.c.version == version.version, gone))
    for one in add:
        await upsert(tx, TAGS, {"version": version.version, "tag": one}, {}, update=False)
    count = (await tx.execute(select(func.count()).where(TAGS.c.version == version.version))).scalar_one()
    if count > TAGS_MAX:
        raise Refused(
            409, "too_many_tags", f"{version.version} would have {count} tags, {TAGS_MAX} are the most", "add"
        )


async def note(tx: AsyncConnection, now: datetime, version: VersionRecord, text: str, who: str) -> None:
    """Notes stay: what was written once is not changed."""
    count = (await tx.execute(select(func.count()).where(NOTES.c.version == version.version))).scalar_one()
    if count >= NOTES_MAX:
        raise Refused(409, "too_many_notes", f"{version.version} has {count} notes, no more are kept", "text")
    await tx.execute(insert(NOTES).values(version=version.version, text=text, who=who, at_ms=epoch_ms(now)))

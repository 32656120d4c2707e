"""The audit log: who asked for which change, and why. A row is written with the change, in its transaction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request

from headrace_registry.tables import AUDIT
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.settings import Common
from headrace_runtime.web import header_of
from headrace_schemas.catalog import WHO_HEADER, AuditEntry
from headrace_schemas.text import printable

_WHO_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class Asker:
    """`principal` is what the key proves, `who` what the asker says."""

    principal: str
    who: str


@dataclass(frozen=True, slots=True)
class Act:
    """What is asked for, as the log keeps it."""

    asker: Asker
    action: str
    version: str | None = None
    why: str = ""
    detail: str = ""


def asker(request: Request, common: Common) -> Asker:
    """Whoever sends `request`, after its key was checked."""
    principal = "internal" if common.security.internal_key.get_secret_value() else "open"
    return Asker(principal, printable(header_of(request, WHO_HEADER), _WHO_LENGTH_MAX))


async def write(tx: AsyncConnection, now: datetime, model: str, act: Act) -> None:
    """Keep it with the change."""
    values = {
        "at_ms": epoch_ms(now),
        "principal": act.asker.principal,
        "who": act.asker.who,
        "action": act.action,
        "model": model,
        "version": act.version,
        "why": act.why,
        "detail": act.detail,
    }
    await tx.execute(insert(AUDIT).values(values))


async def read(tx: AsyncConnection, model: str | None, before: int | None, limit: int) -> tuple[AuditEntry, ...]:
    """The newest first, those with a number below `before`."""
    query = select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if model is not None:
        query = query.where(AUDIT.c.model == model)
    if before is not None:
        query = query.where(AUDIT.c.id < before)
    rows = (await tx.execute(query)).mappings()
    return tuple(
        AuditEntry(
            number=row["id"],
            at=from_epoch_ms(row["at_ms"]),
            principal=row["principal"],
            who=row["who"],
            action=row["action"],
            model=row["model"],
            version=row["version"],
            why=row["why"],
            detail=row["detail"],
        )
        for row in rows
    )

"""The audit log: the requester, the action and the reason of each change. A row is written in the transaction of the
change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request

from headrace_registry.storage.tables import AUDIT
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.http.web import header_of
from headrace_runtime.settings.sections import Common
from headrace_schemas.http.catalog import WHO_HEADER, AuditEntry
from headrace_schemas.values.text import printable

_WHO_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class Requester:
    """Sender of a request. The key proves `principal`; the request itself gives the name `who`."""

    principal: str
    who: str


@dataclass(frozen=True, slots=True)
class AuditedAction:
    """Change that a user requested, as the audit log stores it."""

    requester: Requester
    action: str
    version: str | None = None
    why: str = ""
    detail: str = ""


def requester(request: Request, common: Common) -> Requester:
    """Return the sender of `request`. Its key has been checked already."""
    principal = "internal" if common.security.internal_key.get_secret_value() else "open"
    return Requester(principal, printable(header_of(request, WHO_HEADER), _WHO_LENGTH_MAX))


async def add_entry(tx: AsyncConnection, now: datetime, model: str, act: AuditedAction) -> None:
    """Add an operator's action to the audit log, in the same transaction as the change."""
    values = {
        "at_ms": epoch_ms(now),
        "principal": act.requester.principal,
        "who": act.requester.who,
        "action": act.action,
        "model": model,
        "version": act.version,
        "why": act.why,
        "detail": act.detail,
    }
    await tx.execute(insert(AUDIT).values(values))


async def read_entries(
    tx: AsyncConnection, model: str | None, before: int | None, limit: int
) -> tuple[AuditEntry, ...]:
    """Return up to `limit` entries with a number below `before`, the newest first."""
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

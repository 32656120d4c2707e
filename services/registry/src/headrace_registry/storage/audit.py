"""Audit log: who requested each change, the action, and the reason. A row is written in the transaction of the
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
    """Sender of a request. `principal` is proved by the key of the request; `who` is the name that the request
    states."""

    principal: str
    who: str


@dataclass(frozen=True, slots=True)
class AuditedAction:
    """Requested change in the form in which the audit log stores it."""

    requester: Requester
    action: str
    version: str | None = None
    why: str = ""
    detail: str = ""


def requester(request: Request, common: Common) -> Requester:
    """Return the sender of `request`, whose key must have been checked before."""
    principal = "internal" if common.security.internal_key.get_secret_value() else "open"
    return Requester(principal, printable(header_of(request, WHO_HEADER), _WHO_LENGTH_MAX))


async def add_entry(tx: AsyncConnection, now: datetime, model: str, act: AuditedAction) -> None:
    """Add a requested change to the audit log. Call it in the transaction of the change."""
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
    """Return up to `limit` entries with numbers below `before` (None for no bound), newest first, of one model or of
    all."""
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

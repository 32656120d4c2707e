"""Store of held records: records of tenants with too many refusals, which wait in the database for a retry.

They are rows of the table `jobs`, which every service with a processor has, ordered by offset within a topic partition.
Their number and their bytes are bounded for each tenant.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.database import Database
from headrace_runtime.metrics import RECORDS_HELD
from headrace_runtime.stream_tables import StreamTables
from headrace_runtime.upsert import upsert
from headrace_runtime.wire import Record

HELD_RECORDS_MAX = 10_000
"""Maximum number of held records of one tenant."""
HELD_BYTES_MAX = 64 * 1024 * 1024
"""Maximum number of bytes in the values and headers of a tenant's held records."""
_KIND = "held"
_PAGE = 100


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A held record. `name` is the id of its row."""

    name: str
    tenant: str
    record: Record


@dataclass(frozen=True, slots=True)
class RecordToHold:
    """A record to be held, because too many records of its tenant were refused."""

    record: Record
    tenant: str


class HeldRecords:
    """Held records of one service. Methods with `tx` run in the caller's transaction."""

    def __init__(self, service: str, tables: StreamTables) -> None:
        self._service = service
        self._table = tables.jobs
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._after = ""
        self.is_due = True
        """Whether held records must be retried, which is the case after a start and after `resume`."""

    def has_capacity(self, tenant: str, record: Record) -> bool:
        """Return whether one more record of the tenant may be held."""
        full = self._bytes[tenant] + _size(record) > HELD_BYTES_MAX
        return self._counts[tenant] < HELD_RECORDS_MAX and not full

    def count(self, tenant: str, record: Record) -> None:
        """Count a held record, after its transaction has committed."""
        self._counts[tenant] += 1
        self._bytes[tenant] += _size(record)
        RECORDS_HELD.labels(self._service).set(sum(self._counts.values()))

    def advance(self, page: Sequence[HeldRecord]) -> None:
        """Continue with the page after `page`. After an empty page the retry is complete."""
        self.is_due = bool(page)
        self._after = page[-1].name if page else ""

    async def hold(self, tx: AsyncConnection, tenant: str, record: Record, now: datetime) -> None:
        """Store a record, unless it is already stored."""
        values = {"kind": _KIND, "payload": _packed(tenant, record), "attempts": 0, "due_ms": epoch_ms(now)}
        await upsert(tx, self._table, {"job_id": _name(record)}, values, update=False)

    async def remove(self, tx: AsyncConnection, name: str) -> None:
        """Remove the record with the row id `name`."""
        await tx.execute(delete(self._table).where(self._table.c.job_id == name))

    async def page(self, database: Database) -> list[HeldRecord]:
        """Return the next records to retry, ordered by topic, partition and offset.

        The caller counts those that stay.
        """
        if not self._after:
            self._counts.clear()
            self._bytes.clear()
        table = self._table
        query = select(table.c.job_id, table.c.payload).where(table.c.kind == _KIND, table.c.job_id > self._after)
        async with database.transaction() as tx:
            rows = (await tx.execute(query.order_by(table.c.job_id).limit(_PAGE))).all()
        return [HeldRecord(row.job_id, *_unpacked(row.payload)) for row in rows]


def _name(record: Record) -> str:
    """Return a row id that sorts by topic, partition and offset in both databases."""
    return f"held/{record.topic}/{record.partition:010d}/{record.offset:020d}"


def _size(record: Record) -> int:
    return len(record.value or b"") + sum(len(name) + len(text or b"") for name, text in record.headers)


def _packed(tenant: str, record: Record) -> bytes:
    fields = {
        "tenant": tenant,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "key": _coded(record.key),
        "value": _coded(record.value),
        "headers": [[name, _coded(text)] for name, text in record.headers],
        "timestamp_ms": record.timestamp_ms,
    }
    return json.dumps(fields).encode()


def _unpacked(payload: bytes) -> tuple[str, Record]:
    fields = json.loads(payload)
    headers = tuple((name, _decoded(text)) for name, text in fields["headers"])
    position = fields["topic"], fields["partition"], fields["offset"]
    record = Record(*position, _decoded(fields["key"]), _decoded(fields["value"]), headers, fields["timestamp_ms"])
    return fields["tenant"], record


def _coded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)

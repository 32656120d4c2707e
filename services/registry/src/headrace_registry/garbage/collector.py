"""Finds what may go and removes it, version by version: marked in the database first, removed afterwards.

A process that dies in between leaves a marked version with some files, and the next run removes those. Registering
files and removing them exclude each other by one lock, so what was just found in the store is not removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.catalog import audit, retiring
from headrace_registry.garbage import lineages, plan
from headrace_registry.garbage.plan import GarbagePlan
from headrace_registry.leader import LeaderLease
from headrace_registry.records import VersionRecord
from headrace_registry.tables import VERSIONS
from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import CorruptBlob, MissingBlob
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor
from headrace_runtime.versions import read_manifest
from headrace_schemas import Event
from headrace_schemas.catalog import GarbageReport
from headrace_schemas.manifest import Manifest

log = get_logger(__name__)
RETIRED_MAX = 1000
"""Retired versions that one run looks at, the oldest first."""


class GarbageCollector:
    """`run` by whoever leads. `lock` is held while files are removed."""

    def __init__(self, blobs: BlobStore, processor: Processor, lease: LeaderLease, retired_for_s: float) -> None:
        self._blobs = blobs
        self._processor = processor
        self._lease = lease
        self._retired_for = timedelta(seconds=retired_for_s)
        self.lock = asyncio.Lock()

    async def run(self, act: audit.Act, *, dry_run: bool) -> GarbageReport:
        """Raises `Refused` when a lineage cannot be read, `Unavailable` while the blob store is away."""
        async with self.lock:
            found = await self._plan()
            report = GarbageReport(
                dry_run=dry_run,
                collected=tuple(one.report for one in found.doomed),
                kept=found.kept,
                size_bytes=sum(one.report.size_bytes for one in found.doomed),
            )
            if not dry_run:
                for one in found.doomed:
                    await self._mark(one.version, act, f"{one.report.files} files, {one.report.size_bytes} bytes")
                    for blob in one.blobs:
                        await asyncio.to_thread(self._blobs.delete, blob)
                    log.info("collected", version=one.version, files=one.report.files)
        return report

    async def _plan(self) -> GarbagePlan:
        retired: list[VersionRecord] = []
        others: list[VersionRecord] = []
        needs: dict[str, list[str]] = {}

        async def look(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            for one in await store.every(tx):
                (retired if _old(one, now - self._retired_for) else others).append(one)
            for one in retired[:RETIRED_MAX]:
                model = await store.model(tx, one.model)
                assert model is not None
                if used := await retiring.users(tx, model, one):
                    needs[one.version] = used
            return ()

        await self._processor.step(look)
        for lineage, versions in (await asyncio.to_thread(lineages.needed, self._blobs)).items():
            for version in versions:
                needs.setdefault(version, []).append(f"lineage {lineage} goes on from it or may go back to it")
        manifests = await asyncio.to_thread(self._manifests, [*others, *retired[RETIRED_MAX:]])
        return plan.make(await asyncio.to_thread(self._manifests, retired[:RETIRED_MAX]), manifests, needs)

    def _manifests(self, versions: Sequence[VersionRecord]) -> list[Manifest]:
        """Those that exist: a version whose manifest was never there was rejected, and has no files."""
        found = []
        for one in versions:
            try:
                found.append(read_manifest(self._blobs, one.manifest))
            except (MissingBlob, CorruptBlob) as error:
                if one.state != "rejected":
                    raise
                log.warning("manifest_passed_over", version=one.version, error=str(error))
        return found

    async def _mark(self, version: str, act: audit.Act, detail: str) -> None:
        async def mark(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            found = await store.version(tx, version)
            assert found is not None
            statement = update(VERSIONS).where(VERSIONS.c.version == version, VERSIONS.c.retired_ms.is_not(None))
            await tx.execute(statement.values(collected_ms=epoch_ms(now)))
            if not found.collected:
                noted = audit.Act(act.asker, act.action, version, act.why, detail)
                await audit.write(tx, now, found.model, noted)
            return ()

        await self._processor.step(mark)


def _old(version: VersionRecord, before: datetime) -> bool:
    return version.retired_at is not None and version.retired_at <= before

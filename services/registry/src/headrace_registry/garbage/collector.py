"""Finds what may go and removes it, version by version: marked in the database first, removed afterwards.

A process that dies in between leaves a marked version with some files, and the next run removes those. Registering
files and removing them exclude each other by one lock, so what was just found in the store is not removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.catalog import audit, retiring
from headrace_registry.garbage import bound, lineages, plan
from headrace_registry.garbage.plan import GarbagePlan
from headrace_registry.leader import LeaderLease
from headrace_registry.records import VersionRecord
from headrace_registry.tables import VERSIONS
from headrace_registry.transition import Transition
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

    def __init__(
        self,
        blobs: BlobStore,
        processor: Processor,
        lease: LeaderLease,
        retired_for_s: float,
        bytes_max: int | None = None,
    ) -> None:
        """`bytes_max`: bytes that the files of all versions may take; None for `bound.default_bound`."""
        self._blobs = blobs
        self._processor = processor
        self._lease = lease
        self._retired_for = timedelta(seconds=retired_for_s)
        self._bytes_max = bytes_max
        self._manifest_cache: dict[str, Manifest] = {}
        """Of the versions whose files are there. A manifest never changes."""
        self._within_bound: int | None = None
        """How many versions there were when they last kept to the bound."""
        self.lock = asyncio.Lock()

    async def run(self, act: audit.Act, *, dry_run: bool) -> GarbageReport:
        """Raises `Refused` when a lineage cannot be read, `Unavailable` while the blob store is away."""
        async with self.lock:
            found = await self._plan()
            if not dry_run:
                await self._remove(found, act)
        return GarbageReport(
            dry_run=dry_run,
            collected=tuple(one.report for one in found.doomed),
            kept=found.kept,
            size_bytes=sum(one.report.size_bytes for one in found.doomed),
        )

    async def keep_bound(self) -> tuple[str, ...]:
        """Retire and remove what the files of all versions take beyond the bound (`bound.versions_beyond`). Returns the
        versions that were removed. Raises as `run` does.
        """
        async with self.lock:
            versions = await self._uncollected()
            if len(versions) == self._within_bound:
                return ()
            manifests = await asyncio.to_thread(self._cached_manifests, versions)
            present = [version for version in versions if version.version in manifests]
            blobs = {name: {one.blob.sha256: one.blob.size for one in found.files} for name, found in manifests.items()}
            bytes_max = self._bytes_max or bound.default_bound(blobs)
            if not bound.versions_beyond(present, blobs, set(), bytes_max):
                self._within_bound = len(versions)
                return ()
            needed = await self._needed(versions)
            for lineage in (await asyncio.to_thread(lineages.needed, self._blobs)).values():
                needed |= lineage
            chosen = bound.versions_beyond(present, blobs, needed, bytes_max)
            why = f"the files of all versions take more than {bytes_max} bytes; set registry.versions_bytes_max higher"
            act = audit.Act(audit.Asker("registry", "registry"), "collect", None, why)
            retired = [version for version in chosen if await self._retire(version)]
            await self._remove(await self._plan(retired), act)
        return tuple(retired)

    async def _remove(self, found: GarbagePlan, act: audit.Act) -> None:
        for one in found.doomed:
            await self._mark(one.version, act, f"{one.report.files} files, {one.report.size_bytes} bytes")
            for blob in one.blobs:
                await asyncio.to_thread(self._blobs.delete, blob)
            self._manifest_cache.pop(one.version, None)
            log.info("collected", version=one.version, files=one.report.files)

    async def _uncollected(self) -> list[VersionRecord]:
        """Return the versions whose files are there."""
        versions: list[VersionRecord] = []

        async def look(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            versions[:] = [version for version in await store.every(tx) if not version.collected]
            return ()

        await self._processor.step(look)
        return versions

    async def _needed(self, versions: Sequence[VersionRecord]) -> set[str]:
        """Return those that the registry's own state needs."""
        needed: set[str] = set()

        async def look(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            needed.clear()
            for version in versions:
                model = await store.model(tx, version.model)
                assert model is not None
                if await retiring.users(tx, model, version):
                    needed.add(version.version)
            return ()

        await self._processor.step(look)
        return needed

    async def _retire(self, version: str) -> bool:
        """Return whether it is retired now; something may need it meanwhile."""
        outcomes: list[bool] = []

        async def retire(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.version(tx, version)
            assert record is not None
            model = await store.model(tx, record.model)
            assert model is not None
            outcomes[:] = [not await retiring.users(tx, model, record)]
            if not outcomes[0]:
                return ()
            transition = Transition(tx, now)
            await retiring.retire(tx, now, transition, model, record)
            return await transition.finish()

        await self._processor.step(retire)
        return outcomes[0]

    def _cached_manifests(self, versions: Sequence[VersionRecord]) -> dict[str, Manifest]:
        for version in versions:
            if version.version not in self._manifest_cache:
                self._manifest_cache |= {found.version: found for found in self._manifests([version])}
        return {
            one.version: self._manifest_cache[one.version] for one in versions if one.version in self._manifest_cache
        }

    async def _plan(self, chosen: Collection[str] = ()) -> GarbagePlan:
        """`chosen` versions may go however short they have been retired."""
        retired: list[VersionRecord] = []
        others: list[VersionRecord] = []
        needs: dict[str, list[str]] = {}

        async def look(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            for one in await store.every(tx):
                old = one.version in chosen or _old(one, now - self._retired_for)
                (retired if old else others).append(one)
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

"""Garbage collection of versions: a version is first marked as collected in the database, then its files are deleted.

If the process dies in between, the next run deletes the remaining files. A lock prevents versions from being registered
while files are deleted, because a registration may rely on a file that it has just found in the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import catalog
from headrace_registry.garbage import plan
from headrace_registry.garbage import plan as lineages
from headrace_registry.garbage import plan as storage_limit
from headrace_registry.garbage.plan import GarbagePlan
from headrace_registry.storage import audit, store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.records import VersionRecord
from headrace_registry.storage.tables import VERSION_FILES, VERSIONS
from headrace_registry.versions.transition import Transition
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.tables import upsert
from headrace_runtime.storage.versions import read_manifest
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event
from headrace_schemas.http.catalog import GarbageReport, KeptVersion
from headrace_schemas.values.blobs import Manifest

log = get_logger(__name__)
RETIRED_MAX = 1000
"""Maximum number of retired versions that one run examines, oldest first."""


class GarbageCollector:
    """Collector that deletes the files of retired versions.

    Only the leader may call `run`. The collector holds `lock` while it deletes files.
    """

    def __init__(
        self,
        blobs: BlobStore,
        processor: Processor,
        lease: LeaderLease,
        retired_for_s: float,
        bytes_max: int | None = None,
    ) -> None:
        """Create the collector.

        Args:
            retired_for_s: seconds that a version must have been retired before its files are removed.
            bytes_max: maximum total size of all versions' files; None for `plan.default_limit`.
        """
        self._blobs = blobs
        self._processor = processor
        self._lease = lease
        self._retired_for = timedelta(seconds=retired_for_s)
        self._bytes_max = bytes_max
        self._manifest_cache: dict[str, Manifest] = {}
        """Manifests of the versions with files in the store. A manifest never changes."""
        self._sizes: dict[str, dict[str, int]] = {}
        """Sizes of the files in the store by digest, for each of these versions. A manifest may list other ones."""
        self._recorded: set[str] = set()
        """Versions whose files are in `VERSION_FILES`."""
        self._problems: dict[str, str] = {}
        """Versions whose manifest could not be read when it was read last, with the reason."""
        self._named: dict[str, str] | None = None
        """The problems that `VERSION_FILES` has; None until they have been read."""
        self._within_limit: frozenset[str] | None = None
        """Versions when they were last within the limit."""
        self.lock = asyncio.Lock()

    async def run(self, act: audit.AuditedAction, *, dry_run: bool) -> GarbageReport:
        """Delete the files of retired versions from the blob store. Return a report of the versions and files.

        Args:
            act: requester and reason, which the audit log stores for each version whose files are removed.
            dry_run: whether to report the files without deleting them.

        Raises:
            Refused: the saved state of a lineage cannot be read, so that it is unknown which files it needs; or a
                manifest, so that it is unknown which files its version has, because no earlier run could read it.
            Unavailable: the blob store does not answer.
        """
        async with self.lock:
            plan_made = await self._plan()
            if not dry_run:
                await self._remove(plan_made, act)
        return GarbageReport(
            dry_run=dry_run,
            collected=tuple(collectable.report for collectable in plan_made.collectable),
            kept=plan_made.kept,
            size_bytes=sum(collectable.report.size_bytes for collectable in plan_made.collectable),
        )

    async def keep_limit(self) -> tuple[str, ...]:
        """If all versions together exceed the storage limit, retire some (`plan.versions_over_limit`) and delete their
        files. Return the names of these versions.

        Raises the same errors as `run`.
        """
        async with self.lock:
            versions = await self._versions_with_files()
            names = frozenset(version.version for version in versions)
            if names == self._within_limit:
                return ()
            manifests = await asyncio.to_thread(self._cached_manifests, versions)
            await self._record(versions, manifests.values())
            present = [version for version in versions if version.version in manifests]
            blobs = {name: self._sizes[name] for name in manifests}
            bytes_max = self._bytes_max or storage_limit.default_limit(blobs)
            if not storage_limit.versions_over_limit(present, blobs, set(), bytes_max):
                self._within_limit = names
                return ()
            needed = await self._needed(versions)
            for lineage in (await asyncio.to_thread(lineages.needed_versions, self._blobs)).values():
                needed |= lineage
            chosen = storage_limit.versions_over_limit(present, blobs, needed, bytes_max)
            reason = (
                f"all versions and the next take more than {bytes_max} bytes; set registry.versions_bytes_max higher"
            )
            act = audit.AuditedAction(audit.Requester("registry", "registry"), "collect", None, reason)
            retired = [version for version in chosen if await self._retire(version)]
            await self._remove(await self._plan(retired), act)
        return tuple(retired)

    async def _remove(self, garbage_plan: GarbagePlan, act: audit.AuditedAction) -> None:
        for collectable in garbage_plan.collectable:
            await self._mark(
                collectable.version, act, f"{collectable.report.files} files, {collectable.report.size_bytes} bytes"
            )
            for blob in collectable.blobs:
                await asyncio.to_thread(self._blobs.delete, blob)
            self._manifest_cache.pop(collectable.version, None)
            self._sizes.pop(collectable.version, None)
            log.info("collected", version=collectable.version, files=collectable.report.files)

    async def _versions_with_files(self) -> list[VersionRecord]:
        """Return the versions whose files were not deleted."""
        versions: list[VersionRecord] = []

        async def read_versions(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            versions[:] = [version for version in await store.all_versions(tx) if not version.collected]
            return ()

        await self._processor.step(read_versions)
        return versions

    async def _needed(self, versions: Sequence[VersionRecord]) -> set[str]:
        """Return the names of the versions that the registry's own state needs, for example by a role or an alias."""
        needed: set[str] = set()

        async def read_versions(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            needed.clear()
            for version in versions:
                model = await store.load_model(tx, version.model)
                assert model is not None
                if await catalog.reasons_in_use(tx, model, version):
                    needed.add(version.version)
            return ()

        await self._processor.step(read_versions)
        return needed

    async def _retire(self, version: str) -> bool:
        """Retire a version, unless it has come into use in the meantime. Return whether it was retired."""
        outcomes: list[bool] = []

        async def retire(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.load_version(tx, version)
            assert record is not None
            model = await store.load_model(tx, record.model)
            assert model is not None
            outcomes[:] = [not await catalog.reasons_in_use(tx, model, record)]
            if not outcomes[0]:
                return ()
            transition = Transition(tx, now)
            await catalog.retire(tx, now, transition, model, record)
            return await transition.finish()

        await self._processor.step(retire)
        return outcomes[0]

    def _cached_manifests(self, versions: Sequence[VersionRecord]) -> dict[str, Manifest]:
        for version in versions:
            if version.version not in self._manifest_cache:
                for manifest in self._manifests([version]):
                    stored = (file.blob for file in manifest.files if self._blobs.holds(file.blob))
                    self._sizes[manifest.version] = {blob.sha256: blob.size for blob in stored}
                    self._manifest_cache[manifest.version] = manifest
        return {
            record.version: self._manifest_cache[record.version]
            for record in versions
            if record.version in self._manifest_cache
        }

    async def _plan(self, chosen: Collection[str] = ()) -> GarbagePlan:
        """Decide which versions a run may delete, and return the plan.

        Args:
            chosen: versions that may be deleted even if they were retired only recently.
        """
        retired: list[VersionRecord] = []
        kept_versions: list[VersionRecord] = []
        needs: dict[str, list[str]] = {}

        async def read_versions(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            for version in await store.all_versions(tx):
                old = version.version in chosen or _is_retired_since(version, now - self._retired_for)
                (retired if old else kept_versions).append(version)
            for version in retired[:RETIRED_MAX]:
                model = await store.load_model(tx, version.model)
                assert model is not None
                if reasons := await catalog.reasons_in_use(tx, model, version):
                    needs[version.version] = reasons
            return ()

        await self._processor.step(read_versions)
        for lineage, versions in (await asyncio.to_thread(lineages.needed_versions, self._blobs)).items():
            for name in versions:
                needs.setdefault(name, []).append(f"lineage {lineage} goes on from it or may go back to it")
        active_versions, examined = [*kept_versions, *retired[RETIRED_MAX:]], retired[:RETIRED_MAX]
        active = await asyncio.to_thread(self._manifests, active_versions)
        removable = await asyncio.to_thread(self._manifests, examined)
        await self._record([*active_versions, *examined], (*active, *removable))
        unreadable = [version for version in (*active_versions, *examined) if version.version in self._problems]
        for version in unreadable:
            if version.base is not None:
                needs.setdefault(version.base, []).append(f"{version.version} is an adapter of it")
        protected = {version.manifest.sha256 for version in (*retired, *kept_versions)}
        protected |= await self._recorded_files(unreadable)
        readable = plan.make_plan(removable, active, needs, protected)
        return replace(readable, kept=(*readable.kept, *map(self._keep_unreadable, unreadable)))

    def _keep_unreadable(self, version: VersionRecord) -> KeptVersion:
        problem = f"its manifest cannot be read: {self._problems[version.version]}"
        return KeptVersion(version=version.version, needed_by=(problem,))

    def _manifests(self, versions: Sequence[VersionRecord]) -> list[Manifest]:
        """Return the manifests of `versions`. Rejected versions without a manifest are left out, because they have no
        files. Other versions whose manifest cannot be read are left out, too, and added to `_problems`."""
        manifests = []
        for version in versions:
            try:
                manifests.append(read_manifest(self._blobs, version.manifest))
                self._problems.pop(version.version, None)
            except (MissingBlob, CorruptBlob) as error:
                if version.state == "rejected":
                    log.warning("manifest_passed_over", version=version.version, error=str(error))
                else:
                    self._problems[version.version] = str(error)
        return manifests

    async def _record(self, versions: Sequence[VersionRecord], manifests: Iterable[Manifest]) -> None:
        """Store the digests of the files of versions, and which manifests cannot be read, as far as either is new."""
        named = self._named = self._named if self._named is not None else await self._read_problems()
        models = {version.version: version.model for version in versions}
        new = models.keys() - self._recorded
        files = {manifest.version: manifest for manifest in manifests if manifest.version in new}
        problems = {name: self._problems.get(name) for name in models}
        changed = {name: problem for name, problem in problems.items() if problem != named.get(name)}

        async def record(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            for name, manifest in files.items():
                digests = json.dumps(sorted({file.blob.sha256 for file in manifest.files}))
                await upsert(tx, VERSION_FILES, {"version": name}, {"model": models[name], "files": digests})
            for name, problem in changed.items():
                await upsert(tx, VERSION_FILES, {"version": name}, {"model": models[name], "problem": problem})
            return ()

        if files or changed:
            await self._processor.step(record)
        self._recorded |= files.keys()
        for name, problem in changed.items():
            if problem is None:
                del named[name]
                log.info("manifest_readable", version=name)
            else:
                named[name] = problem
                log.error("manifest_unreadable", version=name, error=problem)

    async def _read_problems(self) -> dict[str, str]:
        problems: dict[str, str] = {}

        async def read(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            query = select(VERSION_FILES.c.version, VERSION_FILES.c.problem).where(VERSION_FILES.c.problem.is_not(None))
            problems.update({row.version: row.problem for row in await tx.execute(query)})
            return ()

        await self._processor.step(read)
        return problems

    async def _recorded_files(self, versions: Sequence[VersionRecord]) -> set[str]:
        """Return the digests of the files of versions whose manifest cannot be read.

        Raises:
            Refused: no earlier run could read one of these manifests.
        """
        files: dict[str, str | None] = {version.version: None for version in versions}

        async def read(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            query = select(VERSION_FILES.c.version, VERSION_FILES.c.files).where(VERSION_FILES.c.version.in_(files))
            files.update({row.version: row.files for row in await tx.execute(query)})
            return ()

        if versions:
            await self._processor.step(read)
        digests: set[str] = set()
        for name, text in files.items():
            if text is None:
                problem = f"{name}: its manifest cannot be read, so nothing is collected: {self._problems[name]}"
                raise Refused(409, "manifest_unreadable", problem, "version")
            digests.update(json.loads(text))
        return digests

    async def _mark(self, version: str, act: audit.AuditedAction, detail: str) -> None:
        async def mark(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            record = await store.load_version(tx, version)
            assert record is not None
            statement = update(VERSIONS).where(VERSIONS.c.version == version, VERSIONS.c.retired_ms.is_not(None))
            await tx.execute(statement.values(collected_ms=epoch_ms(now)))
            if not record.collected:
                action = audit.AuditedAction(act.requester, act.action, version, act.why, detail)
                await audit.add_entry(tx, now, record.model, action)
            return ()

        await self._processor.step(mark)


def _is_retired_since(version: VersionRecord, before: datetime) -> bool:
    return version.retired_at is not None and version.retired_at <= before

"""Decides which versions may be deleted: pure functions of manifests, needs, sizes and the saved states of trainers.

A trainer needs its base, the version that it trains, the promoted versions, and the versions to which it can go back.
The saved states are only read. If the state of a lineage cannot be read, or lacks all of these fields, garbage
collection is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace_registry.storage.records import VersionRecord
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.records import Records
from headrace_schemas.http.catalog import CollectedVersion, KeptVersion
from headrace_schemas.values.base import Version
from headrace_schemas.values.blobs import BlobRef, Manifest


@dataclass(frozen=True, slots=True)
class CollectableVersion:
    """Retired version whose files may be deleted. `blobs` are those of its files that no other version has."""

    version: str
    blobs: tuple[BlobRef, ...]

    @property
    def report(self) -> CollectedVersion:
        sizes = [blob.size for blob in self.blobs]
        return CollectedVersion(version=self.version, files=len(sizes), size_bytes=sum(sizes))


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """Plan of one run: the versions whose files are deleted, and the retired versions whose files stay."""

    collectable: tuple[CollectableVersion, ...]
    kept: tuple[KeptVersion, ...]


def make_plan(
    retired: Sequence[Manifest],
    active: Sequence[Manifest],
    needs: Mapping[str, Sequence[str]],
    protected: Set[str] = frozenset(),
) -> GarbagePlan:
    """Decide which retired versions may be deleted. The base of a needed adapter is needed, too.

    Args:
        retired: manifests of the retired versions.
        active: manifests of all other versions.
        needs: for each needed version, the reasons why it is needed.
        protected: digests of blobs that are never removed, even if a manifest lists them as files of its version.
    """
    retired_by_version = {manifest.version: manifest for manifest in retired}
    needed_by = {version: list(reasons) for version, reasons in needs.items()}
    needed = [retired_by_version[version] for version in needs if version in retired_by_version]
    for manifest in (*needed, *active):
        if manifest.base in retired_by_version:
            needed_by.setdefault(manifest.base or "", []).append(f"{manifest.version} is an adapter of it")
    remaining = [manifest for manifest in retired if manifest.version in needed_by]
    used_digests = {file.blob.sha256 for manifest in (*active, *remaining) for file in manifest.files} | protected
    return GarbagePlan(
        collectable=tuple(
            _collectable(manifest, used_digests) for manifest in retired if manifest.version not in needed_by
        ),
        kept=tuple(
            KeptVersion(version=manifest.version, needed_by=tuple(needed_by[manifest.version]))
            for manifest in remaining
        ),
    )


def _collectable(version: Manifest, used: Set[str]) -> CollectableVersion:
    removable = {file.blob.sha256: file.blob for file in version.files if file.blob.sha256 not in used}
    return CollectableVersion(version.version, tuple(removable.values()))


ROLLBACK_TARGETS = 2
"""Number of former champions of each model that are not deleted, in addition to needed versions."""
_DECIDED = ("rejected", "skipped", "withdrawn", "held", "promoted")
_BYTES_MIN, _OF_SIZE = 2 << 30, 5

Blobs = Mapping[str, int]
"""Size in bytes of each file of a version, by digest."""


def default_limit(blobs: Mapping[str, Blobs]) -> int:
    """Return the storage limit in bytes if no setting names one: 2 GiB, or five times the largest version if that is
    more."""
    return max(_BYTES_MIN, _OF_SIZE * max((sum(files.values()) for files in blobs.values()), default=0))


def versions_over_limit(
    versions: Sequence[VersionRecord], blobs: Mapping[str, Blobs], needed: Set[str], bytes_max: int
) -> tuple[str, ...]:
    """Choose versions to delete, so that the remaining files and a next version, as large as the newest trained one,
    take at most `bytes_max` bytes if possible.

    Versions that never served are chosen first, then former champions, the oldest of each first. Versions that a user
    has registered or labelled stay, and so do versions that still wait for a decision.

    Args:
        versions: versions with files in the store, in the order of arrival.
        blobs: files of each version.
        needed: versions that an alias, a role, a rollout, an adapter or a lineage needs.
        bytes_max: bytes that distinct files may take.
    """
    users = Counter(digest for version in versions for digest in blobs[version.version])
    next_bytes = next((sum(blobs[version.version].values()) for version in reversed(versions) if version.trained), 0)
    total = sum({digest: size for files in blobs.values() for digest, size in files.items()}.values()) + next_bytes
    keep = needed | _rollback_targets(versions)
    chosen: list[str] = []
    for version in sorted(versions, key=lambda version: (version.state == "promoted", version.number)):
        if total <= bytes_max:
            break
        if version.version in keep or not version.trained or version.label or version.state not in _DECIDED:
            continue
        files = blobs[version.version]
        users.subtract(files.keys())
        freed = sum(size for digest, size in files.items() if not users[digest])
        if freed:
            chosen.append(version.version)
            total -= freed
        else:
            users.update(files.keys())
    return tuple(chosen)


def _rollback_targets(versions: Sequence[VersionRecord]) -> set[str]:
    """Return the latest former champions of each model, to which the registry may roll back."""
    by_model: dict[str, list[VersionRecord]] = {}
    for version in versions:
        if version.state == "promoted" and not version.retired:
            by_model.setdefault(version.model, []).append(version)
    return {
        version.version
        for promoted in by_model.values()
        for version in sorted(promoted, key=lambda version: (version.changed, version.number))[-1 - ROLLBACK_TARGETS :]
    }


_FOLDER = "lineages"
_SHARED = 0


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Pointer(_Part):
    state: BlobRef | None
    epochs: dict[str, int] = {}


class _Published(_Part):
    version: Version


class _Announced(_Part):
    version: Version


class _State(_Part):
    versions: tuple[_Published, ...]
    head: Version
    promoted: tuple[Version, ...]
    restore_points: dict[Version, object]
    checkpoint: _Announced

    def needed(self) -> set[str]:
        return {
            *(version.version for version in self.versions[:1]),
            self.head,
            *self.promoted,
            *self.restore_points,
            self.checkpoint.version,
        }


def needed_versions(blobs: BlobStore) -> dict[str, set[str]]:
    """Return, by lineage, the versions that its trainer needs according to its saved state. Blocks.

    Raises:
        Refused: 409, the state of a lineage cannot be read.
    """
    return {lineage: _needed(blobs, lineage) for lineage in _names(blobs)}


def _names(blobs: BlobStore) -> Iterator[str]:
    yield from sorted({*blobs.areas(_FOLDER), *blobs.pointers(_FOLDER)})


def _needed(blobs: BlobStore, lineage: str) -> set[str]:
    record = Records(blobs, f"{_FOLDER}/{lineage}").newest()
    data = record.data if record is not None else blobs.pointer(f"{_FOLDER}/{lineage}")
    if data is None:
        return set()
    try:
        pointer = _Pointer.model_validate_json(data)
        if pointer.state is None:
            return set()
        epoch = pointer.epochs.get(pointer.state.sha256, _SHARED)
        store = blobs if epoch == _SHARED else blobs.area(f"{_FOLDER}/{lineage}/{epoch:010d}")
        return _State.model_validate_json(store.get(pointer.state)).needed()
    except (ValidationError, CorruptBlob, MissingBlob) as error:
        problem = (
            f"{error.error_count()} fields are not as expected" if isinstance(error, ValidationError) else str(error)
        )
        message = f"lineage {lineage} cannot be read, so nothing is collected: {problem}; try again, or repair it"
        raise Refused(409, "lineage_unreadable", message) from None

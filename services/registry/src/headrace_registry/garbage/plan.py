"""Decides which versions may be removed: a pure function of manifests and needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from headrace_schemas.http.catalog import CollectedVersion, KeptVersion
from headrace_schemas.values.blobs import BlobRef, Manifest


@dataclass(frozen=True, slots=True)
class CollectableVersion:
    """A retired version that is not needed, with those of its files that no other version has."""

    version: str
    blobs: tuple[BlobRef, ...]

    @property
    def report(self) -> CollectedVersion:
        sizes = [blob.size for blob in self.blobs]
        return CollectedVersion(version=self.version, files=len(sizes), size_bytes=sum(sizes))


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """The versions to remove and the versions to keep."""

    collectable: tuple[CollectableVersion, ...]
    kept: tuple[KeptVersion, ...]


def make_plan(
    retired: Sequence[Manifest], active: Sequence[Manifest], needs: Mapping[str, Sequence[str]]
) -> GarbagePlan:
    """Return which retired versions may be removed. If an adapter is needed, its base is needed too.

    Args:
        retired: Manifests of the retired versions.
        active: Manifests of all other versions.
        needs: Reasons why each version is needed.
    """
    retired_by_version = {manifest.version: manifest for manifest in retired}
    needed_by = {version: list(reasons) for version, reasons in needs.items()}
    needed = [retired_by_version[version] for version in needs if version in retired_by_version]
    for manifest in (*needed, *active):
        if manifest.base in retired_by_version:
            needed_by.setdefault(manifest.base or "", []).append(f"{manifest.version} is an adapter of it")
    kept = [manifest for manifest in retired if manifest.version in needed_by]
    used_digests = {file.blob.sha256 for manifest in (*active, *kept) for file in manifest.files}
    return GarbagePlan(
        collectable=tuple(
            _collectable(manifest, used_digests) for manifest in retired if manifest.version not in needed_by
        ),
        kept=tuple(
            KeptVersion(version=manifest.version, needed_by=tuple(needed_by[manifest.version])) for manifest in kept
        ),
    )


def _collectable(version: Manifest, used: Set[str]) -> CollectableVersion:
    removable = {file.blob.sha256: file.blob for file in version.files if file.blob.sha256 not in used}
    return CollectableVersion(version.version, tuple(removable.values()))

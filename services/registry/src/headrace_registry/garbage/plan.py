"""What may go: a pure function of manifests and needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from headrace_schemas.blobs import BlobRef
from headrace_schemas.catalog import CollectedVersion, KeptVersion
from headrace_schemas.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Doomed:
    """A retired version that nobody needs, and those of its files that no other version has."""

    version: str
    blobs: tuple[BlobRef, ...]

    @property
    def report(self) -> CollectedVersion:
        sizes = [blob.size for blob in self.blobs]
        return CollectedVersion(version=self.version, files=len(sizes), size_bytes=sum(sizes))


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """What goes and what stays."""

    doomed: tuple[Doomed, ...]
    kept: tuple[KeptVersion, ...]


def make(retired: Sequence[Manifest], others: Sequence[Manifest], needs: Mapping[str, Sequence[str]]) -> GarbagePlan:
    """`others` are all manifests of versions that are not retired; `needs` says of a version what needs it.

    What needs an adapter needs its base, too.
    """
    known = {one.version: one for one in retired}
    why = {version: list(reasons) for version, reasons in needs.items()}
    needed = [known[version] for version in needs if version in known]
    for one in (*needed, *others):
        if one.base in known:
            why.setdefault(one.base or "", []).append(f"{one.version} is an adapter of it")
    kept = [one for one in retired if one.version in why]
    used = {file.blob.sha256 for one in (*others, *kept) for file in one.files}
    return GarbagePlan(
        doomed=tuple(_doomed(one, used) for one in retired if one.version not in why),
        kept=tuple(KeptVersion(version=one.version, needed_by=tuple(why[one.version])) for one in kept),
    )


def _doomed(version: Manifest, used: Set[str]) -> Doomed:
    own = {file.blob.sha256: file.blob for file in version.files if file.blob.sha256 not in used}
    return Doomed(version.version, tuple(own.values()))

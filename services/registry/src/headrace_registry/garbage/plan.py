"""What may go: a pure function of manifests and needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace_schemas.blobs import BlobRef
from headrace_schemas.catalog import Collected, Kept
from headrace_schemas.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Doomed:
    """A retired version that nobody needs, and those of its files that no other version has."""

    version: str
    blobs: tuple[BlobRef, ...]

    @property
    def report(self) -> Collected:
        sizes = [blob.size for blob in self.blobs]
        return Collected(version=self.version, files=len(sizes), size_bytes=sum(sizes))


@dataclass(frozen=True, slots=True)
class GarbagePlan:
    """What goes and what stays."""

    doomed: tuple[Doomed, ...]
    kept: tuple[Kept, ...]


def make(retired: Sequence[Manifest], others: Iterable[Manifest], needs: Mapping[str, Sequence[str]]) -> GarbagePlan:
    """`others` are all manifests of versions that are not retired; `needs` says of a version what needs it.

    A needed version needs its base, too.
    """
    every = {one.version: one for one in retired}
    why = {version: list(reasons) for version, reasons in needs.items()}
    for one in [*(every[version] for version in needs if version in every), *(others := list(others))]:
        if one.base in every:
            why.setdefault(one.base or "", []).append(f"{one.version} is an adapter of it")
    kept = [one for one in retired if one.version in why]
    used = {file.blob.sha256 for one in [*others, *kept] for file in one.files}
    doomed = []
    for one in retired:
        if one.version not in why:
            own = {file.blob.sha256: file.blob for file in one.files if file.blob.sha256 not in used}
            doomed.append(Doomed(one.version, tuple(own.values())))
    return GarbagePlan(
        tuple(doomed), tuple(Kept(version=one.version, needed_by=tuple(why[one.version])) for one in kept)
    )

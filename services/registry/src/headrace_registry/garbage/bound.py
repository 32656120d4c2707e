"""Chooses the versions that go when all versions together take more bytes than they may: a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from headrace_registry.records import VersionRecord

ROLLBACK_TARGETS = 2
"""Former champions of a model that stay, whatever they take, besides those that something needs."""
_DECIDED = ("rejected", "skipped", "withdrawn", "held", "promoted")
_BYTES_MIN, _OF_SIZE = 4 << 30, 10

Blobs = Mapping[str, int]
"""The files of a version: sizes by digest."""


def default_bound(blobs: Mapping[str, Blobs]) -> int:
    """Return the bound where no setting has another: 4 GiB, or ten of the largest version."""
    return max(_BYTES_MIN, _OF_SIZE * max((sum(files.values()) for files in blobs.values()), default=0))


def versions_beyond(
    versions: Sequence[VersionRecord], blobs: Mapping[str, Blobs], needed: Set[str], bytes_max: int
) -> tuple[str, ...]:
    """Return the versions whose removal brings the rest to `bytes_max`, as far as there are any that may go.

    Versions that never served go first, then former champions, the oldest of each first. What a user has registered or
    labelled stays, as does what still waits for a decision.

    Args:
        versions: Those whose files are there, in the order of arrival.
        blobs: The files of each.
        needed: Versions that an alias, a role, a rollout, an adapter or a lineage needs.
        bytes_max: Bytes that distinct files may take.
    """
    users = Counter(digest for version in versions for digest in blobs[version.version])
    total = sum({digest: size for files in blobs.values() for digest, size in files.items()}.values())
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
    """Return the last champions of each model, the present one included, which is needed anyway."""
    by_model: dict[str, list[VersionRecord]] = {}
    for version in versions:
        if version.state == "promoted" and not version.retired:
            by_model.setdefault(version.model, []).append(version)
    return {
        version.version
        for promoted in by_model.values()
        for version in sorted(promoted, key=lambda version: (version.changed, version.number))[-1 - ROLLBACK_TARGETS :]
    }

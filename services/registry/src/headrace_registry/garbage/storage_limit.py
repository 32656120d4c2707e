"""Chooses the versions to remove when all versions together take more bytes than allowed: a pure function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

from headrace_registry.records import VersionRecord

ROLLBACK_TARGETS = 2
"""Number of former champions of a model that stay, besides versions that are needed."""
_DECIDED = ("rejected", "skipped", "withdrawn", "held", "promoted")
_BYTES_MIN, _OF_SIZE = 4 << 30, 10

Blobs = Mapping[str, int]
"""The files of a version: sizes by digest."""


def default_limit(blobs: Mapping[str, Blobs]) -> int:
    """Return the limit where none is configured: 4 GiB, or ten times the largest version."""
    return max(_BYTES_MIN, _OF_SIZE * max((sum(files.values()) for files in blobs.values()), default=0))


def versions_over_limit(
    versions: Sequence[VersionRecord], blobs: Mapping[str, Blobs], needed: Set[str], bytes_max: int
) -> tuple[str, ...]:
    """Return the versions whose removal brings the rest to `bytes_max`, as far as enough may be removed.

    Versions that never served are removed first, then former champions, the oldest of each first. Versions that a user
    has registered or labelled stay, and so do versions that still wait for a decision.

    Args:
        versions: Versions with files in the store, in the order of arrival.
        blobs: The files of each version.
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
    """Return the last champions of each model, including the present one, which is needed anyway."""
    by_model: dict[str, list[VersionRecord]] = {}
    for version in versions:
        if version.state == "promoted" and not version.retired:
            by_model.setdefault(version.model, []).append(version)
    return {
        version.version
        for promoted in by_model.values()
        for version in sorted(promoted, key=lambda version: (version.changed, version.number))[-1 - ROLLBACK_TARGETS :]
    }

"""The tree of a lineage's versions, and the distance between two of them.

Usually the tree is a chain. It branches when the registry refuses a version: the weights go back to the champion, and
the next version is its child. Staleness is therefore the length of the path between two versions, not a difference of
step numbers: after ten refused versions the champion's experiences are as fresh as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from headrace_schemas.values.base import Model, Version
from headrace_schemas.values.blobs import BlobRef


class PublishedVersion(Model):
    """One version of the lineage: the weights of its parent after the training steps `first_step .. last_step`."""

    version: Version
    parent: Version | None
    number: int
    """The value of `Manifest.step`: the number of earlier versions in the lineage."""
    manifest: BlobRef
    first_step: int = 1
    last_step: int = 0
    """Steps are counted over the lineage's whole life and never reused. A version without steps has `last_step` before
    `first_step`."""


VERSIONS_MAX = 512
"""Published versions whose experiences are recognised."""


@dataclass(frozen=True)
class History:
    """Immutable tree of a lineage's versions. `head` is the version that the weights in training descend from.

    The weights also contain all steps after `head_step`.
    """

    versions: tuple[PublishedVersion, ...]
    head: str
    head_step: int
    replayed: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the versions of the lineage that is replayed. Each of them counts as this lineage's version of the
    same number, so that a replay makes the same decisions about staleness."""
    excluded: frozenset[str] = frozenset()
    """Versions whose experiences are not trained, because their rollouts excluded them."""

    @classmethod
    def begin(cls, first: PublishedVersion) -> History:
        return cls((first,), first.version, first.last_step)

    @cached_property
    def _by_name(self) -> dict[str, PublishedVersion]:
        return {published.version: published for published in self.versions}

    @cached_property
    def distances(self) -> dict[str, int]:
        """Number of versions between each version and the head. A version without a path to the head has no entry."""
        neighbours: dict[str, list[str]] = {name: [] for name in self._by_name}
        for published in self.versions:
            if published.parent in neighbours:
                neighbours[published.version].append(published.parent)
                neighbours[published.parent].append(published.version)
        distances, frontier = {self.head: 0}, [self.head]
        for name in frontier:  # breadth first: the list grows while it is walked
            for neighbour in neighbours[name]:
                if neighbour not in distances:
                    distances[neighbour] = distances[name] + 1
                    frontier.append(neighbour)
        return distances

    def __contains__(self, version: object) -> bool:
        return version in self._by_name

    def __getitem__(self, version: str) -> PublishedVersion:
        return self._by_name[version]

    @property
    def next_number(self) -> int:
        return max(published.number for published in self.versions) + 1

    def staleness(self, versions: Iterable[str]) -> int | None:
        """Return the number of versions between the oldest of `versions` and the head, or None if one of them belongs
        to another lineage.
        """
        distances = [self._distance(version) for version in versions]
        lineage_distances = [distance for distance in distances if distance is not None]
        return max(lineage_distances, default=0) if len(lineage_distances) == len(distances) else None

    def with_exclusion(self, version: str, *, ends: bool = False) -> History:
        """Return a history in which the answers of `version` are excluded from training.

        If `ends` is true, end such an exclusion, so that they are trained again. A version that is not in this history
        is of another lineage and stays unaffected.
        """
        excludes = version in self and not ends
        return replace(self, excluded=self.excluded | {version} if excludes else self.excluded - {version})

    def find_excluded(self, versions: Iterable[str]) -> str | None:
        """Return the first of `versions` that is excluded from training, or None."""
        return next((version for version in versions if version in self.excluded), None)

    def _distance(self, version: str) -> int | None:
        number = self.replayed.get(version)
        if version in self.distances or number is None:
            return self.distances.get(version)
        return max(0, self[self.head].number - number)

    def descends_from(self, version: str) -> bool:
        """Return whether the weights in training descend from `version`: it is the head or one of its ancestors."""
        return self.descends(self.head, version)

    def descends(self, version: str, ancestor: str) -> bool:
        """Return whether `version` is `ancestor` or was trained from it, over any number of versions."""
        return any(published.version == ancestor for published in self._line(version))

    def contains_step(self, step: int, now: int) -> bool:
        """Return whether the present weights, after `now` steps of the lineage, contain the update of step `step`.

        They do not contain the steps of abandoned versions. Steps older than all stored versions count as contained;
        their experiences are too stale to be trained again.
        """
        if self.head_step < step <= now:
            return True
        line = list(self._line(self.head))
        return any(p.first_step <= step <= p.last_step for p in line) or step < line[-1].first_step

    def with_version(self, version: PublishedVersion, keep: Collection[str], limit: int) -> History:
        """Return the history with `version` as its head, and at most `limit` versions.

        Versions in `keep` always stay.
        """
        versions = [*self.versions, version]
        spare = len(versions) - limit
        remaining = []
        for old in versions[:-1]:
            if spare > 0 and old.version not in keep and old.version != version.parent:
                spare -= 1
            else:
                remaining.append(old)
        excluded = self.excluded & {old.version for old in remaining}
        return replace(
            self, versions=(*remaining, version), head=version.version, head_step=version.last_step, excluded=excluded
        )

    def rewind(self, version: str, now: int) -> History:
        """Return the history with `version` as its head, after the weights were reset to that version.

        The weights no longer contain the steps after `version`, up to step `now`.
        """
        return replace(self, head=version, head_step=now)

    def _line(self, version: str) -> Iterator[PublishedVersion]:
        """Yield `version` and its ancestors that the history still contains, the newest first."""
        published = self._by_name.get(version)
        while published is not None:
            yield published
            published = self._by_name.get(published.parent or "")

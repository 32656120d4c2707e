"""The versions of a lineage as a tree, and how far apart two of them are (P5).

Usually the tree is a chain. It branches when the registry refuses a version: the weights go back to the champion, and
the next version is its child. Staleness is therefore the length of the path between two versions, not a difference of
step numbers: after ten refused versions the champion's experiences are as fresh as they ever were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from headrace_schemas.base import Model, Version
from headrace_schemas.blobs import BlobRef


class Published(Model):
    """One version of the lineage. Its weights are its parent's after the steps `first_step .. last_step`."""

    version: Version
    parent: Version | None
    number: int
    """`Manifest.step`: versions of the lineage before this one."""
    manifest: BlobRef
    first_step: int = 1
    last_step: int = 0
    """Steps are counted over the lineage's whole life and never reused. A version without steps has none in between."""


@dataclass(frozen=True)
class History:
    """Immutable. `head` is the version that the weights in training descend from; they also hold all steps since then,
    from `head_step` on (exclusive)."""

    versions: tuple[Published, ...]
    head: str
    head_step: int
    replayed: Mapping[str, int] = field(default_factory=dict)
    """Versions of another lineage whose experiences are trained again here, by number: each counts as ours of the same
    number, so that a replay makes the same decisions about staleness (P9)."""
    excluded: frozenset[str] = frozenset()
    """Versions whose experiences are not trained: their rollouts took them back."""

    @classmethod
    def begin(cls, first: Published) -> History:
        return cls((first,), first.version, first.last_step)

    @cached_property
    def _by_name(self) -> dict[str, Published]:
        return {published.version: published for published in self.versions}

    @cached_property
    def distances(self) -> dict[str, int]:
        """Edges between each version and the head. A version that the tree no longer connects to it has no entry."""
        neighbours: dict[str, list[str]] = {name: [] for name in self._by_name}
        for published in self.versions:
            if published.parent in neighbours:
                neighbours[published.version].append(published.parent)
                neighbours[published.parent].append(published.version)
        found, frontier = {self.head: 0}, [self.head]
        for name in frontier:  # breadth first: the list grows while it is walked
            for neighbour in neighbours[name]:
                if neighbour not in found:
                    found[neighbour] = found[name] + 1
                    frontier.append(neighbour)
        return found

    def __contains__(self, version: object) -> bool:
        return version in self._by_name

    def __getitem__(self, version: str) -> Published:
        return self._by_name[version]

    @property
    def next_number(self) -> int:
        return max(published.number for published in self.versions) + 1

    def staleness(self, versions: Iterable[str]) -> int | None:
        """Versions between the oldest of `versions` and the head; None when one of them is not of this lineage."""
        found = [self._distance(version) for version in versions]
        known = [distance for distance in found if distance is not None]
        return max(known, default=0) if len(known) == len(found) else None

    def excluding(self, version: str, *, ends: bool = False) -> History:
        """Nothing that `version` answered is trained from now on; `ends`: it is again. Versions that are not remembered
        are foreign anyway."""
        known = version in self and not ends
        return replace(self, excluded=self.excluded | {version} if known else self.excluded - {version})

    def excluded_of(self, versions: Iterable[str]) -> str | None:
        """The first of them whose experiences are not trained."""
        return next((version for version in versions if version in self.excluded), None)

    def _distance(self, version: str) -> int | None:
        number = self.replayed.get(version)
        if version in self.distances or number is None:
            return self.distances.get(version)
        return max(0, self[self.head].number - number)

    def descends_from(self, version: str) -> bool:
        """Whether the weights in training hold what `version` learned: it is the head or one of its ancestors."""
        return self.descends(self.head, version)

    def descends(self, version: str, ancestor: str) -> bool:
        """Whether `version` is `ancestor` or was trained from it, over however many versions."""
        return any(published.version == ancestor for published in self._line(version))

    def holds_step(self, step: int, now: int) -> bool:
        """Whether the weights after `now` steps hold what `step` changed. Steps of abandoned versions are undone.

        Steps older than everything remembered count as held; their experiences are long past any staleness bound.
        """
        if self.head_step < step <= now:
            return True
        line = list(self._line(self.head))
        return any(p.first_step <= step <= p.last_step for p in line) or step < line[-1].first_step

    def published(self, version: Published, keep: Collection[str], limit: int) -> History:
        """With `version`, which becomes the head, and at most `limit` versions; those in `keep` are never forgotten."""
        versions = [*self.versions, version]
        spare = len(versions) - limit
        kept = []
        for old in versions[:-1]:
            if spare > 0 and old.version not in keep and old.version != version.parent:
                spare -= 1
            else:
                kept.append(old)
        excluded = self.excluded & {old.version for old in kept}
        return replace(
            self, versions=(*kept, version), head=version.version, head_step=version.last_step, excluded=excluded
        )

    def moved(self, version: str, now: int) -> History:
        """The weights are those of `version` again; everything that the steps up to `now` added to it is undone."""
        return replace(self, head=version, head_step=now)

    def _line(self, version: str) -> Iterator[Published]:
        """`version` and its ancestors, newest first, as far as they are remembered."""
        published = self._by_name.get(version)
        while published is not None:
            yield published
            published = self._by_name.get(published.parent or "")

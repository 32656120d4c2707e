"""What the weights of a lineage hold after each of its saves. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import UsageError
from headrace_schemas import TrainingMetrics

HELD_MAX = 2_000_000
"""Revisions of experiences of one lineage; about 400 MB."""

Name = tuple[str, int]
"""An experience and its revision."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """When a revision was trained: with which save, and as which of the save's outcomes."""

    account: int
    order: int


@dataclass(slots=True)
class Contents:
    """`add` the reports of one lineage in the order of its saves; one that is known changes nothing.

    A revision that was undone is not held, unless it was restored or trained again.
    """

    lineage: str
    held: dict[Name, Place] = field(default_factory=dict)
    base: str | None = None
    """A version whose contents are not asked for."""
    accounts: dict[str, int] = field(default_factory=dict)
    """The save with which each version was published."""
    last: int = -1
    _known: frozenset[Name] = frozenset()
    """What `base` held."""
    _undone: dict[Name, Place] = field(default_factory=dict)

    def add(self, report: TrainingMetrics) -> None:
        """Raises `UsageError` beyond `HELD_MAX`."""
        if report.lineage != self.lineage or report.account <= self.last:
            return
        self.last = report.account
        for order, outcome in enumerate(report.verdicts):
            name = outcome.experience_id, outcome.revision
            if outcome.dropped is None and name not in self.held:
                self.held[name] = Place(report.account, order)
                self._undone.pop(name, None)
        for undone in report.undone:
            name = undone.experience_id, undone.revision
            if name in self.held:
                self._undone[name] = self.held.pop(name)
        for restored in report.restored:
            name = restored.experience_id, restored.revision
            if name in self._undone:
                self.held[name] = self._undone.pop(name)
        if report.version is not None and report.version not in self.accounts:
            self.accounts[report.version] = report.account
            self._known = frozenset(self.held) if report.version == self.base else self._known
        if len(self.held) > HELD_MAX:
            raise UsageError(f"lineage {self.lineage} holds more than {HELD_MAX} revisions, more than is read here")

    def new(self) -> list[tuple[Place, Name]]:
        """What is held and was not by `base`, in the order of training."""
        return sorted((place, name) for name, place in self.held.items() if name not in self._known)

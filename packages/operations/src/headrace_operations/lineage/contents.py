"""The training data that the weights of a lineage contain after each of its saves. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import UsageError
from headrace_schemas import TrainingMetrics

REVISIONS_MAX = 2_000_000
"""Maximum number of experience revisions of one lineage; they take about 400 MB."""

RevisionKey = tuple[str, int]
"""Experience id and revision number."""


@dataclass(frozen=True, slots=True, order=True)
class TrainingPosition:
    """When a revision was trained: the save, and the index among the outcomes of that save."""

    account: int
    order: int


@dataclass(slots=True)
class Contents:
    """Revisions that the weights of one lineage contain. `add` its reports in the order of the saves.

    A report that was added before changes nothing. A revision that was undone is not contained, unless it was restored
    or trained again.
    """

    lineage: str
    revisions: dict[RevisionKey, TrainingPosition] = field(default_factory=dict)
    base: str | None = None
    """Version whose own contents `revisions_since_base` leaves out."""
    accounts: dict[str, int] = field(default_factory=dict)
    """The save with which each version was published."""
    last: int = -1
    _base_revisions: frozenset[RevisionKey] = frozenset()
    """Revisions that `base` contained."""
    _undone: dict[RevisionKey, TrainingPosition] = field(default_factory=dict)

    def add(self, report: TrainingMetrics) -> None:
        """Apply one report.

        Raises:
            UsageError: the lineage has more than `REVISIONS_MAX` revisions.
        """
        if report.lineage != self.lineage or report.account <= self.last:
            return
        self.last = report.account
        for order, outcome in enumerate(report.verdicts):
            key = outcome.experience_id, outcome.revision
            if outcome.dropped is None and key not in self.revisions:
                self.revisions[key] = TrainingPosition(report.account, order)
                self._undone.pop(key, None)
        for undone in report.undone:
            key = undone.experience_id, undone.revision
            if key in self.revisions:
                self._undone[key] = self.revisions.pop(key)
        for restored in report.restored:
            key = restored.experience_id, restored.revision
            if key in self._undone:
                self.revisions[key] = self._undone.pop(key)
        if report.version is not None and report.version not in self.accounts:
            self.accounts[report.version] = report.account
            self._base_revisions = frozenset(self.revisions) if report.version == self.base else self._base_revisions
        if len(self.revisions) > REVISIONS_MAX:
            raise UsageError(
                f"lineage {self.lineage}: has more than {REVISIONS_MAX} revisions, the maximum that can be read"
            )

    def revisions_since_base(self) -> list[tuple[TrainingPosition, RevisionKey]]:
        """Return the revisions that `base` did not contain, in the order of training."""
        return sorted((position, key) for key, position in self.revisions.items() if key not in self._base_revisions)

"""Trace of a version: the experiences that its weights were trained on, and how they differ from another version's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import UsageError
from headrace.topics import Entry, Range
from headrace_schemas import BatchRecord, Checkpoint, Experience, TrainingMetrics

REVISIONS_MAX = 2_000_000
"""Maximum number of experience revisions of one lineage; they take about 400 MB."""

RevisionKey = tuple[str, int]
"""Experience id and revision number."""


@dataclass(frozen=True, slots=True, order=True)
class TrainingPosition:
    """Position of a revision's training in a lineage: number of the save (checkpoint) and index among its outcomes."""

    account: int
    order: int


@dataclass(slots=True)
class TrainedRevisions:
    """Experience revisions that the weights of one lineage were trained on, computed from its training reports.

    Pass the reports to `add` in the order of the lineage's saves (checkpoints); a report that is passed twice has no
    effect. A revision whose training was undone is left out until it is restored or trained again.
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
        """Add the outcomes in one training report.

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
        """Return the revisions that were trained after the version `base`, in the order of training."""
        return sorted((position, key) for key, position in self.revisions.items() if key not in self._base_revisions)


class Reader(Protocol):
    """Reader of the entries of a topic range: `headrace.topics.Topics`, or an object with entries that were already
    read.
    """

    def read(self, entries: Range, /) -> AsyncIterator[Entry]: ...


@dataclass(frozen=True, slots=True)
class TrainedExperience:
    """One revision of an experience on which the weights of a version were trained.

    Fields are None if the topic has deleted the event.
    """

    experience_id: str
    revision: int
    account: int
    """Number of the save that reported the revision."""
    session_id: str | None = None
    tenant: str | None = None
    task_id: str | None = None
    trajectory_id: str | None = None
    turn_ids: tuple[str, ...] = ()
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Reward by source."""
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class VersionTrace:
    """A version and one page of the experience revisions on which it was trained, since its parent or in total."""

    version: str
    lineage: str
    parent: str | None
    step: int | None
    account: int
    since_account: int
    total: int
    """Number of revisions on all pages."""
    entries: tuple[TrainedExperience, ...]
    batches: tuple[BatchRecord, ...]
    """Batches of the saves since the parent.

    If the trainer went back to an earlier version in between, the batches that
    it undid are included; `entries` has only what the weights contain."""
    metrics: Mapping[str, float]


async def trace_version(topics: Reader, version: str, *, everything: bool, after: int, limit: int) -> VersionTrace:
    """Return the experiences that a version was trained on since its parent, one page of them.

    Args:
        topics: the topics to read.
        version: version id, `name@digest`.
        everything: include all revisions that the weights contain, not only those since the parent.
        after: number of revisions to skip.
        limit: maximum number of revisions to return.

    Raises:
        UsageError: no trainer has reported the version.
    """
    checkpoint = await _checkpoint(topics, version)
    lineage = checkpoint.lineage if checkpoint else await _lineage_of(topics, version)
    parent = checkpoint.parent if checkpoint else None
    contents, reports = await _read(topics, TrainedRevisions(lineage, base=None if everything else parent), version)
    begin = -1 if everything else contents.accounts.get(parent or "", -1)
    revisions = contents.revisions_since_base()
    entries = await _describe(topics, revisions[after : after + limit])
    batches = tuple(batch for report in reports if report.account > begin for batch in report.batches)
    last = reports[-1]
    return VersionTrace(
        version=version,
        lineage=lineage,
        parent=parent,
        step=checkpoint.step if checkpoint else None,
        account=last.account,
        since_account=begin,
        total=len(revisions),
        entries=tuple(entries),
        batches=batches,
        metrics=dict(last.metrics),
    )


async def revisions_of(topics: Reader, version: str) -> set[RevisionKey]:
    """Return the keys of all experience revisions that a version's weights were trained on.

    Raises:
        UsageError: no trainer has reported the version.
    """
    checkpoint = await _checkpoint(topics, version)
    lineage = checkpoint.lineage if checkpoint else await _lineage_of(topics, version)
    contents, _ = await _read(topics, TrainedRevisions(lineage), version)
    return set(contents.revisions)


async def _checkpoint(topics: Reader, version: str) -> Checkpoint | None:
    checkpoint: Checkpoint | None = None
    async for entry in topics.read(Range(Checkpoint.topic)):
        if isinstance(entry.event, Checkpoint) and entry.event.version == version:
            checkpoint = checkpoint or entry.event
    return checkpoint


async def _lineage_of(topics: Reader, version: str) -> str:
    async for entry in topics.read(Range(TrainingMetrics.topic)):
        if isinstance(entry.event, TrainingMetrics) and entry.event.version == version:
            return entry.event.lineage
    raise UsageError(f"{version}: no trainer has reported this version; registered versions were trained elsewhere")


async def _read(
    topics: Reader, contents: TrainedRevisions, version: str
) -> tuple[TrainedRevisions, Sequence[TrainingMetrics]]:
    """Return the revisions in the weights of `version`, and the lineage's reports up to it without their outcomes."""
    lineage, reports = contents.lineage, []
    async for entry in topics.read(Range(TrainingMetrics.topic)):
        report = entry.event
        if not isinstance(report, TrainingMetrics) or report.lineage != lineage or version in contents.accounts:
            continue
        is_known = report.account <= contents.last
        contents.add(report)
        if not is_known:
            reports.append(report.model_copy(update={"verdicts": (), "undone": (), "restored": ()}))
    if version not in contents.accounts:
        raise UsageError(f"{version}: lineage {lineage} has not reported this version, or retention deleted the report")
    return contents, reports


async def _describe(topics: Reader, chosen: Sequence[tuple[TrainingPosition, RevisionKey]]) -> list[TrainedExperience]:
    """Return the revisions of one page with the fields of their experiences, which are read from the topic."""
    positions = {name: position for position, name in chosen}
    details: dict[RevisionKey, dict[str, Any]] = {}
    if positions:
        async for entry in topics.read(Range(Experience.topic)):
            experience = entry.event
            if not isinstance(experience, Experience):
                continue
            name = experience.experience_id, experience.revision
            if name in positions:
                fields = {**experience_fields(experience), "partition": entry.partition, "offset": entry.offset}
                details.setdefault(name, fields)
    return [
        TrainedExperience(experience_id=name[0], revision=name[1], account=position.account, **details.get(name, {}))
        for position, name in chosen
    ]


def experience_fields(experience: Experience) -> dict[str, Any]:
    """Return the fields of an experience that a trace shows."""
    return {
        "session_id": experience.session_id,
        "tenant": experience.tenant,
        "task_id": experience.task_id,
        "trajectory_id": experience.trajectory_id,
        "turn_ids": experience.turn_ids,
        "reward": experience.reward,
        "parts": {part.source: part.value for part in experience.parts},
    }


@dataclass(frozen=True, slots=True)
class DataDifference:
    """Numbers of experience revisions that one or both of two versions were trained on.

    A number is None if no trainer reported the version.
    """

    before_alone: int | None
    both: int | None
    after_alone: int | None


async def compare_training_data(topics: Reader, before: str, after: str) -> DataDifference:
    """Count the experience revisions that the weights of only one or of both versions were trained on."""
    before_revisions, after_revisions = await _revisions(topics, before), await _revisions(topics, after)
    return DataDifference(
        before_alone=None if before_revisions is None else len(before_revisions - (after_revisions or set())),
        both=None if before_revisions is None or after_revisions is None else len(before_revisions & after_revisions),
        after_alone=None if after_revisions is None else len(after_revisions - (before_revisions or set())),
    )


async def _revisions(topics: Reader, version: str) -> set[RevisionKey] | None:
    try:
        return await revisions_of(topics, version)
    except UsageError:
        return None

"""What a version was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.topics import Range
from headrace_operations.lineage.contents import Contents, Name, Place
from headrace_operations.lineage.reading import Reader
from headrace_schemas import BatchRecord, Checkpoint, Experience, TrainingMetrics


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """One revision of an experience that a version's weights hold. What the topic does not hold any more is None."""

    experience_id: str
    revision: int
    account: int
    """The save that reported it."""
    session_id: str | None = None
    tenant: str | None = None
    task_id: str | None = None
    trajectory_id: str | None = None
    turn_ids: tuple[str, ...] = ()
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Source to value."""
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """A version, what came into its weights since its parent or ever, and one page of it."""

    version: str
    lineage: str
    parent: str | None
    step: int | None
    account: int
    since_account: int
    total: int
    """Revisions in all pages."""
    entries: tuple[TrainedOn, ...]
    batches: tuple[BatchRecord, ...]
    """Of the saves since then. Where weights went back to an earlier version in between, batches that the weights lost
    again are among them; entries are only what the weights hold."""
    metrics: Mapping[str, float]


async def why(topics: Reader, version: str, *, whole: bool, after: int, limit: int) -> Why:
    """Since its parent, or with `whole` all that its weights hold. Raises `UsageError` for a version of no report."""
    checkpoint = await _checkpoint(topics, version)
    lineage = checkpoint.lineage if checkpoint else await _lineage_of(topics, version)
    parent = checkpoint.parent if checkpoint else None
    contents, reports = await _read(topics, Contents(lineage, base=None if whole else parent), version)
    begin = -1 if whole else contents.accounts.get(parent or "", -1)
    found = contents.new()
    entries = await _described(topics, found[after : after + limit])
    batches = tuple(batch for report in reports if report.account > begin for batch in report.batches)
    last = reports[-1]
    return Why(
        version=version,
        lineage=lineage,
        parent=parent,
        step=checkpoint.step if checkpoint else None,
        account=last.account,
        since_account=begin,
        total=len(found),
        entries=tuple(entries),
        batches=batches,
        metrics=dict(last.metrics),
    )


async def held_by(topics: Reader, version: str) -> set[Name]:
    """All that a version's weights hold. Raises `UsageError` for a version of no report."""
    checkpoint = await _checkpoint(topics, version)
    lineage = checkpoint.lineage if checkpoint else await _lineage_of(topics, version)
    contents, _ = await _read(topics, Contents(lineage), version)
    return set(contents.held)


async def _checkpoint(topics: Reader, version: str) -> Checkpoint | None:
    found: Checkpoint | None = None
    async for entry in topics.read(Range(Checkpoint.topic)):
        if isinstance(entry.event, Checkpoint) and entry.event.version == version:
            found = found or entry.event
    return found


async def _lineage_of(topics: Reader, version: str) -> str:
    async for entry in topics.read(Range(TrainingMetrics.topic)):
        if isinstance(entry.event, TrainingMetrics) and entry.event.version == version:
            return entry.event.lineage
    raise UsageError(f"{version}: no trainer has reported it; a version that was registered was trained elsewhere")


async def _read(topics: Reader, contents: Contents, version: str) -> tuple[Contents, Sequence[TrainingMetrics]]:
    """The lineage's contents when it published the version, and its reports up to there, without their outcomes."""
    lineage, reports = contents.lineage, []
    async for entry in topics.read(Range(TrainingMetrics.topic)):
        report = entry.event
        if not isinstance(report, TrainingMetrics) or report.lineage != lineage or version in contents.accounts:
            continue
        known = report.account <= contents.last
        contents.add(report)
        if not known:
            reports.append(report.model_copy(update={"verdicts": (), "undone": (), "restored": ()}))
    if version not in contents.accounts:
        raise UsageError(f"{version}: lineage {lineage} has not reported it, or its report was deleted by age")
    return contents, reports


async def _described(topics: Reader, chosen: Sequence[tuple[Place, Name]]) -> list[TrainedOn]:
    """With what the experiences say. Only those of the page are kept."""
    places = {name: place for place, name in chosen}
    found: dict[Name, dict[str, Any]] = {}
    if places:
        async for entry in topics.read(Range(Experience.topic)):
            one = entry.event
            if isinstance(one, Experience) and (name := (one.experience_id, one.revision)) in places:
                found.setdefault(name, {**of(one), "partition": entry.partition, "offset": entry.offset})
    return [
        TrainedOn(experience_id=name[0], revision=name[1], account=place.account, **found.get(name, {}))
        for place, name in chosen
    ]


def of(one: Experience) -> dict[str, Any]:
    """What an experience says of itself."""
    return {
        "session_id": one.session_id,
        "tenant": one.tenant,
        "task_id": one.task_id,
        "trajectory_id": one.trajectory_id,
        "turn_ids": one.turn_ids,
        "reward": one.reward,
        "parts": {part.source: part.value for part in one.parts},
    }

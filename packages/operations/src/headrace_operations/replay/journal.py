"""Journal of a lineage: the offsets that it has read, from `training-metrics`, so that its batches can be rebuilt
(P9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.topics import Range, Topics
from headrace_schemas import BatchRecord, TrainingMetrics
from headrace_schemas.programs.replay import RecordedBatch, recorded_batches


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Journal entry: a partition was read up to an offset, then batches of these sizes were formed, in order."""

    partition: int
    until: int
    cuts: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Experiences that were left out of these batches."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Read ranges and batches of a lineage in order. `gap` is why the journal is incomplete; None if it is complete."""

    ranges: tuple[ReadRange, ...]
    batches: tuple[BatchRecord, ...]
    gap: str | None = None
    recorded: tuple[RecordedBatch, ...] = ()
    """Records of the batches for a dry run."""


def build_journal(metrics: Iterable[TrainingMetrics], model: str, lineage: str) -> Journal:
    """Build the journal of a lineage from all reports on the topic, duplicates included."""
    by_number = {report.account: report for report in metrics if (report.model, report.lineage) == (model, lineage)}
    reports = [by_number[number] for number in sorted(by_number)]
    batches = tuple(batch for report in reports for batch in report.batches)
    ranges: list[ReadRange] = []
    gap = _gap(reports, model, lineage)
    for report in reports:
        for batch in report.batches:
            ranges += (ReadRange(read.partition, read.until) for read in batch.read)
            # A batch may be cut by time without a new read; its experiences come from earlier reads then.
            if ranges:
                last, cut = ranges[-1], batch.experiences + len(batch.left_out)
                ranges[-1] = replace(last, cuts=(*last.cuts, cut), left_out=(*last.left_out, *batch.left_out))
            else:
                gap = gap or f"lineage {lineage} cut a batch before it read a record"
        ranges += (ReadRange(read.partition, read.until) for read in report.read)
    return Journal(tuple(ranges), batches, gap, recorded_batches(reports))


async def read(topics: Topics, model: str, lineage: str) -> Journal:
    """Read the journal of a lineage from the topic."""
    events = [entry.event async for entry in topics.read(Range(TrainingMetrics.topic))]
    return build_journal((event for event in events if isinstance(event, TrainingMetrics)), model, lineage)


def _gap(reports: list[TrainingMetrics], model: str, lineage: str) -> str | None:
    if not reports:
        return f"training-metrics has no report of model {model} in lineage {lineage}"
    numbers = [report.account for report in reports]
    if numbers != list(range(len(numbers))):
        return f"training-metrics has not all reports of lineage {lineage}"
    if any(not report.batches and any(verdict.dropped is None for verdict in report.verdicts) for report in reports):
        return f"a part of lineage {lineage} was trained before batches were recorded"
    return None

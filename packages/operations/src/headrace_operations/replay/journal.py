"""Reads from `training-metrics` what a lineage has read, so that its batches can be built again (P9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.topics import Range, Topics
from headrace_schemas import BatchRecord, TrainingMetrics
from headrace_schemas.replay import RecordedBatch, recorded_batches


@dataclass(frozen=True, slots=True)
class Stretch:
    """Records of one partition up to an offset, after which batches of so many experiences were made, in order."""

    partition: int
    until: int
    cuts: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Experiences that were left out of these batches."""


@dataclass(frozen=True, slots=True)
class Journal:
    """In order. `gap` says why it does not reach from the lineage's beginning to its last save, None when it does."""

    stretches: tuple[Stretch, ...]
    batches: tuple[BatchRecord, ...]
    gap: str | None = None
    recorded: tuple[RecordedBatch, ...] = ()
    """What came of each of the batches."""


def keep(accounts: Iterable[TrainingMetrics], model: str, lineage: str) -> Journal:
    """The journal of a lineage from whatever was said on the topic, repetitions included."""
    own = {one.account: one for one in accounts if (one.model, one.lineage) == (model, lineage)}
    ordered = [own[number] for number in sorted(own)]
    batches = tuple(batch for one in ordered for batch in one.batches)
    stretches: list[Stretch] = []
    gap = _gap(ordered, model, lineage)
    for one in ordered:
        for batch in one.batches:
            stretches += (Stretch(read.partition, read.until) for read in batch.read)
            if stretches:  # time may have cut it: what it is made of was read before, perhaps before the batch before
                last, cut = stretches[-1], batch.experiences + len(batch.left_out)
                stretches[-1] = replace(last, cuts=(*last.cuts, cut), left_out=(*last.left_out, *batch.left_out))
            else:
                gap = gap or f"lineage {lineage} has cut a batch before it read anything"
        stretches += (Stretch(read.partition, read.until) for read in one.read)
    return Journal(tuple(stretches), batches, gap, recorded_batches(ordered))


async def read(topics: Topics, model: str, lineage: str) -> Journal:
    events = [entry.event async for entry in topics.read(Range(TrainingMetrics.topic))]
    return keep((event for event in events if isinstance(event, TrainingMetrics)), model, lineage)


def _gap(accounts: list[TrainingMetrics], model: str, lineage: str) -> str | None:
    if not accounts:
        return f"training-metrics holds nothing of model {model} in lineage {lineage}"
    numbers = [one.account for one in accounts]
    if numbers != list(range(len(numbers))):
        return f"training-metrics does not hold all of lineage {lineage}"
    if any(not one.batches and any(verdict.dropped is None for verdict in one.verdicts) for one in accounts):
        return f"a part of lineage {lineage} was trained before batches were recorded"
    return None

"""What a lineage has written down of its own reading (`training-metrics`): enough to build its batches again (P9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.topics import Range, Topics
from headrace_schemas import Batch, TrainingMetrics


@dataclass(frozen=True, slots=True)
class Stretch:
    """Records of one partition up to an offset, after which a batch of `cut` experiences was made (None: none)."""

    partition: int
    until: int
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class Journal:
    """In order. `gap` says why it does not reach from the lineage's beginning to its last save, None when it does."""

    stretches: tuple[Stretch, ...]
    batches: tuple[Batch, ...]
    gap: str | None = None


def keep(accounts: Iterable[TrainingMetrics], model: str, lineage: str) -> Journal:
    """The journal of a lineage from whatever was said on the topic, repetitions included."""
    own = {one.account: one for one in accounts if (one.model, one.lineage) == (model, lineage)}
    ordered = [own[number] for number in sorted(own)]
    batches = tuple(batch for one in ordered for batch in one.batches)
    stretches = tuple(stretch for one in ordered for stretch in _stretches(one))
    return Journal(stretches, batches, _gap(ordered, model, lineage))


async def read(topics: Topics, model: str, lineage: str) -> Journal:
    events = [entry.event async for entry in topics.read(Range(TrainingMetrics.topic))]
    return keep((event for event in events if isinstance(event, TrainingMetrics)), model, lineage)


def _stretches(account: TrainingMetrics) -> Iterator[Stretch]:
    for batch in account.batches:
        last = len(batch.read) - 1
        for number, read in enumerate(batch.read):
            yield Stretch(read.partition, read.until, batch.experiences if number == last else None)
    yield from (Stretch(read.partition, read.until) for read in account.read)


def _gap(accounts: list[TrainingMetrics], model: str, lineage: str) -> str | None:
    if not accounts:
        return f"training-metrics holds nothing of model {model} in lineage {lineage}"
    numbers = [one.account for one in accounts]
    if numbers != list(range(len(numbers))):
        return f"training-metrics does not hold all of lineage {lineage}"
    if any(not one.batches and any(verdict.dropped is None for verdict in one.verdicts) for one in accounts):
        return f"a part of lineage {lineage} was trained before batches were recorded"
    if any(not batch.read for one in accounts for batch in one.batches):
        return f"a batch of lineage {lineage} was cut without reading (its settings were changed under it)"
    return None

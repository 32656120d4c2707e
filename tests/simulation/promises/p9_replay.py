"""P9: what was trained can be built again from the topics, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace_schemas import Checkpoint, Experience, ModelEvent, TrainingMetrics
from headrace_schemas.events.checkpoint import Read
from headrace_schemas.replay import RecordedBatch, recorded_batches
from headrace_trainer.offline.dry_run import DryRun
from tests.simulation.services import TRAINER

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """A dry run of the lineage from its own journal, in the order in which its trainers, some of whom died, had read.

    It is made twice: with what the reports say of each batch, as a replay is, and without it, so that what the dry run
    derives is compared too. A version that the registry refused takes the weights back, which no replay follows:
    batches are compared up to it.
    """
    reports = _reports(cluster)
    _compare(cluster, that, recorded_batches(reports))
    _compare(cluster, that, ())


def _compare(cluster: Cluster, that: Check, recorded: Sequence[RecordedBatch]) -> None:
    batches = [batch for report in _reports(cluster) for batch in report.batches]
    straight = _straight_until(cluster)
    settings = TRAINER.model_copy(update={"lineage": "again", "replays": "main", "cut": "recorded"})
    dry_run = DryRun(settings, cluster.blobs)
    for batch in recorded:
        dry_run.expect(batch)
    for experience, marks in _journal(cluster):
        dry_run.add(experience, marks)
    again = dry_run.end().batches
    for original, planned in zip(batches, again, strict=False):
        if original.step < straight:
            that(
                (original.digest, original.experiences) == (planned.digest, planned.experiences),
                f"the batch of step {original.step} comes out differently",
            )
    enough = [batch for batch in batches if batch.step < straight]
    that(len(again) >= len(enough), f"{len(enough)} batches were trained, {len(again)} come out")


def _reports(cluster: Cluster) -> list[TrainingMetrics]:
    return sorted(cluster.log.all(TrainingMetrics), key=lambda report: report.account)


def _journal(cluster: Cluster) -> Iterator[tuple[Experience, tuple[int, ...]]]:
    """Experiences in the order of reading; with the last one before batches, how many they had.

    A batch that time cut may have been cut after a save, and so long after its last experience was read.
    """
    position: dict[int, int] = {}
    last: Experience | None = None
    cuts: tuple[int, ...] = ()
    for report in _reports(cluster):
        for read, cut in [*((batch.read, (batch.experiences,)) for batch in report.batches), (report.read, ())]:
            for event in _experiences(cluster, read, position):
                if last is not None:
                    yield last, cuts
                last, cuts = event, ()
            cuts += cut
    if last is not None:
        yield last, cuts


def _experiences(cluster: Cluster, reads: tuple[Read, ...], position: dict[int, int]) -> Iterator[Experience]:
    for read in reads:
        for event in cluster.log.raw(Experience, read.partition)[position.get(read.partition, 0) : read.until]:
            if event is not None:
                yield event
        position[read.partition] = read.until


def _straight_until(cluster: Cluster) -> int:
    """The first step that a version which the registry took back may have had a part in: its version descends from
    another than the one before it, or it was reported after a refusal. The weights may have gone back by then and come
    forward again, with a later version's promotion, so that versions alone do not tell."""
    versions = sorted(cluster.log.all(Checkpoint), key=lambda one: one.step)
    before = [None, *(one.version for one in versions)]
    turned = [one.step for one, parent in zip(versions, before, strict=False) if one.parent != parent]
    taken_back = ("rejected", "withdrawn", "rolled_back")
    at = cluster.bus.first
    refused = min((at[one.event_id] for one in cluster.log.all(ModelEvent) if one.decision in taken_back), default=None)
    late = [] if refused is None else [one for one in _reports(cluster) if at[one.event_id] >= refused]
    return min([*turned, *(batch.step for report in late for batch in report.batches)], default=1 << 30)

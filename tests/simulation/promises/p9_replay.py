"""P9: trained batches can be built again from the topics, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace_schemas import Checkpoint, Experience, ModelEvent, TrainingMetrics
from headrace_schemas.events.checkpoint import Read
from headrace_schemas.programs.replay import RecordedBatch, recorded_batches
from headrace_trainer.offline.dry_run import DryRun
from tests.simulation.services import TRAINER

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Play a dry run of the lineage from its own journal, in the order in which its trainers had read.

    The dry run is made twice: with the recorded cuts of each batch, as a replay is, and without them, so that derived
    cuts
    are compared too. A refused version takes the weights back, which no replay follows: batches are compared up to it.
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
    """Return the first step that a refused version may have influenced: its version has another parent than the version
    before it, or it was reported after a refusal. A later promotion may have brought the weights forward again, so the
    versions alone do not show it.
    """
    versions = sorted(cluster.log.all(Checkpoint), key=lambda checkpoint: checkpoint.step)
    before = [None, *(checkpoint.version for checkpoint in versions)]
    turned = [
        checkpoint.step for checkpoint, parent in zip(versions, before, strict=False) if checkpoint.parent != parent
    ]
    taken_back = ("rejected", "withdrawn", "rolled_back")
    at = cluster.bus.first
    refused = min(
        (at[checkpoint.event_id] for checkpoint in cluster.log.all(ModelEvent) if checkpoint.decision in taken_back),
        default=None,
    )
    late = (
        []
        if refused is None
        else [checkpoint for checkpoint in _reports(cluster) if at[checkpoint.event_id] >= refused]
    )
    return min([*turned, *(batch.step for report in late for batch in report.batches)], default=1 << 30)

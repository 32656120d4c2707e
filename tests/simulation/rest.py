"""Liveness: once the faults stop, all work is finished within a bounded time."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint, Experience, TrainingMetrics
from headrace_trainer.lineage.saved import Saved
from headrace_trainer.lineage.store import LineageStore
from tests.simulation.learner import Lesson, lessons_of

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_LOOK_S = 2.0
_STILL = 3
"""Number of successive checks that must find no open work, because work may be in memory alone for a moment."""


class Restless(AssertionError):
    """Error of a run in which work remains after the time limit."""


async def wait(cluster: Cluster, limit_s: float) -> None:
    """Wait until no work is left."""
    deadline = asyncio.get_running_loop().time() + limit_s
    still = 0
    while still < _STILL:
        await asyncio.sleep(_LOOK_S)
        left = next(unfinished(cluster), None)
        still = 0 if left else still + 1
        if left and asyncio.get_running_loop().time() > deadline:
            raise Restless(f"not at rest {limit_s:g} s after the last fault: {'; '.join(unfinished(cluster))}")


def unfinished(cluster: Cluster) -> Iterator[str]:
    """Yield the open work that is visible from outside."""
    yield from (f"{run.name} has not finished" for run in cluster.ledger.runs if not run.over)
    yield from (f"{cluster.ledger.unsaid} rewards have not been said" for _ in range(bool(cluster.ledger.unsaid)))
    yield from (
        f"{gateway.name} has {gateway.spooled} events spooled" for gateway in cluster.gateways if gateway.spooled
    )
    yield from (f"{slot.name} does not run" for slot in cluster.slots if slot.process is None)
    yield from _unread(cluster)
    for service in cluster.databases:
        yield from _unsent(cluster, service)
    collector, scorer = cluster.databases["collector"].connection, cluster.databases["scorer"].connection
    yield from _rows(collector, "SELECT count(*) FROM ends", "ends wait")
    yield from _rows(collector, "SELECT count(*) FROM sessions WHERE open_turns > 0", "sessions are open")
    yield from _rows(collector, "SELECT count(*) FROM feedback WHERE NOT resolved", "feedback waits for its target")
    yield from _rows(scorer, "SELECT count(*) FROM jobs", "calls of reward functions wait")
    yield from _rows(scorer, "SELECT count(*) FROM trajectories WHERE settle_ms IS NOT NULL", "rewards are to settle")
    yield from _untrained(cluster)
    registry = cluster.databases["registry"].connection
    waiting = "SELECT count(*) FROM versions WHERE state IN ('registered', 'probing', 'evaluating')"
    yield from _rows(registry, waiting, "versions are to be decided about")


def _unread(cluster: Cluster) -> Iterator[str]:
    for name, topics in (
        ("headrace-collector", ("turns", "feedback", "session-ends")),
        ("headrace-scorer", ("trajectories", "rewards", "feedback")),
    ):
        committed = cluster.bus.group(name).committed
        for topic_partition in (
            topic_partition for topic in topics for topic_partition in cluster.bus.partitions_of(topic)
        ):
            at, end = committed.get(topic_partition, 0), cluster.bus.end(topic_partition)
            if at != end:
                yield f"{name} has read {topic_partition.topic}[{topic_partition.partition}] to {at} of {end}"
    rows = cluster.databases["registry"].connection.execute(
        "SELECT next_offset FROM positions WHERE topic = 'checkpoints'"
    )
    if (rows.fetchone() or (0,))[0] != cluster.bus.end(cluster.bus.partitions_of("checkpoints")[0]):
        yield "the registry has not read all checkpoints"


def _unsent(cluster: Cluster, service: str) -> Iterator[str]:
    """Yield unsent outbox rows. A row stays until the transaction after its acknowledgement: the bus decides."""
    for topic, headers in cluster.databases[service].connection.execute("SELECT topic, headers FROM outbox"):
        event_id = dict(json.loads(headers))["ce_id"].encode()
        if not any(dict(record.headers).get("ce_id") == event_id for record in cluster.bus.records(topic)):
            yield f"{service} owes an event on {topic}"


def _rows(database: sqlite3.Connection, query: str, label: str) -> Iterator[str]:
    (count,) = database.execute(query).fetchone()
    if count:
        yield f"{count} {label}"


def _untrained(cluster: Cluster) -> Iterator[str]:
    saved = saved_lineage(cluster)
    if saved is None:
        yield "there is no lineage"
        return
    decided = {
        (outcome.experience_id, outcome.revision)
        for report in cluster.log.all(TrainingMetrics)
        for outcome in report.verdicts
    }
    for experience in cluster.log.all(Experience):
        if (experience.experience_id, experience.revision) not in decided:
            yield f"experience {experience.experience_id} revision {experience.revision} has no verdict"
    if saved.waiting:
        yield f"{len(saved.waiting)} experiences wait for a batch"


def saved_lineage(cluster: Cluster, name: str = "main") -> Saved | None:
    """Return the state of the trainer's last save."""
    return LineageStore(cluster.blobs, name).read()


def saved_optimizer(cluster: Cluster, name: str = "main") -> bytes:
    """Return the optimizer in the trainer's last save."""
    store = LineageStore(cluster.blobs, name)
    saved = store.read()
    assert saved is not None
    return store.get(saved.present.optimizer)


def lessons(cluster: Cluster) -> Mapping[str, tuple[Lesson, ...]]:
    """Return the lessons of every published version."""
    by_version: dict[str, tuple[Lesson, ...]] = {}
    for checkpoint in cluster.log.all(Checkpoint):
        by_version[checkpoint.version] = lessons_of(cluster.blobs, read_manifest(cluster.blobs, checkpoint.manifest))
    return by_version

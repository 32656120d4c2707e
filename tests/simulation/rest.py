"""Liveness: once nothing goes wrong any more, everything that was begun is finished within a bounded time."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from headrace_runtime.versions import read_manifest
from headrace_schemas import Checkpoint, Experience, TrainingMetrics
from headrace_trainer.lineage.saved import Saved
from headrace_trainer.lineage.store import LineageStore
from tests.simulation.learner import Lesson, lessons_of

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_LOOK_S = 2.0
_STILL = 3
"""Looks in a row that must find nothing to do: what is on its way in memory alone needs a moment."""


class Restless(AssertionError):
    """Something was still to be done after all that time."""


async def wait(cluster: Cluster, limit_s: float) -> None:
    """Until nothing is left to do."""
    deadline = asyncio.get_running_loop().time() + limit_s
    still = 0
    while still < _STILL:
        await asyncio.sleep(_LOOK_S)
        left = next(unfinished(cluster), None)
        still = 0 if left else still + 1
        if left and asyncio.get_running_loop().time() > deadline:
            raise Restless(f"not at rest {limit_s:g} s after the last fault: {'; '.join(unfinished(cluster))}")


def unfinished(cluster: Cluster) -> Iterator[str]:
    """What is still to be done, as far as it can be seen from outside."""
    yield from (f"{run.name} has not finished" for run in cluster.ledger.runs if not run.over)
    yield from (f"{cluster.ledger.unsaid} rewards have not been said" for _ in range(bool(cluster.ledger.unsaid)))
    yield from (
        f"{gateway.name} has {gateway.spooled} events spooled" for gateway in cluster.gateways if gateway.spooled
    )
    yield from (f"{place.name} does not run" for place in cluster.places if place.process is None)
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
        for place in (place for topic in topics for place in cluster.bus.places(topic)):
            at, end = committed.get(place, 0), cluster.bus.end(place)
            if at != end:
                yield f"{name} has read {place.topic}[{place.partition}] to {at} of {end}"
    rows = cluster.databases["registry"].connection.execute(
        "SELECT next_offset FROM positions WHERE topic = 'checkpoints'"
    )
    if (rows.fetchone() or (0,))[0] != cluster.bus.end(cluster.bus.places("checkpoints")[0]):
        yield "the registry has not read all checkpoints"


def _unsent(cluster: Cluster, service: str) -> Iterator[str]:
    """Rows of an outbox stay until the next transaction after their acknowledgement; what counts is the bus."""
    for topic, headers in cluster.databases[service].connection.execute("SELECT topic, headers FROM outbox"):
        wanted = dict(json.loads(headers))["ce_id"].encode()
        if not any(dict(record.headers).get("ce_id") == wanted for record in cluster.bus.records(topic)):
            yield f"{service} owes an event on {topic}"


def _rows(database: sqlite3.Connection, query: str, what: str) -> Iterator[str]:
    (count,) = database.execute(query).fetchone()
    if count:
        yield f"{count} {what}"


def _untrained(cluster: Cluster) -> Iterator[str]:
    saved = saved_lineage(cluster)
    if saved is None:
        yield "there is no lineage"
        return
    decided = {
        (one.experience_id, one.revision) for report in cluster.log.all(TrainingMetrics) for one in report.verdicts
    }
    for made in cluster.log.all(Experience):
        if (made.experience_id, made.revision) not in decided:
            yield f"experience {made.experience_id} revision {made.revision} has no verdict"
    if saved.waiting:
        yield f"{len(saved.waiting)} experiences wait for a batch"


def saved_lineage(cluster: Cluster, name: str = "main") -> Saved | None:
    """What the trainer's last save holds."""
    return LineageStore(cluster.blobs, name).read()


def saved_optimizer(cluster: Cluster, name: str = "main") -> bytes:
    """Return the optimizer in the trainer's last save."""
    store = LineageStore(cluster.blobs, name)
    saved = store.read()
    assert saved is not None
    return store.get(saved.present.optimizer)


def lessons(cluster: Cluster) -> Mapping[str, tuple[Lesson, ...]]:
    """What every published version was trained on."""
    found: dict[str, tuple[Lesson, ...]] = {}
    for checkpoint in cluster.log.all(Checkpoint):
        found[checkpoint.version] = lessons_of(cluster.blobs, read_manifest(cluster.blobs, checkpoint.manifest))
    return found

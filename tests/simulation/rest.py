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
    from tests.simulation.town import Town

_LOOK_S = 2.0
_STILL = 3
"""Looks in a row that must find nothing to do: what is on its way in memory alone needs a moment."""


class Restless(AssertionError):
    """Something was still to be done after all that time."""


async def wait(town: Town, limit_s: float) -> None:
    """Until nothing is left to do."""
    deadline = asyncio.get_running_loop().time() + limit_s
    still = 0
    while still < _STILL:
        await asyncio.sleep(_LOOK_S)
        left = next(unfinished(town), None)
        still = 0 if left else still + 1
        if left and asyncio.get_running_loop().time() > deadline:
            raise Restless(f"not at rest {limit_s:g} s after the last fault: {'; '.join(unfinished(town))}")


def unfinished(town: Town) -> Iterator[str]:
    """What is still to be done, as far as it can be seen from outside."""
    yield from (f"{run.name} has not finished" for run in town.ledger.runs if not run.over)
    yield from (f"{town.ledger.unsaid} rewards have not been said" for _ in range(bool(town.ledger.unsaid)))
    yield from (f"{gateway.name} has {gateway.spooled} events spooled" for gateway in town.gateways if gateway.spooled)
    yield from (f"{place.name} does not run" for place in town.places if place.process is None)
    yield from _unread(town)
    for service in town.databases:
        yield from _unsent(town, service)
    collector, scorer = town.databases["collector"].connection, town.databases["scorer"].connection
    yield from _rows(collector, "SELECT count(*) FROM ends", "ends wait")
    yield from _rows(collector, "SELECT count(*) FROM sessions WHERE open_turns > 0", "sessions are open")
    yield from _rows(collector, "SELECT count(*) FROM feedback WHERE NOT resolved", "feedback waits for its target")
    yield from _rows(scorer, "SELECT count(*) FROM jobs", "calls of reward functions wait")
    yield from _rows(scorer, "SELECT count(*) FROM trajectories WHERE settle_ms IS NOT NULL", "rewards are to settle")
    yield from _untrained(town)
    registry = town.databases["registry"].connection
    waiting = "SELECT count(*) FROM versions WHERE state IN ('registered', 'probing', 'evaluating')"
    yield from _rows(registry, waiting, "versions are to be decided about")


def _unread(town: Town) -> Iterator[str]:
    for name, topics in (
        ("headrace-collector", ("turns", "feedback", "session-ends")),
        ("headrace-scorer", ("trajectories", "rewards", "feedback")),
    ):
        committed = town.bus.group(name).committed
        for place in (place for topic in topics for place in town.bus.places(topic)):
            at, end = committed.get(place, 0), town.bus.end(place)
            if at != end:
                yield f"{name} has read {place.topic}[{place.partition}] to {at} of {end}"
    rows = town.databases["registry"].connection.execute(
        "SELECT next_offset FROM positions WHERE topic = 'checkpoints'"
    )
    if (rows.fetchone() or (0,))[0] != town.bus.end(town.bus.places("checkpoints")[0]):
        yield "the registry has not read all checkpoints"


def _unsent(town: Town, service: str) -> Iterator[str]:
    """Rows of an outbox stay until the next transaction after their acknowledgement; what counts is the bus."""
    for topic, headers in town.databases[service].connection.execute("SELECT topic, headers FROM outbox"):
        wanted = dict(json.loads(headers))["ce_id"].encode()
        if not any(dict(record.headers).get("ce_id") == wanted for record in town.bus.records(topic)):
            yield f"{service} owes an event on {topic}"


def _rows(database: sqlite3.Connection, query: str, what: str) -> Iterator[str]:
    (count,) = database.execute(query).fetchone()
    if count:
        yield f"{count} {what}"


def _untrained(town: Town) -> Iterator[str]:
    saved = saved_lineage(town)
    if saved is None:
        yield "there is no lineage"
        return
    decided = {(one.experience_id, one.revision) for report in town.log.all(TrainingMetrics) for one in report.verdicts}
    for made in town.log.all(Experience):
        if (made.experience_id, made.revision) not in decided:
            yield f"experience {made.experience_id} revision {made.revision} has no verdict"
    if saved.waiting:
        yield f"{len(saved.waiting)} experiences wait for a batch"


def saved_lineage(town: Town, name: str = "main") -> Saved | None:
    """What the trainer's last save holds."""
    return LineageStore(town.blobs, name).read()


def lessons(town: Town) -> Mapping[str, tuple[Lesson, ...]]:
    """What every published version was trained on."""
    found: dict[str, tuple[Lesson, ...]] = {}
    for checkpoint in town.log.all(Checkpoint):
        found[checkpoint.version] = lessons_of(town.blobs, read_manifest(town.blobs, checkpoint.manifest))
    return found

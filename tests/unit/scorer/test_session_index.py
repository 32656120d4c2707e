"""Tests of the bounded reads of a session: they decide as all of its trajectories and feedback would, and no record
costs more than a bounded part of them."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event as sql_event
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Trajectory
from headrace_scorer import feedback_matching, ledger, rematches, schema, session_index, store
from headrace_scorer.feedback_matching import ClosedRuns, ClosedTrajectory, PlacedFeedback
from tests.support.streams import Service, bench
from tests.support.turns import START, ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, rematch_of
from tests.unit.scorer.test_store import keep

NOW = START + timedelta(seconds=100)


@pytest_asyncio.fixture
async def tx(database_url: str, data_dir: Path) -> AsyncIterator[AsyncConnection]:
    service = Service(schema.stream, {}, package="headrace_scorer")
    async with bench(service, database_url, data_dir) as stream, stream.processor.database.transaction() as opened:
        yield opened


@pytest.mark.parametrize("seed", range(30))
async def test_feedback_is_matched_as_if_the_whole_session_were_read(tx: AsyncConnection, seed: int) -> None:
    """A random session of captured and ingested trajectories, closed together or not, in any order with feedback."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    kinds = draw.choice(["captured", "ingested", "both"])
    runs: list[ClosedTrajectory] = []
    stored: list[Trajectory] = []
    given: list[PlacedFeedback] = []
    begins = draw.sample(range(1, 60), 30)
    for number in range(30):
        if draw.random() < 0.4:
            placed = placed_feedback(draw, number)
            given.append(placed)
            await store.add_feedback(tx, NOW, placed.event.event_id, placed, 0)
            expected = sorted(feedback_matching.target_trajectories(placed, ClosedRuns(runs)))
            assert list(await ledger.targets_of(tx, placed)) == expected
            continue
        is_captured = kinds == "captured" or (kinds == "both" and draw.random() < 0.5)
        run = closed(
            ask([user(f"q{number}")], at=float(number)),
            at=draw.choice([10.0, 20.0, 30.0, 40.0]),
            trajectory_id=f"run {number}",
            turns_from=begins[number] if is_captured else None,
        )
        await store.add_trajectory(tx, NOW, run, number, 0, 60.0)
        stored.append(run)
        runs.append(ClosedTrajectory(run.trajectory_id, epoch_ms(run.time), number, run.turns_from))
        matched = (await ledger.feedback_for(tx, [run], is_new=True))[run.trajectory_id]
        displaced = feedback_matching.trajectories_losing_feedback(run.trajectory_id, ClosedRuns(runs), given)
        assert list(matched.displaced) == displaced
    sets = await ledger.feedback_for(tx, stored)
    for run in stored:
        expected_set = feedback_matching.feedback_for(run.trajectory_id, ClosedRuns(runs), (), given)
        assert sets[run.trajectory_id].feedback_set == expected_set


def placed_feedback(draw: random.Random, offset: int) -> PlacedFeedback:
    event = feedback("s", value=0.5, feedback_id=f"f{offset}", at=draw.choice([5.0, 15.0, 20.0, 45.0]))
    if draw.random() < 0.2:
        return PlacedFeedback(event, offset)
    until = None if draw.random() < 0.1 else draw.randrange(32)
    return PlacedFeedback(event, offset, draw.randrange(62), until)


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Count the calls of functions in this thread, into the single item of the list."""
    calls = [0]

    def count(_frame: Any, event: str, _argument: Any) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("about", ["its session", "its turns", "its task"])
async def test_a_record_costs_the_same_however_many_runs_and_feedback_its_session_has(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch, about: str
) -> None:
    """The client may use a session id for ever: 100,000 closed runs, or as much feedback about one of them."""
    monkeypatch.setattr(feedback_matching, "EVENTS_MAX", 4)
    monkeypatch.setattr(store, "EVENTS_MAX", 4)
    monkeypatch.setattr(session_index, "_PLACED_MAX", 4)
    monkeypatch.setattr(ledger, "_PLACED_BY_TIME_MAX", 4)
    turns = [ask([user(f"q{number}")], at=float(number)) for number in range(120)]
    task: dict[str, Any] = {"level": "task", "task_id": "t", "partition": 0} if about == "its task" else {}
    listed = turns[:1] if about == "its turns" else []
    costs: list[int] = []
    async with open_scorer() as rig:
        for number, turn in enumerate(turns):
            opinion = feedback("s", *listed, value=number / 1000, feedback_id=f"f{number}", rater="r", **task)
            with counted_calls() as calls:
                await rig.deliver(closed(turn, at=10.0 + number, turns_from=number, trajectory_id=f"run {number}"))
                await rig.deliver(opinion)
            costs.append(calls[0])
            await rig.stream.step(rematch_of(rig))
    early, late = sorted(costs[60:80])[10], sorted(costs[100:])[10]
    assert late < 1.1 * early


async def test_the_runs_of_a_task_are_matched_again_once_for_each_feedback(tx: AsyncConnection) -> None:
    for name, task in (("a", "known"), ("b", "known"), ("c", "known"), ("d", "another")):
        await keep(tx, closed(session=name, trajectory_id=name, task_id=task))
    assert await rematches.take(tx, 9) == ([], False), "there was no feedback"
    await rematches.add_task(tx, "default", "known", 0)
    assert await rematches.take(tx, 2) == (["a", "b"], True)
    assert await rematches.take(tx, 2) == (["c"], False)
    assert await rematches.take(tx, 2) == ([], False)


async def test_feedback_about_a_task_changes_one_row_however_many_runs_it_has(tx: AsyncConnection) -> None:
    """And a stream of feedback about the task keeps no run from being matched again."""
    names = [f"run {number:03}" for number in range(200)]
    for name in names:
        await keep(tx, closed(session=name, trajectory_id=name, task_id="t"))
    changes = event_changes(tx)
    rematched: list[str] = []
    for _ in range(9):
        changes.clear()
        await rematches.add_task(tx, "default", "t", 0)
        assert sum(changes) == 1
        batch, has_more = await rematches.take(tx, 25)
        assert len(batch) <= 25
        rematched += batch
    assert sorted(set(rematched)) == names
    last = list(batch)
    while has_more:
        batch, has_more = await rematches.take(tx, 25)
        last += batch
    assert sorted(last) == names, "the last feedback is matched with each run once"


def event_changes(tx: AsyncConnection) -> list[int]:
    """Return a list to which each later change of rows adds their number."""
    changes: list[int] = []

    def note(_connection: Any, cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith(("UPDATE", "INSERT", "DELETE")):
            changes.append(cursor.rowcount)

    assert tx.sync_connection is not None
    sql_event.listen(tx.sync_connection, "after_cursor_execute", note)
    return changes


async def test_tenants_take_turns_in_rematches(tx: AsyncConnection) -> None:
    for number in range(40):
        await keep(tx, closed(session=f"s{number}", trajectory_id=f"run {number:02}", task_id=f"t{number}"))
        await rematches.add_task(tx, "default", f"t{number}", 0)
    await rematches.take(tx, 5)
    await keep(tx, closed(session="other", trajectory_id="run of another", task_id="t", tenant="acme"))
    await rematches.add_task(tx, "acme", "t", 0)
    assert "run of another" in (await rematches.take(tx, 5))[0]

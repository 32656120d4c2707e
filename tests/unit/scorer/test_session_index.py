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
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Trajectory
from headrace_scorer import feedback_matching, ledger, schema, session_index, store
from headrace_scorer.feedback_matching import ClosedRuns, ClosedTrajectory, PlacedFeedback
from tests.support.streams import Service, bench
from tests.support.turns import START, ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, rematch_of

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

"""Tests that the experiences are the same after crashes, with other replicas, after retention, in any order, and by
bounded reads.

No timer and no event reads all stored rows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event as sql_event
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Event, Experience, Reward, Trajectory
from headrace_scorer import feedback_matching, ledger, rematches, schema, session_index, store, upkeep
from headrace_scorer.feedback_matching import ClosedRuns, ClosedTrajectory, PlacedFeedback
from headrace_scorer.settings import ScorerSettings
from tests.support.remembered import Ages, fill_scorer, recorded, scans
from tests.support.streams import Service, bench
from tests.support.turns import START, ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, Rig, answer, half, rematch_of, scorer
from tests.unit.scorer.test_scorer import reward
from tests.unit.scorer.test_store import keep

NOW = START + timedelta(seconds=100)


async def test_a_job_that_died_with_its_process_is_done_again(open_scorer: Open) -> None:
    async with open_scorer(half, lease_s=15) as rig:
        await rig.stream.deliver(closed())
        dead = await rig.perform()  # done, and the process ends before it is entered
        rig.stream.clock.advance(10)
        await rig.scoring.lease_jobs(rig.stream.processor)
        rig.stream.clock.advance(10)
        rig.scoring._leased.clear()  # what it knew died with it
        await rig.scoring.lease_jobs(rig.stream.processor)
        assert await rig.perform() == [], "its lease was renewed 10 s ago"
        rig.stream.clock.advance(6)
        await rig.scoring.lease_jobs(rig.stream.processor)
        await rig.run_functions()
        assert rig.experiences() == [(0, 0, 0.5, None)]
        await rig.stream.step(rig.scoring.result_step(dead))
        assert len(rig.rewards()) == 1, "its late result counts for nothing"


async def test_a_result_whose_trajectory_was_never_committed_is_refused(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        handler = rig.stream.processor.handlers["trajectories"]
        broken = {**rig.stream.processor.handlers}

        async def fails(event: Any, handling: Any) -> Any:
            await handler(event, handling)
            raise ValueError("after the job was handed over")

        broken["trajectories"] = fails
        rig.stream.processor.handlers = broken
        await rig.stream.deliver(closed())
        await rig.run_functions()
        assert (rig.rewards(), await rig.stream.count("ledger")) == ([], 0)


async def test_more_jobs_than_fit_in_memory_wait_in_the_database(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        trajectories = [closed(ask([user("q")], session=f"s{n}"), session=f"s{n}") for n in range(100)]
        await rig.stream.deliver(*trajectories)
        for _ in range(5):
            await rig.scoring.lease_jobs(rig.stream.processor)
            await rig.run_functions()
        assert len(rig.experiences()) == 100
        assert await rig.stream.count("jobs") == 0


async def test_functions_that_are_gone_hold_nothing_up(open_scorer: Open) -> None:
    async with open_scorer(half, answer) as rig:
        await rig.stream.deliver(closed())
        rig.pool.use([half])
        await rig.run_functions()
        assert rig.experiences() == [(0, 0, 0.5, None)]


async def forget(rig: Rig) -> None:
    """Delete rows that are older than 500 s."""
    for deletion in upkeep.FORGETTING:
        async with rig.stream.processor.database.transaction() as tx:
            await deletion(tx, rig.stream.clock.now(), 500)


async def test_retention_forgets_everything_about_old_trajectories(open_scorer: Open) -> None:
    async with open_scorer(half) as rig:
        turn = ask([user("q")])
        old, orphan = closed(turn), closed(ask([user("p")], session="x"), session="x")
        await rig.deliver(old, feedback("s", turn, value=1.0), reward(orphan, "x"), feedback("nobody"))
        rig.stream.clock.advance(1000)
        new = closed(ask([user("n")], session="new"), session="new")
        await rig.deliver(new)
        late = closed(ask([user("l")], session="late"), session="late")
        await rig.stream.deliver(late)
        unfinished = await rig.perform()
        await forget(rig)
        remaining = {
            name: await rig.stream.count(name) for name in ("trajectories", "turns", "ledger", "feedback", "listed")
        }
        assert remaining == {"trajectories": 2, "turns": 2, "ledger": 1, "feedback": 0, "listed": 0}
        rig.stream.clock.advance(1000)
        await forget(rig)
        await rig.stream.step(rig.scoring.result_step(unfinished))
        assert await rig.stream.count("jobs") == 0, "a result for a forgotten trajectory goes nowhere"
        await rig.deliver(feedback("s", turn, value=0.0))
        assert len([event for event in rig.stream.sent(Reward) if event.source == "feedback"]) == 1


def story(seed: int) -> list[Event]:
    """Return three trajectories of two sessions, with rewards and feedback of several sources."""
    choose = random.Random(seed)
    turns = [ask([user("q")], "Ada", session=name, at=at) for at, name in enumerate("aab")]
    trajectories = [closed(turn, session=turn.session_id, at=10 + 10 * n) for n, turn in enumerate(turns)]
    events: list[Event] = [*trajectories]
    for turn, trajectory in zip(turns, trajectories, strict=True):
        for revision in range(choose.randint(0, 3)):
            value = choose.choice([None, 0.25, 0.75])
            events.append(reward(trajectory, "judge:x", value, revision))
        for at in choose.sample(range(60), choose.randint(0, 3)):
            withdrawn = choose.random() < 0.2
            about = [turn] if choose.random() < 0.6 else []
            value = None if withdrawn else choose.random()
            context = {"expected": choose.choice(["Ada", "Bob"])} if choose.random() < 0.5 else {}
            event = feedback(turn.session_id, *about, value=value, withdrawn=withdrawn, at=at, context=context)
            events.append(event)
    return events


async def outcome(rig: Rig) -> dict[str, tuple[object, ...]]:
    """Return the fields of the last revision of each experience by its id."""
    last = {
        experience.experience_id: experience
        for experience in sorted(rig.stream.sent(Experience), key=lambda experience: experience.revision)
    }
    return {
        name: (experience.reward, experience.no_reward, experience.parts, experience.weight)
        for name, experience in last.items()
    }


@pytest.mark.parametrize("seed", range(6))
async def test_p10_any_order_and_duplicates_come_to_the_same(open_scorer: Open, seed: int) -> None:
    print("seed", seed)
    events = story(seed)
    outcomes = []
    for attempt in range(3):
        choose = random.Random(f"{seed}/{attempt}")
        async with open_scorer(answer, half, expected=["judge:*"], reward_wait_s=60) as rig:
            records = rig.stream.produce(*events)
            records = choose.sample(records, len(records)) if attempt else records
            for record in choose.choices(records, k=5):
                records.insert(choose.randint(records.index(record) + 1, len(records)), record)
            while records:
                size = choose.randint(1, 4)
                await rig.stream.deliver(*records[:size])
                records = records[size:]
                if choose.random() < 0.5:
                    await rig.run_functions()
            await rig.run_functions()
            await rig.pass_time(61)
            await rig.run_functions()
            assert len(await outcome(rig)) == 3
            revisions: dict[str, list[int]] = {}
            for experience in rig.stream.sent(Experience):
                revisions.setdefault(experience.experience_id, []).append(experience.revision)
            assert all(revision == list(range(len(revision))) for revision in revisions.values()), (
                "each revision once, in order"
            )
            outcomes.append(await outcome(rig))
    rewarded = {name: state[0] is not None for name, state in outcomes[0].items()}
    for other in outcomes[1:]:
        assert {name: state[0] is not None for name, state in other.items()} == rewarded
        for name, state in other.items():
            assert state[0] == pytest.approx(outcomes[0][name][0])
            assert state[2:] == outcomes[0][name][2:]


_TURNS = 20_000
_FEW = 1_000


def length(trajectory: object) -> float:
    return 0.5


async def _use(rig: Rig, settings: ScorerSettings) -> None:
    """Deliver every kind of event, and run every timer."""
    turn = ask([user("q")])
    await rig.deliver(closed(turn, task_id="t"), feedback("s", turn), feedback("s"))
    await rig.deliver(closed(ask([user("q")], session="other"), session="other"))
    await rig.deliver(feedback("any", level="task", task_id="t", partition=0))
    await rig.stream.step(rematch_of(rig))
    await rig.pass_time(settings.reward_wait_s + 1)
    await rig.scoring.lease_jobs(rig.stream.processor)
    await rig.stream.step(upkeep.measure)
    for forget in upkeep.FORGETTING:
        await rig.stream.step(partial(forget, retention_s=settings.retention_s))
    rig.stream.clock.advance(settings.retention_s * 2)
    await rig.stream.processor.prune()


async def test_nothing_reads_all_that_is_remembered(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir, length) as rig:
        settings = ScorerSettings()
        database = rig.stream.processor.database
        ages = Ages(epoch_ms(START), settings.retention_s, old=300, kept=0, open=100)
        await fill_scorer(database, _TURNS, ages, lambda _done, _total: None)
        with recorded(database) as statements:
            await _use(rig, settings)
        assert len(statements.found) > 20
        async with rig.stream.aborted() as tx:
            assert await scans(tx, statements, partial=frozenset({"ix_trajectories_rematch"}), rows_max=_FEW) == []


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

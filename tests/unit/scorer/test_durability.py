"""Tests that the experiences are the same after crashes, with other replicas, after retention, and in any order of
events.

No timer and no event reads all stored rows.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Event, Experience, Reward
from headrace_scorer import upkeep
from headrace_scorer.settings import ScorerSettings
from tests.support.remembered import Ages, fill_scorer, recorded, scans
from tests.support.turns import START, ask, closed, feedback, user
from tests.unit.scorer.conftest import Open, Rig, answer, half, rematch_of, scorer
from tests.unit.scorer.test_scorer import reward


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

"""Tests of stored trajectories and feedback: reads by session, turn and tenant, migrations, and tenants with equal
ids."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from alembic import command
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.database import Database, migrate
from headrace_schemas import DeadLetter, Event, Experience, Feedback, Reward, Trajectory, Turn
from headrace_schemas.events.feedback import task_key
from headrace_schemas.events.opinion import ComparedAnswer, Preference
from headrace_schemas.values import ids
from headrace_scorer import ledger, schema, session_index, store
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.feedback_matching import FeedbackPosition, PlacedFeedback
from tests.support.presence import draw_seed
from tests.support.streams import Service, bench
from tests.support.turns import START, ask, closed, feedback, said, user
from tests.unit.scorer.conftest import Open, Rig, answer, half

NOW = START + timedelta(seconds=100)


@pytest_asyncio.fixture
async def tx(database_url: str, data_dir: Path) -> AsyncIterator[AsyncConnection]:
    service = Service(schema.stream, {})
    async with bench(service, database_url, data_dir) as stream, stream.processor.database.transaction() as opened:
        yield opened


async def keep(tx: AsyncConnection, trajectory: Trajectory, offset: int = 0) -> dict[str, Any] | None:
    return await store.add_trajectory(tx, NOW, trajectory, offset, 0, 60.0)


async def hear(tx: AsyncConnection, *events: Feedback) -> None:
    for event in events:
        await store.add_feedback(tx, NOW, event.event_id, PlacedFeedback(event, 7, 3, 4), 0)


async def positions_about(
    tx: AsyncConnection, stored: Sequence[Trajectory]
) -> dict[str, tuple[list[FeedbackPosition], list[FeedbackPosition]]]:
    """Return the positions of the feedback that lists turns of each trajectory, and of that about its session."""
    listings = await session_index.listing_positions(tx, stored)
    general = await session_index.general_positions(tx, stored, 9, is_new=False)
    return {name: (listing, general[name][1]) for name, listing in listings.items()}


def turns_of(tenant: str = "default", session: str = "s", count: int = 1) -> list[Turn]:
    return [ask([user("q")], session=session, tenant=tenant, at=at) for at in range(count)]


async def test_a_trajectory_is_kept_once_and_waits_for_its_reward(tx: AsyncConnection) -> None:
    trajectory, other = closed(task_id="task"), closed(session="x")
    row = await keep(tx, trajectory)
    await keep(tx, other)
    assert row is not None
    assert row["settle_ms"] == epoch_ms(NOW) + 60_000
    await store.update_rows(tx, {trajectory.trajectory_id: {"run_id": "7"}})
    assert await keep(tx, trajectory) is None
    locked = await store.lock_rows(tx, [other.trajectory_id, "nobody", trajectory.trajectory_id])
    assert locked.keys() == {other.trajectory_id, trajectory.trajectory_id}
    assert {**row, "run_id": "7", "trajectory_id": trajectory.trajectory_id} == dict(locked[trajectory.trajectory_id])
    assert locked[other.trajectory_id]["run_id"] is None


@pytest.mark.parametrize(
    "fields", [{"purpose": "eval"}, {"untrained": "registered"}, {"branches": (), "dialogues": ()}]
)
async def test_what_is_not_trained_waits_for_nothing(tx: AsyncConnection, fields: dict[str, Any]) -> None:
    row = await keep(tx, closed(**fields))
    assert row is not None
    assert row["settle_ms"] is None


async def test_a_turn_is_in_one_trajectory_of_its_tenant(tx: AsyncConnection) -> None:
    (shared,) = turns_of()
    mine, foreign = closed(shared), closed(shared, trajectory_id="theirs", tenant="b")
    await keep(tx, closed(session="x"))
    await keep(tx, foreign)
    await keep(tx, mine)
    with pytest.raises(InvalidEvent, match=f"turn {shared.turn_id!r} belongs to trajectory {mine.trajectory_id!r}"):
        await keep(tx, closed(shared, trajectory_id="second"))
    for tenant, holder in (("default", mine), ("b", foreign)):
        assert await store.trajectories_with(tx, [shared.turn_id], tenant) == [holder.trajectory_id]
    assert await store.trajectories_with(tx, ["nobody's"], "default") == []


@pytest.mark.parametrize("partition", [None, 0, 3])
async def test_a_failed_trajectory_is_dead_lettered_with_its_place(tx: AsyncConnection, partition: int | None) -> None:
    trajectory = closed()
    await keep(tx, trajectory, 7)
    await store.update_rows(tx, {trajectory.trajectory_id: {"partition": partition}})
    (letter,) = await store.fail_scoring(tx, trajectory.trajectory_id, "no room")
    assert (letter.source_partition, letter.source_offset, letter.reason) == (partition, 7, "scoring_failed")
    assert await store.fail_scoring(tx, "nobody's", "no room") == []


async def test_feedback_is_kept_once_and_read_by_session_tenant_and_turn(tx: AsyncConnection) -> None:
    first, second = turns_of(count=2)
    (elsewhere,) = turns_of(session="x")
    listing, general = feedback("s", first, first), feedback("s")
    forged = [
        item.model_copy(update={"feedback_id": f"b{item.feedback_id}", "tenant": "b"}) for item in (listing, general)
    ]
    await hear(tx, listing, general, listing, general, *forged)
    in_x = feedback("x", elsewhere), feedback("x"), feedback("x", first)
    await hear(tx, *in_x)
    runs = [
        closed(first, trajectory_id="first"),
        closed(second, trajectory_id="second"),
        closed(elsewhere, session="x", trajectory_id="elsewhere"),
        closed(trajectory_id="theirs", tenant="b"),
    ]
    for run in runs:
        await keep(tx, run)
    about = await positions_about(tx, runs)
    records = await store.load_feedback(tx, (item.name for pair in about.values() for part in pair for item in part))
    events = {name: [[records[item.name].event for item in part] for part in pair] for name, pair in about.items()}
    assert events == {
        "first": [[listing], [general]],
        "second": [[], [general]],
        "elsewhere": [[in_x[0]], [in_x[1]]],
        "theirs": [[], [forged[1]]],
    }
    size = len(general.to_json())
    assert about["second"][1] == [FeedbackPosition(general.event_id, 7, 3, 4, size)]
    assert records[general.event_id] == PlacedFeedback(general, 7, 3, 4, size)
    assert await positions_about(tx, runs[1:2]) == {"second": about["second"]}


async def test_large_stored_feedback_is_parsed_in_another_thread(
    tx: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that parses the largest feedback of one tenant would delay all others by tens of milliseconds."""
    run = closed(trajectory_id="run")
    await keep(tx, run)
    await hear(tx, feedback(comment="small"), feedback(context={"values": ["x" * 60] * 1000}))
    parsed: dict[bool, bool] = {}
    from_stored = Feedback.from_stored

    def watched(payload: bytes) -> Feedback:
        parsed[len(payload) > 32_768] = threading.current_thread() is threading.main_thread()
        return from_stored(payload)

    monkeypatch.setattr(Feedback, "from_stored", watched)
    _, general = (await positions_about(tx, [run]))["run"]
    assert len(await store.load_feedback(tx, (item.name for item in general))) == 2
    assert parsed == {False: True, True: False}, "whether feedback is large, and whether the event loop parsed it"


async def test_feedback_about_a_task_is_read_in_the_partition_of_the_trajectory(tx: AsyncConnection) -> None:
    runs = {name: closed(session=name, trajectory_id=name, task_id="t") for name in ("a", "b")}
    for partition, run in enumerate(runs.values()):
        await store.add_trajectory(tx, NOW, run, 0, partition, 60.0)
    for partition in (0, 1):
        copy = feedback("any", level="task", task_id="t", partition=partition)
        named = copy.model_copy(update={"feedback_id": f"copy {partition}"})
        await store.add_feedback(tx, NOW, named.feedback_id, PlacedFeedback(named, 10 + partition), partition)
    records = await session_index.feedback_about_tasks(tx, {"a": ("default", "t"), "b": ("default", "t")})
    assert {name: [record.offset for record in of_run] for name, of_run in records.items()} == {"a": [10], "b": [11]}
    assert (await session_index.feedback_about_tasks(tx, {"a": ("other tenant", "t")})).get("a", []) == []
    assert (await session_index.feedback_about_tasks(tx, {"a": ("default", "another")})).get("a", []) == []


async def test_the_last_few_trajectories_are_read_from_memory(tx: AsyncConnection) -> None:
    stored, template = closed(), closed(session="x")
    await keep(tx, stored)
    library = store.TrajectoryCache()
    library.add(stored.model_copy(update={"task_id": "remembered"}), 1000)

    async def get(name: str) -> Trajectory | None:
        return (await library.get(tx, [name])).get(name)

    for number in range(256):
        cached = await get(stored.trajectory_id)
        assert cached is not None
        assert cached.task_id == "remembered", f"{number} others are newer"
        library.add(template.model_copy(update={"trajectory_id": str(number)}), 1000)
    assert await get(stored.trajectory_id) == stored, "the database has it still"
    assert await get("0") is None, "the oldest went when it came back"
    assert await get("1") is not None
    library.add(template.model_copy(update={"trajectory_id": stored.trajectory_id}), 1000)
    assert await get("1") is not None, "it is here already"
    assert (await library.get(tx, ["1", stored.trajectory_id, "nobody"])).keys() == {"1", stored.trajectory_id}


async def test_trajectories_in_memory_are_bounded_by_their_bytes(tx: AsyncConnection) -> None:
    cache, template = store.TrajectoryCache(), closed()
    named = [template.model_copy(update={"trajectory_id": name}) for name in "abcd"]
    for trajectory, size_bytes in zip(named, (500_000, 1_000_000, 1_000_000, 3_000_000), strict=True):
        cache.add(trajectory, size_bytes)
    assert (await cache.get(tx, "abcd")).keys() == {"b", "c"}, "the oldest went, and the largest was never kept"
    cache.add(named[1], 3_000_000)
    cache.add(named[0], 1_000_000)
    assert (await cache.get(tx, "abcd")).keys() == {"a", "c"}, "the former size of a trajectory no longer counts"


async def test_the_ledger_of_before_has_its_rewards(
    data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = Common.model_validate({"data_dir": data_dir, "database": {"url": database_url}})
    database = Database.open(f"t{uuid.uuid4().hex[:12]}", common)
    real = command.upgrade
    try:
        with monkeypatch.context() as patched:
            patched.setattr(command, "upgrade", lambda config, _: real(config, "0004"))
            await migrate(database, "headrace_scorer")
        columns = "trajectory_id, tenant, turn_id, source, revision, outcome, value, time_ms, arrived_ms"
        async with database.transaction() as tx:
            for turn, revision, value in (("", 0, 0.25), ("", 1, 0.5), ("a", 0, 1.0)):
                parameters = {"turn": turn, "revision": revision, "value": value}
                values = " VALUES ('t', 'default', :turn, 'feedback', :revision, 'scored', :value, 1, 1)"
                await tx.execute(text(f"INSERT INTO ledger ({columns}){values}"), parameters)
        await migrate(database, "headrace_scorer")
        async with database.transaction() as tx:
            entries = (await ledger.read(tx, {"t": "default"}))["t"]
            assert await tx.scalar(text("SELECT count(*) FROM ledger")) == 3
        current_values = {(reward.source, reward.turn_id, reward.choice): reward.value for reward in entries.current()}
        assert current_values == {("feedback", None, None): 0.5, ("feedback", "a", None): 1.0}
        assert entries.next_revision(EntryKey.reward("feedback")) == 2
    finally:
        if database.schema:
            async with database.transaction() as tx:
                await tx.execute(text(f'DROP SCHEMA "{database.schema}" CASCADE'))
        await database.close()


TENANTS = (("default", "b"), ("b", "default"), ("a", "b"), ("a/b", "a"))


def _everything(tenant: str) -> list[Event]:
    """Return a trajectory with two turns, and feedback and rewards of every kind. The ids are equal for all tenants."""
    first, second = (ask([user(f"question {n}")], "yes", "no", tenant=tenant) for n in range(2))
    trajectory = closed(first, second, tenant=tenant, trajectory_id="run-1", task_id="task")
    key = trajectory.session_key
    pair = Preference(chosen=ComparedAnswer(turn_id=first.turn_id), rejected=ComparedAnswer(turn_id=second.turn_id))
    kinds: dict[str, dict[str, Any]] = {
        "value": {"value": 1.0},
        "revised": {"value": 0.25},
        "part": {"value": None, "parts": {"tone": 0.5}},
        "edit": {"value": None, "edit": said("better"), "msg_ids": (first.turn_id,)},
        "preference": {"value": None, "preference": pair, "msg_ids": (first.turn_id, second.turn_id)},
        "facts": {"value": None, "context": {"expected": "yes"}},
        "turn": {"value": 0.5, "level": "turn", "msg_ids": (second.turn_id,), "source": "user"},
        "withdrawn": {
            "value": None,
            "withdrawn": True,
            "source": "user",
            "msg_ids": (second.turn_id,),
            "level": "turn",
        },
    }
    opinions: list[Event] = [
        feedback(tenant=tenant, feedback_id=name, session_key=key, **fields) for name, fields in kinds.items()
    ]
    task = feedback(
        tenant=tenant,
        feedback_id="task",
        session_key=task_key(tenant, "task"),
        task_id="task",
        level="task",
        partition=0,
        value=0.75,
    )
    reward = Reward(
        time=trajectory.time, trajectory_id="run-1", session_key=key, tenant=tenant, source="mine", value=0.5
    )
    return [trajectory, *opinions, task, reward]


def _copied(events: Sequence[Event], tenant: str) -> list[Event]:
    """Return copies of `events` for `tenant`, with unchanged ids and keys."""
    return [event.model_copy(update={"tenant": tenant}) for event in events]


def _last_published(rig: Rig, tenant: str) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Return the last reward of each source and turn of `tenant`, and the last experience of each branch."""
    last: dict[tuple[object, ...], tuple[object, ...]] = {}
    for reward in rig.stream.sent(Reward):
        if reward.tenant == tenant:
            last[reward.source, reward.turn_id, reward.choice] = (reward.outcome, reward.value)
    for experience in rig.stream.sent(Experience):
        if experience.tenant == tenant:
            last[(experience.experience_id,)] = (
                experience.reward,
                experience.parts,
                experience.turn_rewards,
                experience.edits,
                experience.preferences,
            )
    return last


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_equal_ids_of_another_tenant_change_nothing(open_scorer: Open, mine: str, other: str) -> None:
    events = _everything(mine)
    copies = _copied(events[1:], other)
    async with open_scorer(answer) as rig:
        await rig.deliver(*events)
        alone = _last_published(rig, mine)
    assert len(alone) > len(events) / 2
    rng = random.Random(draw_seed())
    for arrival in ("before", "between", "after"):
        async with open_scorer(answer) as rig:
            if arrival == "before":
                await rig.deliver(*copies)
            for event in events:
                if arrival == "between":
                    await rig.deliver(*rng.sample(copies, rng.randint(0, len(copies))))
                await rig.stream.deliver(event)
            await rig.run_functions()
            if arrival == "after":
                await rig.deliver(*copies)
            assert _last_published(rig, mine) == alone, arrival
            assert rig.stream.sent(DeadLetter) == []


@pytest.mark.parametrize(("mine", "other"), TENANTS)
async def test_trajectory_id_of_another_tenant_is_refused_by_name(open_scorer: Open, mine: str, other: str) -> None:
    trajectory, *rest = _everything(mine)
    assert isinstance(trajectory, Trajectory)
    async with open_scorer(answer) as rig:
        await rig.deliver(trajectory, *rest)
        before = _last_published(rig, mine)
        await rig.deliver(*_copied([trajectory], other))
        assert _last_published(rig, mine) == before
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["trajectory_taken"]


async def test_prefix_of_another_tenant_is_refused_on_the_bus(open_scorer: Open) -> None:
    names = [ids.ingested_trajectory_id("a", "run-1"), ids.ingested_trajectory_id("b", "run-1"), "run-1"]
    turns = [ask([user("q")], tenant="b", turn_id=f"t{at}") for at, _ in enumerate(names)]
    sent = [
        closed(turn, tenant="b", trajectory_id=name, end_reason="ingest")
        for name, turn in zip(names, turns, strict=True)
    ]
    async with open_scorer(half) as rig:
        await rig.deliver(*sent)
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["foreign_trajectory_id"]
        assert {experience.trajectory_id for experience in rig.stream.sent(Experience)} == set(names[1:])


async def test_feedback_of_the_default_tenant_is_stored_under_its_event_id(open_scorer: Open) -> None:
    """Rows of earlier releases have this id, so a retry after an update is still the same feedback."""
    async with open_scorer() as rig:
        event = feedback()
        await rig.deliver(event, event)
        async with rig.stream.processor.database.transaction() as tx:
            assert (await tx.execute(select(schema.feedback.c.event_id))).scalars().all() == [event.event_id]
